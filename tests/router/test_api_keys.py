"""Who may ask, what the refused are told, and that keys stay with the router."""

from __future__ import annotations

import logging
from hashlib import sha256
from pathlib import Path

import pytest

from router.api_keys import ApiKeys, ApiKeysError
from shared.api import ApiError
from tests.helpers import eventually
from tests.router.conftest import Bench, BenchFactory, chat
from tests.router.test_app import program

ACME, GLOBEX, ADMIN = "sk-acme-0123456789", "sk-globex-0123456789", "admin-0123456789"


def entry(key: str, tenant: str) -> str:
    return f'[[key]]\nsha256 = "{sha256(key.encode()).hexdigest()}"\ntenant = "{tenant}"\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(entry(ACME, "acme") + f'[[key]]\nkey = "{GLOBEX}"\ntenant = "globex"\n')
    return path


def code(keys: ApiKeys, authorization: bytes | None = None, x_api_key: bytes | None = None) -> str:
    with pytest.raises(ApiError) as caught:
        keys.tenant_of(authorization, x_api_key)
    assert caught.value.status == 401
    return caught.value.code


def test_a_key_names_its_tenant_in_either_header(file: Path) -> None:
    keys = ApiKeys(file)
    assert keys.tenant_of(f"Bearer {ACME}".encode(), None) == "acme"
    assert keys.tenant_of(f"bearer  {GLOBEX} ".encode(), None) == "globex"
    assert keys.tenant_of(None, ACME.encode()) == "acme"
    assert keys.tenant_of(b"Basic eDp5", GLOBEX.encode()) == "globex"


def test_a_tenants_weight_is_what_one_of_its_entries_says(file: Path) -> None:
    file.write_text(entry(ACME, "acme") + "weight = 2.5\n" + entry(GLOBEX, "acme"))
    keys = ApiKeys(file)
    assert (keys.weight_of("acme"), keys.weight_of("other")) == (2.5, 1.0)


def test_what_is_no_key_is_refused(file: Path) -> None:
    keys = ApiKeys(file)
    assert code(keys) == "missing_api_key"
    assert code(keys, b"Bearer ") == "missing_api_key"
    assert code(keys, ACME.encode()) == "missing_api_key"
    assert code(keys, f"Bearer {ACME}x".encode()) == "invalid_api_key"
    assert code(keys, None, b"\xff\x00") == "invalid_api_key"
    digest = sha256(ACME.encode()).hexdigest()
    assert code(keys, f"Bearer {digest}".encode()) == "invalid_api_key"
    assert code(keys, b"Bearer wrong", ACME.encode()) == "invalid_api_key"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('key = "sk-secret', "is not TOML"),
        ('sk-secret = "acme"', "entries and nothing else"),
        ('key = "sk-secret"', "entries and nothing else"),
        (entry(ACME, "acme") + '[[key]]\ntenant = "acme"\n', "number 2 must have"),
        (entry(ACME, "acme") + "sk-secret = 1\n", "number 1 must have"),
        ('[[key]]\nkey = "sk-secret"\ntenant = "acme"\n', "at least 16"),
        ('[[key]]\nkey = "sk-secret with spaces"\ntenant = "acme"\n', "without spaces"),
        ('[[key]]\nsha256 = "sk-secret"\ntenant = "acme"\n', "64 hex digits"),
        (entry(ACME, ""), "must have a tenant"),
        (entry(ACME, "a b"), "must have a tenant"),
        (entry(ACME, "acme") + entry(ACME, "globex"), "number 2 repeats a key"),
        (entry(ACME, "acme") + "weight = 0\n", "number 1 must have a weight"),
        (entry(ACME, "acme") + "weight = nan\n", "number 1 must have a weight"),
        (entry(ACME, "acme") + "weight = true\n", "number 1 must have a weight"),
        (entry(ACME, "acme") + "weight = 2\n" + entry(GLOBEX, "acme") + "weight = 3\n", "number 2 gives its tenant"),
    ],
)
def test_a_file_that_cannot_be_used_says_where_and_never_what(tmp_path: Path, text: str, fault: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ApiKeysError, match=fault) as caught:
        ApiKeys(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "sk-" not in str(caught.value)


def test_a_broken_new_file_keeps_the_old_keys(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = ApiKeys(file)
    file.write_text("[[key]]\n")
    with caplog.at_level(logging.ERROR):
        keys.reload()
    assert [record.getMessage() for record in caplog.records] == [
        f"the API keys stay as they were: {file}: [[key]] number 1 must have `key` or `sha256`, `tenant`, "
        "perhaps `weight`, and nothing else"
    ]
    assert keys.tenant_of(None, ACME.encode()) == "acme"
    file.unlink()
    keys.reload()
    assert keys.tenant_of(None, ACME.encode()) == "acme"


def test_a_router_does_not_start_without_its_keys(tmp_path: Path) -> None:
    with program("--port", "0", "--api-keys", str(tmp_path / "none.toml")) as process:
        out, log = process.communicate(timeout=10)
        assert (process.returncode, out, log.count("\n")) == (2, "", 1)
        assert "none.toml: cannot be read: No such file" in log


async def keyed(bench: BenchFactory, file: Path, **settings: str) -> Bench:
    return await bench(1, api_keys=str(file), **settings)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/v1/anything", "/tokenize", "/route", "/no"])
async def test_every_path_of_the_api_asks_for_a_key(bench: BenchFactory, file: Path, path: str) -> None:
    b = await keyed(bench, file)
    for method in ("GET", "POST", "OPTIONS"):
        async with b.client.request(method, b.router.url + path, json=chat()) as response:
            assert response.status == 401
            error = (await response.json())["error"]
            assert (error["code"], error["type"]) == ("missing_api_key", "authentication_error")
    assert b.seen == 0


async def test_who_has_no_key_is_counted(bench: BenchFactory, file: Path) -> None:
    b = await keyed(bench, file)
    async with b.client.post(b.url, json=chat()) as response:
        assert response.status == 401
    assert b.router.metrics.requests == {("/v1/chat/completions", "missing_api_key", 401): 1}


async def test_messages_are_refused_as_anthropic_does(bench: BenchFactory, file: Path) -> None:
    b = await keyed(bench, file)
    async with b.client.post(b.router.url + "/v1/messages", json={}, headers={"x-api-key": "wrong"}) as response:
        document = await response.json()
        assert (response.status, document["type"]) == (401, "error")
        assert (document["error"]["type"], document["error"]["code"]) == ("authentication_error", "invalid_api_key")


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/version", "/replicas", "/dashboard"])
async def test_probes_and_figures_ask_for_none(bench: BenchFactory, file: Path, path: str) -> None:
    b = await keyed(bench, file)
    async with b.client.get(b.router.url + path) as response:
        assert response.status == 200


async def test_the_replica_learns_the_tenant_and_never_the_key(
    bench: BenchFactory, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    b = await keyed(bench, file)
    given = {"authorization": f"Bearer {ACME}", "x-api-key": GLOBEX, "x-warmroute-tenant": "globex"}
    with caplog.at_level(logging.DEBUG):
        for path in ("/v1/chat/completions", "/v1/embeddings"):
            async with b.client.post(b.router.url + path, json=chat(), headers=given) as response:
                assert response.status == 200
                await response.read()
    for seen in b.replicas[0].seen:
        assert seen.headers.getall("x-warmroute-tenant") == ["acme"]
        assert not {"authorization", "x-api-key"} & {name.lower() for name in seen.headers}
    assert b.seen == 2
    assert ACME not in caplog.text
    assert GLOBEX not in caplog.text
    await b.settled()


async def test_without_keys_all_is_open_and_nobody_names_a_tenant(bench: BenchFactory) -> None:
    b = await bench(1)
    given = {"authorization": "Bearer theirs", "x-warmroute-tenant": "globex"}
    async with b.client.post(b.url, json=chat(), headers=given) as response:
        assert response.status == 200
        await response.read()
    (seen,) = b.replicas[0].seen
    assert "x-warmroute-tenant" not in seen.headers
    assert seen.headers["authorization"] == "Bearer theirs"


@pytest.mark.parametrize(
    ("admin_key", "given", "status"), [(ADMIN, ADMIN, 200), (ADMIN, ACME, 401), ("", ACME, 403), ("", "", 403)]
)
async def test_an_api_key_is_no_admin_key(
    bench: BenchFactory, file: Path, admin_key: str, given: str, status: int
) -> None:
    b = await keyed(bench, file, admin_key=admin_key)
    url = f"{b.router.url}/replicas/{b.replicas[0].id}/drain"
    async with b.client.post(url, headers={"authorization": f"Bearer {given}"}) as response:
        assert response.status == status


async def test_the_admin_key_is_no_api_key(bench: BenchFactory, file: Path) -> None:
    b = await keyed(bench, file, admin_key=ADMIN)
    async with b.client.post(b.url, json=chat(), headers={"x-api-key": ADMIN}) as response:
        assert response.status == 401


async def test_a_changed_file_is_taken_while_serving(bench: BenchFactory, file: Path) -> None:
    b = await keyed(bench, file)
    keys = b.router.api_keys
    assert keys is not None
    fresh = file.with_suffix(".new")
    fresh.write_text(entry("sk-new-0123456789", "new"))
    fresh.replace(file)

    def taken() -> bool:
        try:
            return keys.tenant_of(None, b"sk-new-0123456789") == "new"
        except ApiError:
            return False

    await eventually(taken, what="new keys taken")
    async with b.client.post(b.url, json=chat(), headers={"x-api-key": ACME}) as response:
        assert response.status == 401
