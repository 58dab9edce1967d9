"""What the router answers itself."""

from __future__ import annotations

from tests.broken_http import BROKEN_HTTP, answer_to
from tests.helpers import eventually
from tests.router.conftest import BenchFactory, chat


async def test_ready_means_that_a_replica_takes_traffic(bench: BenchFactory) -> None:
    b = await bench(1)
    async with b.client.get(b.router.url + "/ready") as response:
        assert (response.status, (await response.json())["replicas"]) == (200, 1)
    b.router.fleet.drain(b.replicas[0].id)
    async with b.client.get(b.router.url + "/ready") as response:
        assert response.status == 503
        assert "is draining" in (await response.json())["error"]["message"]
    async with b.client.get(b.router.url + "/health") as response:
        assert response.status == 200


async def test_a_static_replica_that_stops_answering_its_probes_is_taken_out(bench: BenchFactory) -> None:
    b = await bench(2)
    gone = b.replicas[0]
    await gone.stop()
    await eventually(lambda: not b.router.health.reachable(gone.id), what="unreachable")
    async with b.client.get(b.router.url + "/replicas") as response:
        reachable = {replica["id"]: replica["reachable"] for replica in (await response.json())["replicas"]}
    assert reachable == {gone.id: False, b.replicas[1].id: True}
    for _ in range(4):
        async with b.client.post(b.url, json=chat()) as response:
            assert response.headers["x-warmroute-replica"] == b.replicas[1].id


async def test_models_are_those_of_the_fleet(bench: BenchFactory) -> None:
    b = await bench(2)
    async with b.client.get(b.router.url + "/v1/models") as response:
        document = await response.json()
    assert [(model["id"], model["object"]) for model in document["data"]] == [("fake", "model")]
    async with b.client.get(b.router.url + "/v1/models/fake") as response:
        assert await response.json() == document["data"][0]
    async with b.client.get(b.router.url + "/v1/models/some/other") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (404, "model_not_found")


async def test_admin_paths_ask_for_the_admin_key(bench: BenchFactory) -> None:
    b = await bench(1, admin_key="s3cret")
    drain = f"{b.router.url}/replicas/{b.replicas[0].id}/drain"
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cre"}):
        async with b.client.post(drain, headers=headers) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (401, "invalid_admin_key")
    async with b.client.post(drain, headers={"Authorization": "Bearer s3cret"}) as response:
        assert response.status == 200


async def test_a_dry_run_for_nobody_says_why(bench: BenchFactory) -> None:
    b = await bench(0)
    async with b.client.post(b.router.url + "/route", json=chat()) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (503, "not_ready")
    async with b.client.post(b.router.url + "/route", data=b"[") as response:
        assert response.status == 400


async def test_tokenizing_without_a_tokenizer_is_left_to_a_replica(bench: BenchFactory) -> None:
    b = await bench(1)
    async with b.client.post(b.router.url + "/tokenize", json={"prompt": "x", "model": "fake"}) as response:
        assert response.status == 200
    assert b.replicas[0].seen[0].path == "/tokenize"


async def test_the_version_is_told(bench: BenchFactory) -> None:
    b = await bench(0)
    async with b.client.get(b.router.url + "/version") as response:
        assert (await response.json())["version"]


async def test_what_is_not_http_gets_the_apis_error_too(bench: BenchFactory) -> None:
    b = await bench(1)
    for sent in BROKEN_HTTP:
        status, headers, body = await answer_to(b.router.url, sent)
        assert status in (400, 431)
        assert headers["content-type"].startswith("application/json")
        assert body["error"]["code"] == "invalid_http"
