"""The page for people: who may see what, what it is told, and that a real browser shows it."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.admission import Admission
from router.dashboard.history import History, Sample, add_up
from router.dashboard.report import ReplicaReport, Report, together
from router.exchange import Exchange
from router.metrics import RouterMetrics
from router.placement import Decision
from router.policies.base import Candidate
from router.recent import MOST_RECENT
from tests.router.conftest import Bench, BenchFactory, chat
from tests.router.fake_replica import refuse

ADMIN = {"Authorization": "Bearer s3cret"}
ACME = "sk-acme-0123456789abcdef"
CHROMIUM = shutil.which("chromium")


async def data(b: Bench, query: str = "", **headers: str) -> dict[str, Any]:
    async with b.client.get(f"{b.router.url}/dashboard/data{query}", headers=headers) as response:
        assert response.status == 200, await response.text()
        return json.loads(await response.read())  # type: ignore[no-any-return]


async def ask(b: Bench, **headers: str) -> None:
    async with b.client.post(b.url, json=chat(text="a prompt nobody may see"), headers=headers) as response:
        await response.read()


async def test_the_page_asks_nobody_else_and_allows_only_its_own_style_and_script(bench: BenchFactory) -> None:
    b = await bench(0)
    async with b.client.get(b.router.url + "/dashboard") as response:
        page = await response.text()
        assert response.headers["content-type"] == "text/html; charset=utf-8"
        policy = response.headers["content-security-policy"]
    for element in ("style", "script"):
        (text,) = re.findall(f"<{element}>(.*?)</{element}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{element}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert not re.search(r"\bsrc=|style=|<link|@import|url\(|\bon[a-z]+=|innerHTML", page)
    assert set(re.findall(r"https?://[^\"'\s]+", page)) == {"http://www.w3.org/2000/svg"}  # a name, not a place


async def test_what_it_shows_asks_for_the_admin_key(bench: BenchFactory) -> None:
    b = await bench(1, admin_key="s3cret")
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        async with b.client.get(b.router.url + "/dashboard/data", headers=headers) as response:
            assert response.status == 401
            assert b.replicas[0].id not in await response.text()
    told = await data(b, **ADMIN)
    assert [replica["said"]["id"] for replica in told["replicas"]] == [b.replicas[0].id]


async def test_where_api_keys_are_asked_for_and_no_admin_key_is_set_nobody_sees_it(
    bench: BenchFactory, tmp_path: Path
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f'[[key]]\nkey = "{ACME}"\ntenant = "acme-corp"\n')
    b = await bench(1, api_keys=str(file))
    async with b.client.get(b.router.url + "/dashboard/data", headers={"authorization": f"Bearer {ACME}"}) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (403, "admin_key_not_set")


async def test_it_tells_decisions_with_reasons_and_neither_prompts_nor_keys(
    bench: BenchFactory, tmp_path: Path
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f'[[key]]\nkey = "{ACME}"\ntenant = "acme-corp"\n')
    b = await bench(2, api_keys=str(file), admin_key="s3cret")
    await ask(b, authorization=f"Bearer {ACME}")
    for replica in b.replicas:
        replica.behave = refuse(500)
    await ask(b, authorization=f"Bearer {ACME}")
    await b.settled()
    told = await data(b, **ADMIN)
    decisions = {(one["outcome"], one["status"], one["reason"], one["cached_tokens"]) for one in told["recent"]}
    assert decisions == {("ok", 200, "turn", 7), ("replica_500", 500, "turn", None)}
    assert sum(replica["requests"] for replica in told["replicas"]) == 2
    assert sum(replica["failures"] for replica in told["replicas"]) == 1
    assert not re.search("nobody may see|acme|s3cret", json.dumps(told))


@pytest.mark.parametrize("query", ["?since=x", "?since=-1", "?since=" + "9" * 99, "?since=%C2%B2", "?other=1", ""])
async def test_a_query_of_nonsense_does_no_harm(bench: BenchFactory, query: str) -> None:
    b = await bench(1)
    assert len((await data(b, query))["replicas"]) == 1


def decided(number: int) -> Exchange:
    exchange = Exchange(f"id-{number}", "/v1/chat/completions", 0.0)
    candidate = Candidate("r1", 1, 16, 16, 1.0, 0.0, 0.0, 0.0, 0.0, 0)
    exchange.decision = Decision("cache-aware", "exact", "warm", candidate, [candidate], 20)
    exchange.model = "m" * 10_000
    exchange.status, exchange.outcome = 200, "ok"
    return exchange


def test_what_is_kept_of_decisions_is_bounded() -> None:
    metrics = RouterMetrics()
    for number in range(3 * MOST_RECENT):
        metrics.ended(decided(number))
    kept = list(metrics.recent)
    assert [kept[0].id, kept[-1].id, len(kept)] == ["id-200", "id-299", MOST_RECENT]
    assert max(len(recent.model) for recent in kept) == 100


def test_a_tick_holds_what_happened_in_it() -> None:
    metrics = RouterMetrics()
    history = History(metrics, Admission(8))
    counts = []
    for tick, requests in enumerate((2, 0, 3)):
        for number in range(requests):
            metrics.ended(decided(number))
        history.note(tick)
        counts.append(requests)
    assert [sample.requests for sample in history.after(-1)] == counts
    assert [sample.tick for sample in history.after(0)] == [1, 2]


def test_history_has_an_end() -> None:
    history = History(RouterMetrics(), Admission(8))
    for tick in range(1000):
        history.note(tick)
    assert [sample.tick for sample in history.after(-1)] == list(range(700, 1000))


_SAMPLE = st.builds(
    Sample,
    tick=st.integers(0, 5),
    requests=st.integers(0, 9),
    unserved=st.integers(0, 9),
    queried_tokens=st.integers(0, 9),
    predicted_tokens=st.integers(0, 9),
    hit_tokens=st.integers(0, 9),
    in_flight=st.integers(0, 9),
    queued=st.integers(0, 9),
    first_token=st.lists(st.integers(0, 9), min_size=3, max_size=3),
)


@given(st.lists(st.lists(_SAMPLE)), st.integers(0, 6))
def test_workers_histories_add_up_tick_by_tick(histories: list[list[Sample]], until: int) -> None:
    everything = [sample for samples in histories for sample in samples if sample.tick < until]
    added = add_up(histories, until)
    assert [sample.tick for sample in added] == sorted({sample.tick for sample in everything})
    for sample in added:
        parts = [part for part in everything if part.tick == sample.tick]
        for name in ("requests", "unserved", "queried_tokens", "predicted_tokens", "hit_tokens", "in_flight", "queued"):
            assert getattr(sample, name) == sum(getattr(part, name) for part in parts)
        assert sample.first_token == [sum(column) for column in zip(*(p.first_token for p in parts), strict=True)]


def _report(in_flight: int, trust: float, breaker: str, requests: int) -> Report:
    said = {"id": "r1", "trust": trust, "breaker": breaker, "reachable": True, "active": 3}
    replica = ReplicaReport(said, requests, 1, 10, 8, 6)
    return Report("1", "cache-aware", "exact", 0.0, True, in_flight, 0, [1.0], [], [replica], [])


def test_workers_reports_are_one_with_the_worst_that_any_believes() -> None:
    report = together([_report(2, 1.0, "half-open", 5), _report(3, 0.5, "open", 7), _report(0, 0.9, "closed", 0)], 0)
    assert (report.in_flight, report.workers) == (5, 3)
    (replica,) = report.replicas
    assert (replica.requests, replica.failures, replica.hit_tokens) == (12, 3, 18)
    assert replica.said == {"id": "r1", "trust": 0.5, "breaker": "open", "reachable": True, "active": 3}


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the path")
@pytest.mark.parametrize("replicas", [0, 2])
async def test_a_browser_shows_the_fleet(bench: BenchFactory, tmp_path: Path, replicas: int) -> None:
    b = await bench(replicas)
    if replicas:
        await ask(b)
        await b.settled()
    assert CHROMIUM is not None
    browser = await asyncio.create_subprocess_exec(
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"),
        *("--virtual-time-budget=3000", "--enable-logging=stderr", "--dump-dom", b.router.url + "/dashboard"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    shown, complaints = await browser.communicate()
    assert b"CONSOLE" not in complaints  # no error of the script, nothing that the policy forbade
    page = shown.decode()
    assert f"{replicas} of {replicas}" in page
    assert ('id="fleet-empty" hidden=""' in page) == (replicas > 0)
    assert page.count(' class="dot good"></span>accepting') == replicas
    for replica in b.replicas:
        assert replica.id in page
