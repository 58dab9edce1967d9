"""The report is one whole page: well formed, asking the network for nothing, and a browser shows it."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from loadtest.oracle import IdealHit
from loadtest.records import RequestRecord
from loadtest.report import write_report
from loadtest.results import RateResults, Results, Run, Simulated, measure_run, ratios, summarize_policy
from loadtest.summary import headline, notes

VOID_ELEMENTS = {"meta", "br", "link", "img", "hr"}


def run(policy: str, repeat: int, mean_ms: float, cached: int, lag_ms: float = 0.1) -> Run:
    draw = random.Random(f"{policy}/{repeat}")
    records = [
        RequestRecord(
            session=n,
            turn=0,
            scheduled_seconds=n / 5,
            sent_seconds=n / 5,
            lag_ms=lag_ms,
            ttft_ms=draw.uniform(0.5, 1.5) * mean_ms,
            e2e_ms=2 * mean_ms,
            tpot_ms=9.0,
            prompt_tokens=1000,
            cached_tokens=cached,
            replica=draw.choice(["replica-1", "replica-2"]),
        )
        for n in range(40)
    ]
    ideals = [IdealHit(1000, 900)] * len(records)
    return measure_run(
        records,
        ideals,
        policy=policy,
        repeat=repeat,
        seed=repeat,
        replica_ids=["replica-1", "replica-2"],
        timeout_seconds=10.0,
    )


@pytest.fixture
def runs() -> dict[str, list[Run]]:
    return {
        "cache-aware": [run("cache-aware", repeat, 50.0, 800) for repeat in range(3)],
        "round-robin": [run("round-robin", repeat, 100.0, 400) for repeat in range(3)],
    }


@pytest.fixture
def results(runs: dict[str, list[Run]]) -> Results:
    policies = {policy: summarize_policy(each, 10.0) for policy, each in runs.items()}
    setup = {"model": "<tiny & small>", "shape": {"groups": 2, "turns": 8}, "seeds": [0, 1, 2]}
    return Results(policies, ratios(policies, "round-robin"), setup)


@pytest.fixture
def page(tmp_path: Path, results: Results, runs: dict[str, list[Run]]) -> Path:
    path = tmp_path / "report.html"
    write_report(path, results, runs)
    return path


@pytest.fixture
def swept(tmp_path: Path, runs: dict[str, list[Run]], results: Results) -> Path:
    simulated = {"cache-aware": Simulated(0.79, -0.01, 51.0, 0.02)}
    rates = [RateResults(rate, results.policies, results.ratios, simulated) for rate in (2.0, 4.0)]
    path = tmp_path / "swept.html"
    write_report(path, Results.of(rates, results.setup), runs)
    return path


class Reader(HTMLParser):
    """Checks nesting, and gathers ids, references and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: Counter[str] = Counter()
        self.references: list[str] = []
        self.drawings = 0
        self.text = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attributes)
        if tag not in VOID_ELEMENTS:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.drawings += tag == "svg"
        for name, value in attributes:
            if name == "id":
                self.ids[value or ""] += 1
            elif name in ("src", "href", "xlink:href", "action", "data"):
                self.references.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_well_formed_and_whole_in_itself(page: Path) -> None:
    reader = Reader()
    reader.feed(page.read_text(encoding="utf-8"))
    reader.close()
    assert reader.open == []
    assert reader.drawings == 4
    assert all(reference.startswith("#") for reference in reader.references)
    assert {reference[1:] for reference in reader.references} <= reader.ids.keys()
    assert [name for name, times in reader.ids.items() if times > 1] == []
    assert "@import" not in page.read_text(encoding="utf-8")


def test_the_page_says_what_was_found_and_how_it_was_set_up(page: Path, results: Results) -> None:
    reader = Reader()
    reader.feed(page.read_text(encoding="utf-8"))
    for expected in (headline(results), "80.0%", "40.0%", "90.0%", "0 of 120", "<tiny & small>", "groups 2, turns 8"):
        assert expected in reader.text


def test_several_rates_have_a_table_each_and_curves_in_common(swept: Path) -> None:
    reader = Reader()
    reader.feed(swept.read_text(encoding="utf-8"))
    assert reader.drawings == 5
    for expected in ("2 requests per second", "4 requests per second", "Over the rates", "Time to first token at 4"):
        assert expected in reader.text
    assert reader.text.count("cache-aware simulated: hit rate 79.0% (-1.0 points), mean TTFT 51 ms (+2.0%)") == 2


def test_one_rate_keeps_the_shape_of_results_and_several_add_to_it(results: Results) -> None:
    one = Results.of([RateResults(2.0, results.policies, results.ratios)], results.setup)
    assert msgspec.to_builtins(one).keys() == {"policies", "ratios", "setup"}
    two = Results.of([RateResults(rate, results.policies, results.ratios) for rate in (2.0, 4.0)], results.setup)
    assert msgspec.to_builtins(two).keys() == {"policies", "ratios", "setup", "rates"}


def test_the_headline_gives_the_ratios_with_their_spread(results: Results) -> None:
    ratio = next(ratio for ratio in results.ratios if ratio.measure == "ttft_ms_mean")
    assert f"({ratio.low:.2f}\N{EN DASH}{ratio.high:.2f})" in headline(results)
    assert "2.00\N{MULTIPLICATION SIGN} (2.00\N{EN DASH}2.00) its hit rate: 80% against 40%" in headline(results)


def test_void_runs_are_told_of(runs: dict[str, list[Run]]) -> None:
    policies = {"p": summarize_policy([*runs["cache-aware"], run("p", 3, 50.0, 800, lag_ms=40.0)], 10.0)}
    told = notes(Results(policies, [], {}))
    assert len(told) == 1
    assert "1 of 4 runs are void: the load generator lagged" in told[0]


def test_where_every_run_is_void_nothing_is_found_and_no_ratios_are_promised(tmp_path: Path) -> None:
    void = {policy: [run(policy, 0, 50.0, 800, lag_ms=40.0)] for policy in ("cache-aware", "round-robin")}
    policies = {policy: summarize_policy(each, 10.0) for policy, each in void.items()}
    results = Results(policies, ratios(policies, "round-robin"), {})
    assert headline(results).startswith("No finding: every run is void")
    write_report(tmp_path / "report.html", results, void)
    assert "Ratios within each repeat" not in (tmp_path / "report.html").read_text()


def test_a_browser_shows_it_without_complaint(page: Path, results: Results, tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium on this machine")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--enable-logging=stderr"]
    command += ["--disable-quic", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert headline(results) in shown.stdout
    assert shown.stdout.count("<svg") == 4
    assert "CONSOLE" not in shown.stderr
