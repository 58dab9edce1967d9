"""What a client asks, and what the router answers by itself: the seam between handlers and the client's connection.

body = await request.read()                 the body as it came; ApiError 413, 408 or 400 where there is none
request.header(b"authorization")            its first value, or None
return Response(200, b"{}")                 or None, once something has been written to `request.connection`
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import unquote

if TYPE_CHECKING:
    from router.client_connection import ClientConnection
    from router.http1 import RequestHead

__all__ = ["ClientRequest", "Handler", "Response"]


@dataclass(slots=True)
class Response:
    """One that is there as a whole. `headers` are safe to write: see `headers.safe_value`."""

    status: int = 200
    body: bytes = b""
    content_type: str = "application/json"
    headers: list[tuple[str, str]] = field(default_factory=list)


class ClientRequest:
    """A request whose head has come; its body may still be on the way."""

    __slots__ = (
        "body",
        "connection",
        "fields",
        "headers",
        "method",
        "modern",
        "path",
        "persistent",
        "target",
        "tenant",
    )

    def __init__(self, head: RequestHead, connection: ClientConnection) -> None:
        self.connection = connection
        self.method = head.method
        self.target = head.target
        """Path and query as they came, encoded."""
        path = head.target.partition("?")[0]
        self.path = unquote(path, errors="replace") if "%" in path else path
        """Decoded, without the query."""
        self.headers = head.headers
        """Names and values as they came."""
        self.fields = head.fields
        """The first value of each header by its name in lower case."""
        self.modern = head.modern
        """HTTP/1.1, not 1.0."""
        self.persistent = head.persistent
        """The client would send more on this connection."""
        self.tenant = ""
        """Whose API key came with it; empty where no keys are asked for."""
        self.body: bytes | None = None
        """None while it is on the way: see `read`."""

    def header(self, name: bytes) -> bytes | None:
        """The first value of that (lower-case) name."""
        return self.fields.get(name)

    @property
    def peer(self) -> str:
        """The client's address, or that of whatever stands before the router."""
        return self.connection.peer

    async def read(self) -> bytes:
        """The body as it came. Raises ApiError 413 when it is too long, 408 when it does not go on, 400 when broken."""
        if self.body is None:
            self.body = await self.connection.read_body()
        return self.body


Handler = Callable[[ClientRequest], Awaitable[Response | None]]
"""Returns the answer, or None where it has already written one."""
