"""Method and path -> handler. The server calls this; there is no framework between it and the handlers."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable

from router.admission import Admission
from router.api_keys import ApiKeys
from router.client_request import ClientRequest, Handler, Response
from router.control import Control
from router.dashboard.dashboard import Dashboard
from router.exchange import error_response
from router.headers import RequestIds
from router.metrics import RouterMetrics
from router.proxy import Proxy
from shared.api import COUNT_TOKENS_PATH, GENERATION_PATHS, ApiError
from shared.api_errors import internal_error, method_not_allowed, path_not_found

__all__ = ["Dispatcher"]

_logger = logging.getLogger(__name__)
_DRAIN_PATH = re.compile(r"/replicas/(?P<id>[^/]+)/(?P<verb>drain|undrain)")
_DOTS = re.compile(r"[/\\]\.\.?(?:[/\\;]|\Z)")
"""Segments that some servers resolve, also behind a backslash or before a parameter: what is behind is elsewhere."""
_ONE_MODEL = "/v1/models/"
_PASSED_THROUGH = "/v1/"
_WITHOUT_KEY = frozenset(
    {"/health", "/ready", "/metrics", "/version", "/replicas", "/dashboard", "/dashboard/data", "*"}
)
"""And the admin paths, which ask for a key of their own."""


class Dispatcher:
    """The server's one handler. Every error is an API error in the dialect of its path."""

    def __init__(
        self,
        proxy: Proxy,
        control: Control,
        dashboard: Dashboard,
        metrics: RouterMetrics,
        admission: Admission,
        api_keys: ApiKeys | None = None,
    ) -> None:
        """Without `api_keys` every path is open, but for the admin paths."""
        self._api_keys = api_keys
        self._admission = admission
        self._metrics = metrics
        self._proxy = proxy
        self._control = control
        self._ids = RequestIds()
        self._generating = frozenset(GENERATION_PATHS)
        self._routes: dict[str, dict[str, Handler]] = {
            "/v1/models": {"GET": control.models},
            "/health": {"GET": control.health},
            "/ready": {"GET": control.ready},
            "/metrics": {"GET": control.metrics},
            "/version": {"GET": control.version},
            "/replicas": {"GET": control.replicas},
            "/dashboard": {"GET": dashboard.page},
            "/dashboard/data": {"GET": dashboard.data},
            "/route": {"POST": self._route},
            "/tokenize": {"POST": self._tokenize},
            COUNT_TOKENS_PATH: {"POST": self._count_tokens},
        }

    async def __call__(self, request: ClientRequest) -> Response | None:
        path, method = request.path, request.method
        try:
            if self._api_keys is not None and path not in _WITHOUT_KEY and not _DRAIN_PATH.fullmatch(path):
                request.tenant = self._api_keys.tenant_of(
                    request.header(b"authorization"), request.header(b"x-api-key")
                )
            if method == "POST" and path in self._generating:
                return await self._proxy.generate(request)
            return await self._handler(method, path)(request)
        except ApiError as error:
            self._metrics.refused(path, error.code, error.status)
            return error_response(error, path, self._ids.of(request.header(b"x-request-id")))
        except ConnectionError:
            raise
        except Exception:
            _logger.exception("a request failed: %s", path)
            return error_response(internal_error(), path, self._ids.of(request.header(b"x-request-id")))

    def _handler(self, method: str, path: str) -> Handler:
        if path == "*" and method == "OPTIONS":
            return _options(["GET", "POST"])
        if path in self._generating:
            return _other_than(method, ["POST"])
        if (by_method := self._routes.get(path)) is not None:
            handler = by_method.get("GET" if method == "HEAD" else method)
            return handler or _other_than(method, by_method)
        if (match := _DRAIN_PATH.fullmatch(path)) is not None:
            if method != "POST":
                return _other_than(method, ["POST"])
            return lambda request: self._control.drain(request, match["id"], draining=match["verb"] == "drain")
        if path.startswith(_ONE_MODEL) and method in ("GET", "HEAD"):
            return lambda request: self._control.model(request, path.removeprefix(_ONE_MODEL))
        if path.startswith(_PASSED_THROUGH) and _DOTS.search(path) is None:
            return self._proxy.pass_through
        raise path_not_found(path)

    async def _tokenize(self, request: ClientRequest) -> Response | None:
        response = await self._admitted(self._control.tokenize, request)
        return response or await self._proxy.pass_through(request)

    async def _count_tokens(self, request: ClientRequest) -> Response | None:
        response = await self._admitted(self._control.count_tokens, request)
        return response or await self._proxy.pass_through(request)

    async def _route(self, request: ClientRequest) -> Response | None:
        return await self._admitted(self._control.route, request)

    async def _admitted(self, handler: Handler, request: ClientRequest) -> Response | None:
        """Prompts cost memory and time whoever answers. Passing one on then takes a permit of its own."""
        async with self._admission.permit(request.tenant):
            return await handler(request)


def _other_than(method: str, allowed: Iterable[str]) -> Handler:
    """Raises ApiError 405, but for OPTIONS."""
    if method == "OPTIONS":
        return _options(allowed)
    raise method_not_allowed(method, allowed)


def _options(allowed: Iterable[str]) -> Handler:
    async def tell(_: ClientRequest) -> Response:
        return Response(204, headers=[("Allow", ", ".join(sorted([*allowed, "OPTIONS"])))])

    return tell
