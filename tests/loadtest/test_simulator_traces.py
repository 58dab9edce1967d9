"""Trace files of both formats, and the command that plays them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from loadtest.simulator.command import run
from loadtest.simulator.traces import TraceError, read_trace
from shared.settings import SettingsError, SimulateSettings

TRACES = Path(__file__).resolve().parents[3] / "shared" / "data" / "traces"
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason=f"no traces at {TRACES}")


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_mooncake_blocks_become_tokens_and_times_keep_their_tick(tmp_path: Path) -> None:
    line = {"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [0, 9]}
    (read,) = read_trace(write(tmp_path / "trace.jsonl", line))
    assert 3.0 <= read.start_seconds < 6.0
    tokens = read.turns[0].prompt.token_ids()
    assert list(tokens) == [1] * 512 + [10] * 188
    assert read.turns[0].output_tokens == 5


def test_agentic_blocks_are_local_to_their_conversation(tmp_path: Path) -> None:
    asked = {"in": 130, "out": 3, "h": [[1, 2]], "t": 0.0, "think_time": 500.0}
    nested = {"t": 1.0, "type": "subagent", "requests": [{"in": 64, "out": 1, "h": [[7, 1]], "t": 0.0}]}
    conversation = {"block_size": 64, "requests": [asked, nested]}
    first, second = read_trace(write(tmp_path / "trace.jsonl", conversation, conversation), most_think_seconds=9.0)
    assert [turn.prompt.tokens for turn in first.turns] == [130, 64]
    assert first.turns[0].think_seconds == 9.0
    tokens = first.turns[0].prompt.token_ids()
    assert (len(set(tokens[:64])), len(set(tokens))) == (1, 3)
    assert not set(tokens) & set(second.turns[0].prompt.token_ids())


def test_what_is_no_trace_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no trace known here"):
        read_trace(write(tmp_path / "a.jsonl", {"prompt": "hello"}))
    with pytest.raises(TraceError, match="cannot be read as JSON lines"):
        read_trace(tmp_path / "absent.jsonl")
    with pytest.raises(TraceError, match="not as its first"):
        read_trace(write(tmp_path / "b.jsonl", {"hash_ids": [1], "input_length": 9, "output_length": 1}))


@needs_traces
def test_the_public_traces_are_what_their_page_says() -> None:
    conversation = read_trace(TRACES / "mooncake-conversation.jsonl.gz")
    assert len(conversation) == 12_031
    agentic = read_trace(TRACES / "agentic-coding.jsonl.gz")
    assert len(agentic) == 338
    with gzip.open(TRACES / "agentic-coding.jsonl.gz") as file:
        line = json.loads(next(file))
    assert agentic[0].turns[0].prompt.tokens == line["requests"][0]["in"]


def test_the_command_writes_its_results_and_a_page(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings = SimulateSettings(
        policies=("cache-aware", "dynamo", "round-robin"),
        workload="chat",
        requests=60,
        replicas=2,
        repeats=2,
        out=str(tmp_path),
    )
    assert run(settings) == 0
    results = json.loads((tmp_path / "results.json").read_bytes())
    assert list(results["policies"]) == ["cache-aware", "dynamo", "round-robin"]
    ours = results["policies"]["cache-aware"]
    assert (ours["requests"], ours["failed"], len(ours["repeats"])) == (120, 0, 2)
    assert 0 < ours["hit_rate"] <= ours["ideal_hit_rate"] < 1
    assert results["setup"]["decisions"] == 360
    assert "virtual time" in (tmp_path / "report.html").read_text()
    assert "one queue and one endless cache for all: mean TTFT" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("flaw", "said"),
    [
        ({"policies": ("warmest",)}, "is not one of all, cache-aware"),
        ({"profile": "abacus"}, "is not one of default"),
        ({"workload": "idle"}, "is not one of shared-prefix"),
        ({"change": ("explode:r1@3",)}, "is not like drain:r001@60"),
    ],
)
def test_settings_that_name_nothing_are_refused(flaw: dict[str, object], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        run(SimulateSettings(**flaw))  # type: ignore[arg-type]


def test_a_trace_that_is_not_there_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(SimulateSettings(trace=str(tmp_path / "absent"), out=str(tmp_path))) == 1
    assert capfd.readouterr().err.startswith("simulate: ")
