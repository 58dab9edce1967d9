"""The HTTP of sessions. Each tenant (`x-warmroute-tenant`) sees, restores and deletes its own alone.

POST   /sessions/<name>/save       body: a chat or completion request, or (?api=messages) an Anthropic one; only its
                                   prompt counts. Saves what the cache holds of it. ?kv=int8 for a smaller file.
POST   /sessions/<name>/restore    no body
GET    /sessions  /sessions/<name>
DELETE /sessions/<name>

409 session_mismatch               made for another model, tokenizer, template, number format, block size ...
422 session_damaged                not, or not any more, what was written
503 not_enough_room                in the KV pool, now; 409 session_too_large: ever
409 nothing_to_save                the cache holds nothing of this prompt
507 sessions_full                  the folder has no room
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from replica.engine import EngineStopped
from replica.guests import GuestLost, NotEnoughRoom
from replica.kv_layout import ENCODINGS, UnsupportedEncoding
from replica.metrics import ReplicaMetrics
from replica.service import Service
from replica.session_file import DamagedSession
from replica.session_store import InvalidSessionName, SessionNotFound, StoredSession, StoreFull
from replica.sessions import NothingToSave, SessionMismatch, Sessions, TooManySessionsAtOnce
from shared.api import MESSAGES_PATH, ApiError, parse_routing, parse_tokenize
from shared.api_errors import invalid_value, not_ready
from shared.prompts import PromptInput
from shared.tenant_proof import TENANT_HEADER

__all__ = ["SessionRoutes"]

_RETRY_SECONDS = 2.0

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_logger = logging.getLogger(__name__)


class SessionRoutes:
    """`service` and `sessions` give what there is by now, or raise ApiError."""

    def __init__(
        self, service: Callable[[], Service], sessions: Callable[[], Sessions], metrics: ReplicaMetrics
    ) -> None:
        self._service = service
        self._sessions = sessions
        self._metrics = metrics

    def routes(self) -> list[web.RouteDef]:
        # An empty name, too, is to hear what a name is.
        one = "/sessions/{name:[^/]*}"
        return [
            web.get("/sessions", self._answering(self._list)),
            web.get(one, self._answering(self._show)),
            web.delete(one, self._answering(self._delete, "delete")),
            web.post(f"{one}/save", self._answering(self._save, "save")),
            web.post(f"{one}/restore", self._answering(self._restore, "restore")),
        ]

    async def _save(self, request: web.Request) -> web.StreamResponse:
        sessions, service = self._sessions(), self._service()
        encoding = request.query.get("kv", "raw")
        if encoding not in ENCODINGS:
            raise invalid_value("kv", f"must be one of {', '.join(ENCODINGS)}")
        model, prompt = _prompt_of(request.query.get("api", ""), await request.read())
        service.check_model(model or service.model.name)
        encoded = await service.encode(prompt)
        began = time.monotonic()
        saved = await sessions.save(_tenant(request), request.match_info["name"], encoded.token_ids, encoding)
        tokens = saved.header.tokens if saved.header is not None else 0
        self._metrics.observe_session("save", time.monotonic() - began, tokens)
        return _json(self._document(saved, request) | {"prompt_tokens": encoded.token_count})

    async def _restore(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        began = time.monotonic()
        restored = await self._sessions().restore(_tenant(request), name)
        self._metrics.observe_session("restore", time.monotonic() - began, restored.tokens)
        return _json({"name": name} | restored._asdict())

    async def _list(self, request: web.Request) -> web.StreamResponse:
        sessions = self._sessions()
        stored = await sessions.all(_tenant(request))
        return _json(
            {
                "sessions": [self._document(session, request) for session in stored],
                "file_bytes": sum(session.file_bytes for session in stored),
                "most_bytes": sessions.store.most_bytes,
            }
        )

    async def _show(self, request: web.Request) -> web.StreamResponse:
        session = await self._sessions().get(_tenant(request), request.match_info["name"])
        return _json(self._document(session, request))

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        await self._sessions().delete(_tenant(request), name)
        return _json({"name": name, "deleted": True})

    def _document(self, session: StoredSession, request: web.Request) -> dict[str, Any]:
        document: dict[str, Any] = {"name": session.name, "file_bytes": session.file_bytes}
        header = session.header
        if header is None:
            return document | {"refused": session.damage}
        return document | {
            "tokens": header.tokens,
            "blocks": header.blocks,
            "kv": header.encoding,
            "created_at": header.created_at,
            "refused": self._sessions().mismatch(header, _tenant(request)),
        }

    def _answering(self, handler: _Handler, operation: str = "") -> _Handler:
        """What is an `operation` is counted, with its outcome."""

        async def answer(request: web.Request) -> web.StreamResponse:
            outcome = "aborted"
            try:
                response = await handler(request)
                outcome = "ok"
                return response
            except Exception as error:
                told = _api_error(error)
                outcome = told.code if isinstance(told, ApiError) else "internal_error"
                raise told from error
            finally:
                if operation:
                    self._metrics.count_session(operation, outcome)

        return answer


def _prompt_of(api: str, body: bytes) -> tuple[str, PromptInput]:
    if api == "messages":
        routing = parse_routing(MESSAGES_PATH, body)
        return routing.model, routing.prompt
    if api:
        raise invalid_value("api", "must be messages, or left out for a chat or completion request")
    parsed = parse_tokenize(body)
    return parsed.model, parsed.prompt


def _tenant(request: web.Request) -> str:
    return request.headers.get(TENANT_HEADER, "")


def _api_error(error: Exception) -> Exception:
    """What the client is told. Whatever is no matter of sessions stays what it is."""
    message = str(error)
    match error:
        case InvalidSessionName():
            return ApiError(400, "invalid_session_name", message, param="name")
        case UnsupportedEncoding():
            return ApiError(400, "unsupported_parameter", message, param="kv")
        case SessionNotFound():
            return ApiError(404, "session_not_found", "there is no session of this name: GET /sessions lists yours")
        case NothingToSave():
            message = "the cache holds nothing of this prompt yet: send it (max_tokens may be 1), then save it"
            return ApiError(409, "nothing_to_save", message)
        case SessionMismatch():
            return ApiError(409, "session_mismatch", f"the session cannot be used here: {message}")
        case DamagedSession():
            return ApiError(422, "session_damaged", f"the session's file is refused: {message}")
        case NotEnoughRoom() if error.forever:
            return ApiError(
                409,
                "session_too_large",
                f"the session cannot be restored: {message}; start the replica with more --blocks",
            )
        case NotEnoughRoom():
            return ApiError(
                503,
                "not_enough_room",
                f"the session cannot be restored now: {message}; retry later",
                retry_after_seconds=_RETRY_SECONDS,
            )
        case StoreFull():
            return ApiError(507, "sessions_full", message)
        case TooManySessionsAtOnce():
            return ApiError(429, "too_many_sessions", message, retry_after_seconds=_RETRY_SECONDS)
        case GuestLost():
            return ApiError(503, "cache_started_over", message, retry_after_seconds=_RETRY_SECONDS)
        case EngineStopped():
            return not_ready(f"{message}: use another replica, or retry later")
        case OSError():
            _logger.error("the sessions' folder cannot be used: %s", error.strerror)
            return ApiError(507, "sessions_unusable", f"the sessions' folder cannot be used: {error.strerror}")
    return error


def _json(document: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(document), content_type="application/json")
