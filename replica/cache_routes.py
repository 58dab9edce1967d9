"""The HTTP of the prefix cache.

GET  /cache                  sizes, counters, and the tree of what is held: up to ?nodes=200 of it, 2,000 at most
POST /reset_prefix_cache     forget all that no running request uses

What blocks hold in words is other people's prompts: it is shown only where the replica was given an admin key, and to
who sends it (`Authorization: Bearer KEY`).
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable

import msgspec
from aiohttp import web

from replica.cache_view import CacheDescription
from replica.service import Service
from shared.api import ApiError
from shared.api_errors import invalid_value
from shared.prompts import PromptEncoder

__all__ = ["CacheRoutes"]

_USUAL_NODES = 200
_MOST_NODES = 2_000


class CacheRoutes:
    """`service` gives what there is by now, or raises ApiError."""

    def __init__(self, service: Callable[[], Service], admin_key: str) -> None:
        self._service = service
        self._admin_key = admin_key

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/cache", self._describe), web.post("/reset_prefix_cache", self._reset)]

    async def _describe(self, request: web.Request) -> web.StreamResponse:
        service = self._service()
        nodes, with_text = _nodes_of(request), self._may_see_text(request)
        description = await asyncio.wrap_future(service.engine.describe(nodes, with_tokens=with_text))
        return _json(_in_words(description, service.model.encoder) if with_text else description)

    async def _reset(self, request: web.Request) -> web.StreamResponse:
        result = await asyncio.wrap_future(self._service().engine.reset_prefix_cache())
        return _json(result._asdict())

    def _may_see_text(self, request: web.Request) -> bool:
        """Raises ApiError 401 for a key that is wrong: who sends one wants the text."""
        given = request.headers.get("Authorization", "")
        if not self._admin_key or not given:
            return False
        if not hmac.compare_digest(given.removeprefix("Bearer ").encode(errors="replace"), self._admin_key.encode()):
            raise ApiError(401, "invalid_admin_key", "text is shown for the admin key as Authorization: Bearer KEY")
        return True


def _nodes_of(request: web.Request) -> int:
    text = request.query.get("nodes", str(_USUAL_NODES))
    # Digits in other scripts are decimals too, to `int` as well.
    if not (text.isdecimal() and len(text) < 10 and int(text) <= _MOST_NODES):
        raise invalid_value("nodes", f"must be a number from 0 to {_MOST_NODES}")
    return int(text)


def _in_words(description: CacheDescription, encoder: PromptEncoder) -> CacheDescription:
    tree = [
        msgspec.structs.replace(node, text=encoder.decode(node.token_ids, skip_special_tokens=False))
        for node in description.tree
    ]
    return msgspec.structs.replace(description, tree=tree)


def _json(document: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(document), content_type="application/json")
