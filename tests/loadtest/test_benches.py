from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

import warmroute
from loadtest.benches import engine, index
from loadtest.benches.cache import PlainLru, ReplicaCache, play
from loadtest.benches.chat_tokens import ChatShape, Turn, chat
from loadtest.benches.spread import Spread


def test_chat_finds_about_four_fifths_of_its_blocks_where_there_is_room() -> None:
    turns = list(chat(ChatShape(conversations=100), seed=3))
    for cache in (ReplicaCache(8_000, 16), PlainLru(8_000, 16)):
        tally = play(cache, turns, block_size=16)
        assert tally.block_hit_rate == pytest.approx(0.80, abs=0.02)
        assert tally.reused_share == pytest.approx(0.79, abs=0.02)
        assert tally.evicted_blocks == 0


def test_a_prompt_that_was_not_asked_for_lately_loses_its_end_here_and_everything_in_a_plain_lru() -> None:
    prompt, other = Turn(list(range(56)), [1]), Turn(list(range(1_000, 1_031)), [1])
    for cache, found in ((ReplicaCache(8, 8), 4), (PlainLru(8, 8), 0)):
        cache.serve(prompt)
        cache.serve(other)
        assert cache.serve(prompt) == (found, found * 8)


def test_conversations_grow_by_what_was_said_and_all_open_alike() -> None:
    turns = list(chat(ChatShape(conversations=1, turns=3), seed=0))
    assert len(turns) == 3
    for before, after in pairwise(turns):
        said = before.prompt + before.answer
        assert after.prompt[: len(said)] == said
    assert turns[0].prompt[:300] == next(iter(chat(ChatShape(turns=1), seed=0))).prompt[:300]


def test_a_spread_keeps_the_least_and_the_most() -> None:
    assert Spread.of([3.0, 1.0, 8.0]).shown(lambda value: f"{value:.0f}") == "3 (1-8)"


def test_the_tiers_of_a_simulated_engine_cross_where_its_cost_model_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--engine", "sim", "--repeats", "2", "--out", str(tmp_path)]
    assert warmroute.main(["bench", "tiers", *flags]) == 0
    results = json.loads((tmp_path / "tiers" / "results.json").read_text())
    assert results["crossover_tokens"] == 33
    assert results["onload_seconds_per_token"] == pytest.approx(5e-6)
    for tokens, ways in results["seconds"].items():
        cold, host, device = (ways[way][0] for way in ("cold", "host", "device"))
        assert device < host < cold
        assert host - device == pytest.approx((int(tokens) - 1) * 5e-6)
    assert (tmp_path / "tiers" / "tiers.svg").read_text().startswith("<?xml")
    assert "From 33 prompt tokens on" in capsys.readouterr().out


def test_the_index_bench_measures_decisions_lookups_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "_INDEX_KEYS", (10_000, 40_000))
    monkeypatch.setattr(index, "_TIMES", 5)
    assert warmroute.main(["bench", "index", "--repeats", "2", "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "index" / "results.json").read_text())
    small, known, _ = (seconds[0] for seconds in results["decide_seconds"].values())
    assert 0 < small < known
    assert all(seconds[0] > 0 for seconds in results["lookup_seconds"].values())
    assert all(30 < size < 200 for size in results["bytes_per_key"].values())
    assert (tmp_path / "index" / "index.svg").read_text().startswith("<?xml")


def test_an_unknown_bench_is_refused_with_the_names_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert warmroute.main(["bench", "tires"]) == 2
    assert "did you mean tiers" in capsys.readouterr().err


def test_a_warm_prefix_leaves_only_the_rest_to_compute(tmp_path: Path) -> None:
    assert warmroute.main(["bench", "prefill", "--engine", "sim", "--repeats", "2", "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "prefill" / "results.json").read_text())
    prefixes = results["prefixes"]
    for tokens, ways in prefixes.items():
        assert ways["cold"] == ways["no cache"]
        assert ways["cold"]["computed_tokens"] == int(tokens) + 64
        assert ways["warm"]["computed_tokens"] == 64
    warm = [ways["warm"]["seconds"][0] for ways in prefixes.values()]
    cold = [ways["cold"]["seconds"][0] for ways in prefixes.values()]
    assert warm[-1] < 1.2 * warm[0]
    assert cold[-1] > 10 * cold[0]
    behind = results["seconds_by_cached_and_uncached"]
    for uncached, seconds in behind["0"].items():
        assert behind["1024"][uncached][0] == pytest.approx(seconds[0], rel=0.02)
    assert (tmp_path / "prefill" / "prefill.svg").read_text().startswith("<?xml")


def test_the_engine_answers_as_generate_does_and_computes_a_common_beginning_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = engine._Case(shared_tokens=48, own_tokens=8, requests=3, concurrency=3)
    monkeypatch.setattr(engine, "_CASES", (case,))
    monkeypatch.setattr(engine, "_ANSWER_TOKENS", 4)
    assert warmroute.main(["bench", "engine", "--repeats", "1", "--threads", "1", "--out", str(tmp_path)]) == 0
    [[measured]] = json.loads((tmp_path / "engine" / "results.json").read_text())["cases"].values()
    assert measured["equal_answers"] == 3
    assert measured["computed_tokens"] == 48 + 3 * (8 + 3)
    assert measured["ratio"] > 0
    assert (tmp_path / "engine" / "engine.svg").read_text().startswith("<?xml")
