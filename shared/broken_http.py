"""What is not HTTP as it should be, answered as everything else: with the API's error object."""

from __future__ import annotations

from aiohttp import web

from shared.api_errors import ApiError, internal_error

__all__ = ["ApiProtocol"]

_LONGEST_REASON = 200


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
        error = internal_error() if status == 500 else _unreadable(status, message)
        response = web.Response(status=error.status, body=error.body("openai"), content_type="application/json")
        response.force_close()
        return response


def _unreadable(status: int, message: str | None) -> ApiError:
    reason = " ".join((message or "").split())[:_LONGEST_REASON]
    return ApiError(status, "invalid_http", f"the request line or a header cannot be read: {reason}")
