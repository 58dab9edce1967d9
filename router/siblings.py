"""What workers of one router ask each other, over sockets that only they can reach.

    answers = await siblings.ask("metrics")          by worker; who does not answer in time is left out

Each listens on `FOLDER/<number>`. A question is `[name, argument]` in MessagePack, up to the end of its sending; the
answer is what comes back. The folder is open to its owner alone, so whoever asks is one of us.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

__all__ = ["Siblings"]

_PATIENCE_SECONDS = 2.0
_MOST_QUESTION_BYTES = 65_536

_logger = logging.getLogger(__name__)

Answerer = Callable[[bytes], bytes]

_decode = msgspec.msgpack.Decoder(tuple[str, bytes]).decode


class Siblings:
    """Worker `number` of `count`. Whoever can answer a question registers for it before `start`."""

    def __init__(self, folder: Path, number: int, count: int) -> None:
        self.number = number
        self._paths = {other: str(folder / str(other)) for other in range(count)}
        self._answerers: dict[str, Answerer] = {}
        self._server: asyncio.Server

    def register(self, question: str, answerer: Answerer) -> None:
        self._answerers[question] = answerer

    async def start(self) -> None:
        # What a worker left that was here before, and ended without a word, is replaced.
        self._server = await asyncio.start_unix_server(self._answer, self._paths[self.number])

    async def stop(self) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def ask(self, question: str, argument: bytes = b"") -> dict[int, bytes]:
        """All others at once."""
        asked = msgspec.msgpack.encode((question, argument))
        others = [number for number in self._paths if number != self.number]
        answers = await asyncio.gather(*(self._ask_one(self._paths[number], asked) for number in others))
        return {number: answer for number, answer in zip(others, answers, strict=True) if answer is not None}

    async def _ask_one(self, path: str, asked: bytes) -> bytes | None:
        """None where it is not there, or too busy: it is about to be started again, or stopped."""
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                reader, writer = await asyncio.open_unix_connection(path)
                try:
                    writer.write(asked)
                    writer.write_eof()
                    return await reader.read() or None
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return None

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                question, argument = _decode(await reader.read(_MOST_QUESTION_BYTES))
                writer.write(self._answerers[question](argument))
                await writer.drain()
        except (OSError, TimeoutError):
            _logger.warning("another worker's question was not answered in time")
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
