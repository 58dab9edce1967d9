"""Saving what the cache holds of a prompt, and bringing it back: between the engine, a portion at a time, and the disk.

    save      engine: hold the blocks     -> [ engine: read a portion -> encode -> write ] ...  -> sync, rename
    restore   file: check header, tokens  -> engine: expect them
              -> [ read a portion -> check its seal -> decode -> engine: write it ] ...         -> engine: settle

Each save or restore runs in a worker thread from start to end, even if its client leaves; the engine's thread only
copies portions between steps. A restore that fails at any point leaves nothing behind: before it is settled, nobody
can find its blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

from replica.engine import Engine, EngineStopped
from replica.guests import Guests
from replica.kv_layout import KVLayout, encoding_of
from replica.sequence import Sequence
from replica.session_file import DamagedSession, SessionHeader
from replica.session_store import SessionStore, StoredSession, check_session_name
from shared.public_prefixes import PublicPrefixes
from shared.telemetry import fields

__all__ = ["NothingToSave", "RestoredSession", "SessionMismatch", "SessionModel", "Sessions", "TooManySessionsAtOnce"]

_WORKERS = 2
_MOST_AT_ONCE = 16
"""Running and waiting; more are refused."""
_PORTION_BYTES = 4 * 2**20
"""What the engine copies between two steps: a millisecond or two."""
_ENGINE_SECONDS = 120.0
"""A step takes less, or the engine is gone."""

_ROUNDED = (
    "it is rounded to int8 and begins with blocks that all tenants share, which only exact ones may fill: "
    "send a request with that beginning first"
)

_P = ParamSpec("_P")
_T = TypeVar("_T")
_logger = logging.getLogger(__name__)


class NothingToSave(Exception):  # noqa: N818 - a state, not a mistake
    """The cache holds nothing of this prompt."""


class SessionMismatch(Exception):  # noqa: N818 - says what differs
    """The session was made by, or for, something else than this replica and this tenant."""


class TooManySessionsAtOnce(Exception):  # noqa: N818 - a state, not a mistake
    """As many are being saved and restored as may be. Try again later."""


@dataclass(frozen=True, slots=True)
class SessionModel:
    """What must be equal for the KV of a session to be of use here."""

    weights: str
    tokenizer: str
    template: str
    layout: KVLayout
    prefixes: PublicPrefixes


class RestoredSession(NamedTuple):
    tokens: int
    blocks: int
    """Full ones that requests can hit now."""
    written_blocks: int
    """The others were in the cache already."""


class Sessions:
    """Belongs to one event loop. Names are checked first: every method raises InvalidSessionName."""

    def __init__(self, store: SessionStore, engine: Engine, model: SessionModel) -> None:
        self.store = store
        self._engine = engine
        self._model = model
        self._workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="session")
        self._places = threading.BoundedSemaphore(_MOST_AT_ONCE)
        self._closing = threading.Event()

    async def save(self, tenant: str, name: str, token_ids: list[int], encoding: str = "raw") -> StoredSession:
        """What the cache holds of the prompt's beginning. Raises NothingToSave, StoreFull, UnsupportedEncoding,
        TooManySessionsAtOnce, GuestLost, EngineStopped, OSError."""
        check_session_name(name)
        return await self._work(lambda: self._save(tenant, name, token_ids, encoding))

    async def restore(self, tenant: str, name: str) -> RestoredSession:
        """All of it or nothing. Raises SessionNotFound, SessionMismatch, DamagedSession, NotEnoughRoom,
        TooManySessionsAtOnce, GuestLost, EngineStopped, OSError."""
        check_session_name(name)
        return await self._work(lambda: self._restore(tenant, name))

    async def all(self, tenant: str) -> list[StoredSession]:
        return await asyncio.to_thread(self.store.sessions, tenant)

    async def get(self, tenant: str, name: str) -> StoredSession:
        """Raises SessionNotFound."""
        return await asyncio.to_thread(self.store.session, tenant, name)

    async def delete(self, tenant: str, name: str) -> None:
        """The file alone: what is in the cache stays there. Raises SessionNotFound."""
        await asyncio.to_thread(self.store.delete, tenant, name)

    async def close(self) -> None:
        """Break off what runs, and wait for that. The engine still runs."""
        self._closing.set()
        await asyncio.to_thread(self._workers.shutdown, cancel_futures=True)

    def mismatch(self, header: SessionHeader, tenant: str) -> str | None:
        """Why a session cannot be restored here, if so."""
        mine = self._model
        theirs: dict[str, tuple[object, object]] = {
            "weights": (header.weights, mine.weights),
            "tokenizer": (header.tokenizer, mine.tokenizer),
            "chat template": (header.template, mine.template),
        }
        for field in mine.layout.__struct_fields__:
            theirs[field.replace("_", " ")] = (getattr(header.layout, field), getattr(mine.layout, field))
        reasons = [
            f"its {what} is {its!s:.200}, ours {ours!s:.200}" for what, (its, ours) in theirs.items() if its != ours
        ]
        if header.tenant != self.store.tenant_id(tenant):
            reasons.append("it belongs to another tenant")
        return "; ".join(reasons) or None

    async def _work(self, job: Callable[[], _T]) -> _T:
        if not self._places.acquire(blocking=False):
            raise TooManySessionsAtOnce(f"{_MOST_AT_ONCE} sessions are being saved or restored: try again later")
        try:
            future = self._workers.submit(job)
        except RuntimeError:  # closed
            self._places.release()
            raise EngineStopped("the replica is shutting down") from None
        future.add_done_callback(lambda _: self._places.release())
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if self._closing.is_set() and future.cancelled():
                raise EngineStopped("the replica is shutting down") from None
            raise

    # -- in a worker thread ----------------------------------------------------------------------------------------

    def _save(self, tenant: str, name: str, token_ids: list[int], encoding: str) -> StoredSession:
        began = time.perf_counter()
        codec = encoding_of(encoding, self._model.layout)
        namespace = self._model.prefixes.namespace(tenant, token_ids)
        guest = self._ask(Guests.hold, token_ids, namespace.root, namespace.branch)
        if guest is None:
            raise NothingToSave
        with self._leaving(guest):
            header = self._header(tenant, len(guest.tokens), encoding, codec.stored_block_bytes)
            with self.store.writing(tenant, name, header, guest.tokens) as writer:
                for first in range(0, header.blocks, header.portion_blocks):
                    last = min(first + header.portion_blocks, header.blocks)
                    writer.add(codec.encode(self._ask(Guests.read, guest, first, last)))
        saved = self.store.session(tenant, name)
        _log("a session was saved", header.tokens, saved.file_bytes, began)
        return saved

    def _restore(self, tenant: str, name: str) -> RestoredSession:
        began = time.perf_counter()
        with self.store.reading(tenant, name) as reader:
            header = reader.header
            if (mismatch := self.mismatch(header, tenant)) is not None:
                raise SessionMismatch(mismatch)
            codec = encoding_of(header.encoding, self._model.layout)
            if header.stored_block_bytes != codec.stored_block_bytes:
                raise DamagedSession("its blocks have another length than blocks like these have")
            token_ids = reader.token_ids()
            namespace = self._model.prefixes.namespace(tenant, token_ids)
            guest = self._ask(Guests.expect, token_ids, namespace.root, namespace.branch)
            with self._leaving(guest):
                held = guest.registered_blocks
                if header.encoding == "int8" and held < self._model.prefixes.shared_blocks(token_ids):
                    raise SessionMismatch(_ROUNDED)
                for portion in reader.portions():
                    skipped = max(0, held - portion.first_block)
                    missing = portion.stored[skipped * codec.stored_block_bytes :]
                    if missing:
                        self._ask(Guests.write, guest, portion.first_block + skipped, codec.decode(missing))
                blocks = self._ask(Guests.settle, guest)
        _log("a session was restored", header.tokens, header.blocks * header.stored_block_bytes, began)
        return RestoredSession(header.tokens, blocks, header.blocks - held)

    def _header(self, tenant: str, tokens: int, encoding: str, stored_block_bytes: int) -> SessionHeader:
        model = self._model
        return SessionHeader(
            weights=model.weights,
            tokenizer=model.tokenizer,
            template=model.template,
            layout=model.layout,
            tenant=self.store.tenant_id(tenant),
            tokens=tokens,
            encoding="int8" if encoding == "int8" else "raw",
            stored_block_bytes=stored_block_bytes,
            portion_blocks=max(1, _PORTION_BYTES // model.layout.block_bytes),
            created_at=time.time(),
            package_version=version("warmroute"),
        )

    @contextlib.contextmanager
    def _leaving(self, guest: Sequence) -> Iterator[None]:
        try:
            yield
        finally:
            with contextlib.suppress(EngineStopped):
                self._engine.visit(Guests.leave, guest)

    def _ask(self, question: Callable[Concatenate[Guests, _P], _T], *arguments: _P.args, **named: _P.kwargs) -> _T:
        """Between two of the engine's steps."""
        if self._closing.is_set():
            raise EngineStopped("the replica is shutting down")
        answer = self._engine.visit(question, *arguments, **named)
        try:
            return answer.result(_ENGINE_SECONDS)
        except TimeoutError:
            if answer.cancel():  # else it is being answered just now
                raise EngineStopped("the engine does not answer") from None
            return answer.result(_ENGINE_SECONDS)


def _log(what: str, tokens: int, size: int, began: float) -> None:
    seconds = round(time.perf_counter() - began, 3)
    _logger.info(what, extra=fields(tokens=tokens, bytes=size, seconds=seconds))
