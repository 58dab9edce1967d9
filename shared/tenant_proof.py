"""How a router proves to a replica which tenant it asks for, where both have the cluster's secret.

    x-warmroute-tenant: acme
    x-warmroute-tenant-proof: <unix seconds, whole minutes>.<HMAC-SHA256(secret, context | seconds | tenant), hex>

So whoever reaches a replica without being a router cannot meet a tenant's cache. A proof that somebody overheard opens
one tenant for some minutes: the clocks of a cluster may differ by as much. It is the same for a minute, and so costs
requests nothing.
"""

from __future__ import annotations

import hmac
import re
import time
from collections.abc import Callable
from functools import lru_cache

__all__ = ["PROOF_HEADER", "TENANT_HEADER", "TenantProofs"]

TENANT_HEADER = "x-warmroute-tenant"
PROOF_HEADER = "x-warmroute-tenant-proof"

_CONTEXT = b"warmroute tenant proof\0"
_PERIOD_SECONDS = 60
_VALID_SECONDS = 600
_SHAPE = re.compile(r"([0-9]{1,12})\.([0-9a-f]{64})")
_MOST_REMEMBERED = 4096


class TenantProofs:
    """Makes and checks them with one secret."""

    def __init__(self, secret: str, clock: Callable[[], float] = time.time) -> None:
        self._secret = secret.encode()
        self._clock = clock
        self._proof = lru_cache(_MOST_REMEMBERED)(self._proof_at)

    def of(self, tenant: str) -> str:
        """The proof for now."""
        return self._proof(tenant, int(self._clock()) // _PERIOD_SECONDS * _PERIOD_SECONDS)

    def valid(self, tenant: str, proof: str) -> bool:
        """It was made for this tenant, with this secret, lately."""
        shaped = _SHAPE.fullmatch(proof)
        if shaped is None:
            return False
        made_at = int(shaped[1])
        # Not remembered: what strangers send would fill the memory.
        expected = self._proof_at(tenant, made_at) if abs(self._clock() - made_at) <= _VALID_SECONDS else ""
        return hmac.compare_digest(proof, expected)

    def _proof_at(self, tenant: str, seconds: int) -> str:
        signed = b"%b%d\0%b" % (_CONTEXT, seconds, tenant.encode(errors="surrogateescape"))
        return f"{seconds}.{hmac.digest(self._secret, signed, 'sha256').hex()}"
