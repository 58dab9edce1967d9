"""What the router proves to replicas, and that nobody gets past it."""

from __future__ import annotations

import json
import logging
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from router.app import Router
from shared.settings import ReplicaSettings, RouterSettings, SettingsError, parse
from shared.tenant_proof import PROOF_HEADER, TENANT_HEADER, TenantProofs
from tests.helpers import eventually
from tests.replica.sim_server import HELLO, serving
from tests.router.conftest import Bench, BenchFactory, chat
from tests.router.fake_replica import answer, refuse

ACME, UPSTREAM, SECRET = "sk-acme-0123456789", "up-0123456789", "a-secret-of-the-cluster"


@pytest.fixture
def keys(tmp_path: Path) -> str:
    file = tmp_path / "keys.toml"
    file.write_text(f'[[key]]\nkey = "{ACME}"\ntenant = "acme"\n')
    return str(file)


async def ask(b: Bench, path: str = "/v1/chat/completions", **headers: str) -> tuple[int, Any]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with b.client.post(b.router.url + path, json=chat(False), headers=named) as response:
        return response.status, json.loads(await response.read())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/files"])
async def test_replicas_get_the_routers_key_in_place_of_the_clients(
    bench: BenchFactory, keys: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    for given in ({"api_keys": keys}, {}):
        b = await bench(1, upstream_key=UPSTREAM, **given)
        with caplog.at_level(logging.DEBUG):
            assert (await ask(b, path, authorization=f"Bearer {ACME}", x_api_key=ACME))[0] == 200
        (seen,) = b.replicas[0].seen
        assert seen.headers.getall("authorization") == [f"Bearer {UPSTREAM}"]
        assert ACME not in str(seen.headers)
    assert UPSTREAM not in caplog.text


async def test_probes_bring_the_key_and_the_log_tells_of_one_that_is_missing(
    bench: BenchFactory, caplog: pytest.LogCaptureFixture
) -> None:
    b = await bench(1, upstream_key=UPSTREAM)
    probed: list[str | None] = []

    async def models(request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/v1/models":
            probed.append(request.headers.get("authorization"))
            return web.json_response({"error": "no"}, status=200 if probed[-1] == f"Bearer {UPSTREAM}" else 401)
        return web.Response()

    runner = web.ServerRunner(web.Server(models), shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        for key, told in ((UPSTREAM, False), ("", True)):
            probed.clear()
            settings = RouterSettings(port=0, replica=(url,), upstream_key=key, log_level="warning")
            async with Router(settings) as router:
                await eventually(lambda: probed, what="a probe")
                await eventually(lambda: all(router.health.reachable(r.id) for r in router.fleet))
            assert any("WARMROUTE_UPSTREAM_KEY" in str(vars(record)) for record in caplog.records) == told
    finally:
        await runner.cleanup()
    assert list(b.router.fleet.models) == ["fake"]


async def test_a_replica_that_refuses_the_routers_key_is_the_operators_fault_not_the_clients(
    bench: BenchFactory, keys: str
) -> None:
    b = await bench(2, api_keys=keys)
    for replica in b.replicas:
        replica.behave = refuse(401)
    status, body = await ask(b, x_api_key=ACME)
    assert (status, body["error"]["code"]) == (502, "replica_refused_router")
    assert "WARMROUTE_UPSTREAM_KEY" in body["error"]["message"]
    assert b.seen == 2
    b.replicas[1].behave = answer
    assert (await ask(b, x_api_key=ACME))[0] == 200


async def test_where_clients_bring_their_own_key_its_refusal_is_theirs(bench: BenchFactory) -> None:
    b = await bench(2)
    for replica in b.replicas:
        replica.behave = refuse(401)
    assert await ask(b, authorization="Bearer theirs") == (401, {"refused": 401})
    assert b.seen == 1


async def test_the_tenant_is_proven_where_there_is_a_secret(bench: BenchFactory, keys: str) -> None:
    for secret in (SECRET, ""):
        b = await bench(1, api_keys=keys, secret=secret)
        forged = {TENANT_HEADER: "globex", PROOF_HEADER: TenantProofs("x").of("globex"), "x-api-key": ACME}
        assert (await ask(b, **forged))[0] == 200
        (seen,) = b.replicas[0].seen
        assert seen.headers.getall(TENANT_HEADER) == ["acme"]
        proofs = seen.headers.getall(PROOF_HEADER, [])
        assert [TenantProofs(SECRET).valid("acme", proof) for proof in proofs] == ([True] if secret else [])


@pytest.mark.parametrize(
    ("router_has", "status", "code"),
    [
        ({"upstream_key": UPSTREAM, "secret": SECRET}, 200, None),
        ({"upstream_key": "up-another", "secret": SECRET}, 502, "replica_refused_router"),
        ({"upstream_key": UPSTREAM, "secret": "another"}, 502, "replica_refused_router"),
        ({"upstream_key": UPSTREAM}, 502, "replica_refused_router"),
        ({"secret": SECRET}, 502, "replica_refused_router"),
    ],
)
async def test_a_real_replica_with_key_and_secret_answers_routers_that_have_both(
    keys: str, router_has: dict[str, str], status: int, code: str | None
) -> None:
    async with AsyncExitStack() as stack:
        replica, direct = await stack.enter_async_context(serving(replica_key=UPSTREAM, secret=SECRET))
        settings = RouterSettings(port=0, replica=(replica.url,), api_keys=keys, **router_has)  # type: ignore[arg-type]
        router = await stack.enter_async_context(Router(settings))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        await eventually(lambda: all(router.health.reachable(r.id) for r in router.fleet), what="probed")
        given = {"x-api-key": ACME}
        async with client.post(router.url + "/v1/chat/completions", json=HELLO, headers=given) as response:
            document = await response.json()
            assert (response.status, document.get("error", {}).get("code")) == (status, code)
        # Past the router, its key alone names no tenant.
        direct.headers["authorization"] = f"Bearer {UPSTREAM}"
        async with direct.post("/v1/chat/completions", json=HELLO, headers={TENANT_HEADER: "acme"}) as response:
            assert response.status == 401


def test_one_variable_serves_both_tiers_and_keys_must_fit_into_a_header() -> None:
    environment = {"WARMROUTE_REPLICA_KEY": UPSTREAM}
    assert parse(RouterSettings, [], environment, "warmroute router").upstream_key == UPSTREAM
    assert parse(ReplicaSettings, [], environment, "warmroute replica").replica_key == UPSTREAM
    environment["WARMROUTE_UPSTREAM_KEY"] = "of-another-server"
    assert parse(RouterSettings, [], environment, "warmroute router").upstream_key == "of-another-server"
    for bad in ("a b", "a\r\nb", "ä"):
        with pytest.raises(SettingsError, match="printable ASCII") as caught:
            RouterSettings(upstream_key=bad)
        assert bad not in str(caught.value)
