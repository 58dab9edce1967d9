"""`warmroute route` and `warmroute top` against routers that ask for a key."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from router.console import show_replicas, show_route
from shared.settings import RouteSettings, TopSettings, parse
from tests.router.conftest import Bench, BenchFactory
from tests.router.fake_replica import MODEL

KEY = "sk-acme-0123456789"


@pytest.fixture
async def keyed(bench: BenchFactory, tmp_path: Path) -> Bench:
    file = tmp_path / "keys.toml"
    file.write_text(f'[[key]]\nkey = "{KEY}"\ntenant = "acme"\n')
    return await bench(1, api_keys=str(file))


async def route(b: Bench, **given: Any) -> int:
    return await asyncio.to_thread(show_route, RouteSettings(prompt="hello", router=b.router.url, **given))


async def test_route_is_told_to_bring_a_key(keyed: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert await route(keyed) == 1
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert "asks for an API key; put one into WARMROUTE_API_KEY" in said.err


async def test_route_is_told_that_its_key_is_not_valid(keyed: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert await route(keyed, api_key="sk-wrong-0123456789") == 1
    said = capsys.readouterr()
    assert "does not accept the key in WARMROUTE_API_KEY" in said.err
    assert "sk-wrong" not in said.err


async def test_with_its_key_route_is_answered(keyed: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert await route(keyed, api_key=KEY, model=MODEL) == 0
    assert keyed.replicas[0].id in capsys.readouterr().out
    assert keyed.seen == 0


async def test_top_is_answered_with_and_without_a_key(keyed: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    for key in ("", KEY):
        settings = TopSettings(router=keyed.router.url, once=True, api_key=key)
        assert await asyncio.to_thread(show_replicas, settings) == 0
        assert "accepting" in capsys.readouterr().out


@pytest.mark.parametrize("settings", [RouteSettings, TopSettings])
def test_the_key_comes_from_the_environment_alone(settings: type[RouteSettings] | type[TopSettings]) -> None:
    argv = ["hello"] if settings is RouteSettings else []
    assert parse(settings, argv, {"WARMROUTE_API_KEY": KEY}, "warmroute").api_key == KEY
    with pytest.raises(ValueError, match="unknown flag --api-key"):
        parse(settings, [*argv, "--api-key", KEY], {}, "warmroute")
