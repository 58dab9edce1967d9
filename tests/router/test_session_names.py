"""What a client calls its conversation: read from the body or a header, told apart by tenant, and passed on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.router.conftest import Bench, BenchFactory, chat

NAMES = [f"session-{number}" for number in range(12)]
KEYS = {"acme": "sk-acme-0123456789", "globex": "sk-globex-0123456789"}


async def homes(b: Bench, text: str, header: str | None = None, path: str = "", **sent: Any) -> list[str]:
    """Where bounded-load hashing would send a prompt of each session, on idle replicas: the name's home."""
    found = []
    for name in NAMES:
        headers = {**sent, header: name} if header else sent
        body = chat(text=text) | ({} if header else {"prompt_cache_key": name})
        body |= {"path": path, "max_tokens": 8} if path else {}
        async with b.client.post(b.router.url + "/route", json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            found.append((await response.json())["chosen"]["replica_id"])
    return found


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_a_header_names_the_session_as_the_field_does(bench: BenchFactory, path: str) -> None:
    b = await bench(4, policy="consistent-hash")
    by_field = await homes(b, "one thing")
    assert len(set(by_field)) > 1
    assert await homes(b, "quite another", header="X-Session-Id", path=path) == by_field


async def test_a_name_in_the_body_goes_before_the_header(bench: BenchFactory) -> None:
    b = await bench(4, policy="consistent-hash")
    assert await homes(b, "one thing", **{"x-session-id": "somebody else's"}) == await homes(b, "one thing")


async def test_the_header_reaches_the_replica(bench: BenchFactory) -> None:
    b = await bench(1)
    async with b.client.post(b.url, json=chat(), headers={"x-session-id": "mine"}) as response:
        await response.read()
    assert b.replicas[0].seen[0].headers["x-session-id"] == "mine"


async def test_the_same_name_means_another_session_for_another_tenant(bench: BenchFactory, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text("".join(f'[[key]]\nkey = "{key}"\ntenant = "{tenant}"\n' for tenant, key in KEYS.items()))
    b = await bench(4, policy="consistent-hash", api_keys=str(file))
    acme, globex = [await homes(b, "one thing", **{"x-api-key": key}) for key in KEYS.values()]
    assert acme != globex
    assert await homes(b, "another", header="x-session-id", **{"x-api-key": KEYS["acme"]}) == acme
