"""One request to one replica, streamed back as it comes: the narrow seam between the proxy and whatever carries bytes.

    response = await upstream.open("POST", url, headers, body)     status and headers are there
    while chunk := await response.read(): ...                      bytes exactly as sent, whatever their encoding
    response.close()                                               always; before the end it hangs up at once

A pooled connection that turns out to be dead before a byte of answer is no fault of the replica: the request is sent
once more there. Everything else raises UpstreamError.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Literal

import aiohttp
from yarl import URL

__all__ = ["Upstream", "UpstreamError", "UpstreamResponse"]

# Below the 5 s after which common servers close an idle connection.
_IDLE_SECONDS = 4.0
# Written piece by piece, so that others get their turn.
_LARGE_BYTES = 1 << 20
_OWN_HEADERS = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")

Failure = Literal["unreachable", "broken", "timeout", "cut"]


class UpstreamError(Exception):
    """`failure` says how; the message is for people and names no secrets."""

    def __init__(self, failure: Failure, message: str) -> None:
        super().__init__(message)
        self.failure = failure


class UpstreamResponse:
    """An answer that has begun."""

    __slots__ = ("_chunk_timeout_seconds", "_cut", "_response", "_timeout_seconds", "headers", "status")

    def __init__(
        self, response: aiohttp.ClientResponse, first_byte_timeout_seconds: float, chunk_timeout_seconds: float
    ) -> None:
        self._response = response
        self._cut = False
        # Some engines send the head at once and the first byte after the prefill: the first read may take as long.
        self._timeout_seconds = first_byte_timeout_seconds
        self._chunk_timeout_seconds = chunk_timeout_seconds
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers

    @property
    def complete(self) -> bool:
        """All of the answer has been read."""
        return self._response.content.at_eof()

    async def read(self) -> bytes:
        """What has come since the last read, waiting for it if it is nothing; empty at the end of the answer."""
        content = self._response.content
        try:
            if content.at_eof():
                return b""
            async with asyncio.timeout(self._timeout_seconds):
                chunk = await content.readany()
            self._timeout_seconds = self._chunk_timeout_seconds
            return chunk
        except TimeoutError:
            raise UpstreamError("timeout", f"it sent nothing for {self._timeout_seconds:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            if self._cut:
                raise UpstreamError("cut", "it was cut off") from None
            raise UpstreamError("broken", f"its answer broke off ({_name(error)})") from None

    def cut(self) -> None:
        """Hang up while another task reads: its `read` raises UpstreamError, `cut`."""
        self._cut = True
        self._response.close()

    def close(self) -> None:
        """Hang up, unless the answer is complete; then the connection is already back in the pool."""
        self._response.close()


class Upstream:
    """A pool of connections to all replicas. Use as an async context manager."""

    def __init__(
        self, *, connect_timeout_seconds: float, first_byte_timeout_seconds: float, chunk_timeout_seconds: float
    ) -> None:
        self._connect_timeout_seconds = connect_timeout_seconds
        self._first_byte_timeout_seconds = first_byte_timeout_seconds
        self._chunk_timeout_seconds = chunk_timeout_seconds
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Upstream:
        tracing = aiohttp.TraceConfig()
        tracing.on_connection_reuseconn.append(_note_reuse)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout_seconds),
            trace_configs=[tracing],
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=_OWN_HEADERS,
            trust_env=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def open(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes, timeout_seconds: float | None = None
    ) -> UpstreamResponse:
        """Send the request and wait for the head of the answer. `url` is taken as it stands, encoded."""
        limit = timeout_seconds or self._first_byte_timeout_seconds
        target = URL(url, encoded=True)
        try:
            async with asyncio.timeout(limit):
                note = {"reused": False}
                try:
                    return await self._send(method, target, headers, body, note)
                except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                    if not note["reused"] or isinstance(error, aiohttp.ClientConnectorError):
                        raise
                    return await self._send(method, target, headers, body, note)
        except TimeoutError as error:
            if isinstance(error, aiohttp.ServerTimeoutError):
                raise UpstreamError("unreachable", "it could not be reached in time") from None
            raise UpstreamError("timeout", f"its answer did not begin within {limit:g} s") from None
        except aiohttp.ClientConnectorError as error:
            raise UpstreamError("unreachable", f"it cannot be reached ({_name(error.os_error)})") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise UpstreamError("broken", f"it broke off before answering ({_name(error)})") from None

    async def _send(
        self, method: str, url: URL, headers: Mapping[str, str], body: bytes, note: dict[str, Any]
    ) -> UpstreamResponse:
        data = io.BytesIO(body) if len(body) > _LARGE_BYTES else body or None
        response = await self._session.request(
            method, url, data=data, headers=headers, allow_redirects=False, trace_request_ctx=note
        )
        return UpstreamResponse(response, self._first_byte_timeout_seconds, self._chunk_timeout_seconds)


async def _note_reuse(session: aiohttp.ClientSession, context: SimpleNamespace, params: object) -> None:
    context.trace_request_ctx["reused"] = True


def _name(error: BaseException | None) -> str:
    return type(error).__name__
