"""The replica's HTTP: paths, headers, streams, and errors in the dialect of the path.

Handlers are cancelled when their client goes, at whatever await they are; the answer they read is then aborted on the
way out. A stream's headers go out with its first token, so that they can tell how much of the prompt was cached.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace

import msgspec
from aiohttp import HttpVersion10, HttpVersion11, web
from prometheus_client import CONTENT_TYPE_LATEST

from replica.answer import Part
from replica.cache_routes import CacheRoutes
from replica.callers import Callers
from replica.choices import Choices
from replica.metrics import ReplicaMetrics
from replica.responses import Head, Response, response_of
from replica.service import Service
from replica.session_routes import SessionRoutes
from replica.sessions import Sessions
from shared.api import (
    COUNT_TOKENS_PATH,
    GENERATION_PATHS,
    ApiError,
    TokenizeRequest,
    dialect_of,
    parse_count_tokens,
    parse_generation,
    parse_tokenize,
)
from shared.api_errors import (
    body_too_large,
    expectation_failed,
    internal_error,
    method_not_allowed,
    not_ready,
    path_not_found,
    shutting_down,
    version_not_supported,
)
from shared.prompts import EncodedPrompt
from shared.tenant_proof import TENANT_HEADER

__all__ = ["ReplicaApplication"]

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_SANE_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_EXPECT_CACHED = "x-warmroute-expect-cached-tokens"
_MOST_DIGITS = 10
_VERSIONS = (HttpVersion10, HttpVersion11)
_REQUEST_ID = web.RequestKey("request_id", str)
_FAILURE = web.RequestKey("failure", ApiError)
"""Why a stream that had begun was broken off."""

_logger = logging.getLogger(__name__)


class ReplicaApplication:
    """`service` is None while the model loads; everything but `/health`, `/version` and `/metrics` is 503 till then."""

    def __init__(
        self,
        replica_id: str,
        version: str,
        metrics: ReplicaMetrics,
        max_body_bytes: int,
        admin_key: str = "",
        callers: Callers | None = None,
    ) -> None:
        self.service: Service | None = None
        self.sessions: Sessions | None = None
        self._replica_id = replica_id
        self._version = version
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._admin_key = admin_key
        self._callers = callers or Callers()
        self._started_at = int(time.time())

    def build(self) -> web.Application:
        application = web.Application(
            middlewares=[self._answer_errors, self._callers.middleware], client_max_size=self._max_body_bytes
        )
        application.on_response_prepare.append(self._add_headers)
        application.add_routes(
            [
                *(web.post(path, self._generate) for path in GENERATION_PATHS),
                web.post(COUNT_TOKENS_PATH, self._count_tokens),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{id:.+}", self._model),
                web.post("/tokenize", self._tokenize),
                web.get("/health", self._health),
                web.get("/ready", self._ready),
                web.get("/metrics", self._render_metrics),
                web.get("/version", self._show_version),
                *CacheRoutes(self._loaded, self._admin_key).routes(),
                *SessionRoutes(self._serving, self._saved_sessions, self._metrics).routes(),
            ]
        )
        return application

    def _loaded(self) -> Service:
        if self.service is None:
            raise not_ready("the model is still loading: wait until /ready answers 200")
        return self.service

    def _serving(self) -> Service:
        service = self._loaded()
        if service.draining:
            raise shutting_down()
        return service

    def _saved_sessions(self) -> Sessions:
        self._loaded()
        if self.sessions is None:
            raise ApiError(
                404, "sessions_disabled", "no sessions are saved here: start the replica with --sessions DIR"
            )
        return self.sessions

    # -- generation ------------------------------------------------------------------------------------------------

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        service = self._serving()
        parsed = parse_generation(request.path, await request.read())
        service.check_model(parsed.routing.model)
        encoded = await service.encode(parsed.routing.prompt)
        head = Head(_request_id(request), service.model.name, int(time.time()))
        shape = response_of(request.path, head, parsed, service.bytes_of)
        tenant, expected = request.headers.get(TENANT_HEADER, ""), _expected_cached_tokens(request)
        with service.answer(parsed, encoded, tenant, expected) as choices:
            first = await choices.next()
            if (failure := _failure(first)) is not None:
                raise failure
            if parsed.routing.stream:
                return await _stream(request, choices, first, shape)
            return await _whole(choices, first, shape)

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        encoded = await self._encode(parse_tokenize(await request.read()))
        return _json(
            {
                "tokens": encoded.token_ids,
                "count": encoded.token_count,
                "max_model_len": self._loaded().model.context_tokens,
            }
        )

    async def _count_tokens(self, request: web.Request) -> web.StreamResponse:
        encoded = await self._encode(parse_count_tokens(await request.read()))
        return _json({"input_tokens": encoded.token_count})

    async def _encode(self, wanted: TokenizeRequest) -> EncodedPrompt:
        service = self._loaded()
        service.check_model(wanted.model or service.model.name)
        return await service.encode(wanted.prompt)

    # -- what there is and how it is doing ---------------------------------------------------------------------------

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return _json({"object": "list", "data": [self._card()]})

    async def _model(self, request: web.Request) -> web.StreamResponse:
        self._loaded().check_model(request.match_info["id"])
        return _json(self._card())

    def _card(self) -> dict[str, object]:
        model = self._loaded().model
        return {
            "id": model.name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "warmroute",
            "max_model_len": model.context_tokens,
        }

    async def _health(self, request: web.Request) -> web.StreamResponse:
        if self.service is not None and not self.service.engine.alive:
            raise ApiError(500, "engine_dead", "the engine's thread has ended: restart this replica")
        return _json({"status": "ok"})

    async def _ready(self, request: web.Request) -> web.StreamResponse:
        self._serving()
        return _json({"status": "ready"})

    async def _render_metrics(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=self._metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _show_version(self, request: web.Request) -> web.StreamResponse:
        return _json({"version": self._version})

    # -- around every request ----------------------------------------------------------------------------------------

    async def _add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        if isinstance(response, web.HTTPExpectationFailed):  # raised before any of our handlers
            response.body = body = expectation_failed().body(dialect_of(request.path), _request_id(request))
            response.headers["Content-Type"] = "application/json"
            response.headers["Content-Length"] = str(len(body))
        response.headers["x-request-id"] = _request_id(request)
        if dialect_of(request.path) == "anthropic":
            response.headers["request-id"] = _request_id(request)
        response.headers["x-warmroute-replica"] = self._replica_id

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        outcome = "aborted"
        try:
            if request.version not in _VERSIONS:
                raise version_not_supported()
            response = await handler(request)
            outcome = failure.code if (failure := request.get(_FAILURE)) is not None else "ok"
            return response
        except ConnectionResetError:  # while writing
            return web.Response()  # that nobody reads
        except Exception as raised:
            error = self._api_error(raised, request)
            outcome = error.code
            return _error_response(error, request)
        finally:
            if request.path in GENERATION_PATHS:
                self._metrics.count(request.path, outcome)

    def _api_error(self, raised: Exception, request: web.Request) -> ApiError:
        match raised:
            case ApiError():
                return raised
            case web.HTTPRequestEntityTooLarge():
                return body_too_large(self._max_body_bytes)
            case web.HTTPMethodNotAllowed():
                return method_not_allowed(raised.method, raised.allowed_methods)
            case web.HTTPNotFound():
                return path_not_found(request.path)
            case web.RequestPayloadError():
                return ApiError(400, "invalid_body", f"the request body cannot be read: {raised}")
            case _:
                _logger.error("a request failed: %s %s", request.method, request.path, exc_info=raised)
                return internal_error()


async def _whole(choices: Choices, parts: list[Part], shape: Response) -> web.Response:
    grown: dict[int, list[Part]] = {}
    while True:
        for part in parts:
            grown.setdefault(part.index, []).append(part)
        if choices.finished:
            break
        parts = await choices.next()
        if (failure := _failure(parts)) is not None:
            raise failure
    usage = choices.usage
    response = _json_bytes(shape.whole([_joined(grown[index]) for index in sorted(grown)], usage))
    response.headers["x-warmroute-cached-tokens"] = str(usage.cached_tokens)
    return response


async def _stream(request: web.Request, choices: Choices, parts: list[Part], shape: Response) -> web.StreamResponse:
    """One write for all that came; while the client is slow, parts grow instead of waiting one behind the other."""
    response = web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",
            "x-warmroute-cached-tokens": str(choices.usage.cached_tokens),
        }
    )
    await response.prepare(request)
    frames = shape.opening(choices.usage)
    while True:
        failure = _failure(parts)
        shown = parts if failure is None else [replace(part, finish=None) for part in parts]
        frames += b"".join([shape.delta(part, choices.usage) for part in shown])
        if failure is not None:
            request[_FAILURE] = failure
            frames += shape.failure(failure)
            break
        if choices.finished:
            frames += shape.closing(choices.usage)
            break
        if frames:
            await response.write(frames)
        parts, frames = await choices.next(), b""
    await response.write(frames)
    await response.write_eof()
    return response


def _failure(parts: list[Part]) -> ApiError | None:
    """Why the request cannot be answered any more: one of its answers cannot."""
    failures = (part.finish.failure for part in parts if part.finish is not None)
    return next((failure for failure in failures if failure is not None), None)


def _joined(parts: list[Part]) -> Part:
    """An answer's parts as one."""
    tokens = tuple(token for part in parts for token in part.tokens)
    return Part("".join(part.text for part in parts), parts[-1].finish, tokens, parts[-1].index)


def _expected_cached_tokens(request: web.Request) -> int:
    """How much of the prompt the sender believes to be in the cache; 0 if it does not say."""
    given = request.headers.get(_EXPECT_CACHED, "0")
    if not (given.isascii() and given.isdecimal()) or len(given) > _MOST_DIGITS:
        raise ApiError(400, "invalid_header", f"{_EXPECT_CACHED} must be a number of tokens", param=_EXPECT_CACHED)
    return int(given)


def _request_id(request: web.Request) -> str:
    """The client's, if it is sane; else one of ours, the same each time."""
    if _REQUEST_ID not in request:
        given = request.headers.get("x-request-id", "")
        request[_REQUEST_ID] = given if _SANE_REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
    return request[_REQUEST_ID]


def _error_response(error: ApiError, request: web.Request) -> web.Response:
    body = error.body(dialect_of(request.path), _request_id(request))
    response = _json_bytes(body, error.status)
    response.headers.update(error.headers())
    return response


def _json(document: object) -> web.Response:
    return _json_bytes(msgspec.json.encode(document))


def _json_bytes(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")
