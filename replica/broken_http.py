"""What is not HTTP as it should be, answered as everything else: with the API's error object."""

from __future__ import annotations

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from shared.api_errors import ApiError, internal_error

__all__ = ["HEAD_LIMITS", "ApiProtocol"]

_LONGEST_REASON = 200
_LONGEST_LINE = 65_536

HEAD_LIMITS = {"max_line_size": _LONGEST_LINE, "max_field_size": _LONGEST_LINE, "max_headers": 256}
"""For the protocol: more than a router takes of its clients and adds itself, so that what it passes on is read."""


class ApiProtocol(web.RequestHandler):
    """A client's connection. aiohttp writes a page of plain text where a request line or a header cannot be read."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        super().handle_error(request, status, exc, message)  # logs, and raises where an answer has begun
        error = internal_error() if status == 500 else _unreadable(status, exc, message)
        response = web.Response(status=error.status, body=error.body("openai"), content_type="application/json")
        response.force_close()
        return response


def _unreadable(status: int, exc: BaseException | None, message: str | None) -> ApiError:
    if isinstance(exc, LineTooLong):
        longest = f"the request line or a header is longer than {_LONGEST_LINE} bytes: send less"
        return ApiError(431, "invalid_http", longest)
    reason = " ".join((message or "").split())[:_LONGEST_REASON]
    return ApiError(status, "invalid_http", f"the request line or a header cannot be read: {reason}")
