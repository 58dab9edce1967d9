"""Who may ask this replica, and in whose name.

    replica key set    every path but those of probes and metrics asks for it, or for the admin key
    secret set         a tenant is believed with a router's proof (see `tenant_proof`), or with the admin key
    neither            whoever reaches the replica may ask, in any name

Keys come as `Authorization: Bearer KEY` or `x-api-key: KEY`.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable

from aiohttp import web

from shared.api import ApiError
from shared.tenant_proof import PROOF_HEADER, TENANT_HEADER, TenantProofs

__all__ = ["Callers"]

_OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/version"})

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Callers:
    """Empty strings: not set."""

    def __init__(self, replica_key: str = "", secret: str = "", admin_key: str = "") -> None:
        self._replica_key = replica_key
        self._admin_key = admin_key
        self._proofs = TenantProofs(secret) if secret else None

    @web.middleware
    async def middleware(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Behind it, the tenant header can be believed."""
        if request.path not in _OPEN_PATHS:
            self.check(request)
        return await handler(request)

    def check(self, request: web.BaseRequest) -> None:
        """Raises ApiError 401."""
        if _brings(request, self._admin_key):
            return
        if self._replica_key and not _brings(request, self._replica_key):
            message = "this replica asks for its key: routers send what WARMROUTE_UPSTREAM_KEY says"
            raise ApiError(401, "invalid_replica_key", message)
        tenant = request.headers.get(TENANT_HEADER, "")
        if tenant and self._proofs is not None:
            proof = request.headers.get(PROOF_HEADER, "")
            if not self._proofs.valid(tenant, proof):
                message = (
                    "the tenant is not proven: routers need this replica's WARMROUTE_SECRET, and much the same clock"
                )
                raise ApiError(401, "tenant_not_proven", message)


def _brings(request: web.BaseRequest, key: str) -> bool:
    if not key:
        return False
    scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
    given = [bearer.strip() if scheme.lower() == "bearer" else "", request.headers.get("x-api-key", "")]
    return any(hmac.compare_digest(one.encode(errors="replace"), key.encode()) for one in given)
