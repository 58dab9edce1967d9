"""Who may ask a replica, and in whose name."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from shared.tenant_proof import PROOF_HEADER, TENANT_HEADER, TenantProofs
from tests.replica.session_client import call, refused
from tests.replica.sim_server import CHAT, HELLO, serving

KEY, ADMIN, SECRET = "replica-0123456789", "admin-0123456789", "a-secret-of-the-cluster"


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/tokenize", "/reset_prefix_cache", "/nothing"])
async def test_with_a_key_every_path_asks_for_it(path: str) -> None:
    async with serving(replica_key=KEY) as (_, client):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}, {"x-api-key": KEY + "x"}):
            async with client.post(path, json=HELLO, headers=headers) as response:
                assert (response.status, "WARMROUTE_UPSTREAM_KEY" in await response.text()) == (401, True)
        for path in ("/cache", "/v1/models", "/sessions"):
            await refused(client, "GET", path, 401, "invalid_replica_key")


async def test_probes_and_metrics_ask_for_none_and_the_key_opens_the_rest() -> None:
    async with serving(replica_key=KEY, admin_key=ADMIN) as (_, client):
        for path in ("/health", "/ready", "/metrics", "/version"):
            async with client.get(path) as response:
                assert response.status == 200
        for given in (f"Bearer {KEY}", f"bearer {KEY}", f"Bearer {ADMIN}"):
            await call(client, "POST", CHAT, json=HELLO, headers={"Authorization": given})
        await call(client, "POST", CHAT, json=HELLO, headers={"x-api-key": KEY})
        assert "tree" in await call(client, "GET", "/cache", headers={"Authorization": f"Bearer {ADMIN}"})


async def ask(client: aiohttp.ClientSession, status: int = 200, **headers: str) -> Any:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await call(client, "POST", CHAT, status, json=HELLO, headers=named)


async def test_with_a_secret_a_tenant_is_believed_with_a_proof_alone() -> None:
    proofs, theirs = TenantProofs(SECRET), TenantProofs("another")
    async with serving(secret=SECRET, admin_key=ADMIN) as (_, client):
        await call(client, "POST", CHAT, json=HELLO)
        for proof in ("", "nonsense", proofs.of("globex"), theirs.of("acme")):
            named = {TENANT_HEADER: "acme", PROOF_HEADER: proof}
            await refused(client, "POST", CHAT, 401, "tenant_not_proven", json=HELLO, headers=named)
            await refused(client, "POST", "/sessions/one/restore", 401, "tenant_not_proven", headers=named)
        await call(client, "POST", CHAT, json=HELLO, headers={TENANT_HEADER: "acme", PROOF_HEADER: proofs.of("acme")})
        await call(client, "POST", CHAT, json=HELLO, headers={TENANT_HEADER: "acme", "x-api-key": ADMIN})
