"""What became of each request: answered whole, told clearly that it was not, or lost. Tests account for all of them."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import aiohttp

from tests.helpers import eventually

__all__ = ["Answer", "Load", "asked"]

_PATIENCE_SECONDS = 60.0
_CLIENTS = 8


class Answer:
    """`whole`: to its last byte as it should be. `told`: broken off, and the stream says so as the API does.
    `refused`: with a status and the API's error object. All others are lost.
    """

    def __init__(self, status: int, replica: str, body: bytes) -> None:
        self.status = status
        self.replica = replica
        self.body = body
        ended = body.endswith((b"data: [DONE]\n\n", b"}"))
        self.whole = status == 200 and ended and b'"error"' not in body
        codes = (b'"replica_failed"', b'"shutting_down"')
        self.told = status == 200 and body.endswith(b"data: [DONE]\n\n") and any(code in body for code in codes)
        self.refused = status >= 400 and _is_error(body)
        self.lost = not (self.whole or self.told or self.refused)

    def __repr__(self) -> str:
        return f"<{self.status} from {self.replica or 'nobody'}: {self.body[-300:]!r}>"


async def asked(
    client: aiohttp.ClientSession,
    url: str,
    *,
    stream: bool = True,
    tokens: int = 20,
    number: int = 0,
    model: str = "tiny",
) -> Answer:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"request {number} " * 30}],
        "max_tokens": tokens,
        "stream": stream,
    }
    async with client.post(url + "/v1/chat/completions", json=body) as response:
        return Answer(response.status, response.headers.get("x-warmroute-replica", ""), await response.read())


class Load:
    """Eight clients that ask one request after the other, streamed and whole in turn, until the end of the block."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self.answers: list[Answer] = []
        self.cut: Counter[str] = Counter()
        """Connections that ended without a whole answer, by what the client's library calls it."""

    async def __aenter__(self) -> Load:
        timeout = aiohttp.ClientTimeout(total=_PATIENCE_SECONDS)
        self._client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)
        self._tasks = [asyncio.create_task(self._ask_on(number)) for number in range(_CLIENTS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping = True
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                await asyncio.gather(*self._tasks)
        finally:
            await self._client.close()

    @property
    def not_whole(self) -> list[Answer]:
        return [answer for answer in self.answers if not answer.whole]

    async def answered(self, count: int, by: str = "") -> None:
        """Until that many more whole answers have come, from that replica."""
        seen = len(self.answers)
        await eventually(
            lambda: sum(each.whole and by in ("", each.replica) for each in self.answers[seen:]) >= count,
            30,
            f"{count} more answers",
        )

    async def _ask_on(self, number: int) -> None:
        turn = 0
        while not self._stopping:
            try:
                answer = await asked(self._client, self._url, stream=turn % 2 == 0, number=100 * number + turn)
                self.answers.append(answer)
            except aiohttp.ClientError as error:
                self.cut[type(error).__name__] += 1
                await asyncio.sleep(0.01)  # where nobody listens, asking again at once only heats the machine
            turn += 1


def _is_error(body: bytes) -> bool:
    try:
        error = json.loads(body)["error"]
        return bool(error["code"] and error["message"])
    except (ValueError, KeyError, TypeError):
        return False
