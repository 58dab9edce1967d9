"""A trace becomes traffic whose prompts share exactly what the trace's prompts share."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from loadtest.oracle import ideal_hits
from loadtest.plans import read_plan, write_plan
from loadtest.records import RequestRecord
from loadtest.simulator.traces import TraceError
from loadtest.trace_plan import TracePlan
from loadtest.workloads import Message
from replica.tiny_tokenizer import tiny_bundle
from shared.prompts import ChatPrompt, PromptEncoder

BLOCK, TICK_SECONDS = 512, 3.0


def mooncake(folder: Path) -> str:
    """Four requests: the second and the fourth go on from the first, the third shares its first block alone."""
    asked = [(0, 1000, [0, 1]), (6000, 1600, [0, 1, 2, 3]), (12000, 900, [0, 9]), (18000, 2048, [0, 1, 2, 4])]
    lines = [{"timestamp": at, "input_length": n, "output_length": 40, "hash_ids": ids} for at, n, ids in asked]
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def agentic(folder: Path, conversations: int = 1) -> str:
    asked = [
        {"in": 130, "out": 8, "h": [[0, 2]], "think_time": 0.0},
        {"requests": [{"in": 70, "out": 4, "h": [[9, 1]]}]},
        {"in": 260, "out": 8, "h": [[0, 4]], "think_time": 2.5},
    ]
    path = folder / "agents.jsonl"
    path.write_text((json.dumps({"block_size": 64, "requests": asked}) + "\n") * conversations)
    return str(path)


def shared_words(left: list[str], right: list[str]) -> int:
    return next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def texts(plan: TracePlan) -> list[str]:
    return [turn.text for session in plan.schedule() for turn in session.turns]


@pytest.mark.parametrize("shrink", [1, 8])
def test_prompts_share_as_many_words_as_the_trace_shares_tokens(tmp_path: Path, shrink: int) -> None:
    words = [text.split() for text in texts(TracePlan(mooncake(tmp_path), 0, 10, shrink=shrink))]
    assert [len(each) for each in words] == [n // shrink for n in (1000, 1600, 900, 2048)]
    shared = [shared_words(words[0], other) for other in words[1:]]
    assert shared == [1000 // shrink, BLOCK // shrink, 1000 // shrink]
    assert shared_words(words[1], words[3]) == 3 * BLOCK // shrink


def test_for_the_tiny_model_a_word_is_a_token_so_the_ideal_is_the_traces_own(tmp_path: Path) -> None:
    plan = TracePlan(mooncake(tmp_path), 0, 10)
    encoder = PromptEncoder(tiny_bundle())

    def encode(messages: list[Message]) -> list[int]:
        return list(encoder.encode(ChatPrompt(messages)).token_ids)

    records = [
        RequestRecord(session=n, turn=0, scheduled_seconds=n, sent_seconds=n, lag_ms=0.0, completion_tokens=1)
        for n in range(4)
    ]
    hits = [hit.cached_tokens for hit in ideal_hits(plan.schedule(), records, encode, lambda text: []) if hit]
    template = 2  # before the first word
    assert hits == [0, template + 1000, template + BLOCK, template + 3 * BLOCK]


def test_the_rate_and_the_scale_set_the_pace_and_the_seed_stays_within_the_traces_tick(tmp_path: Path) -> None:
    path = mooncake(tmp_path)
    starts = [session.turns[0].at_seconds for session in TracePlan(path, 0, 10).schedule()]
    slow = [session.turns[0].at_seconds for session in TracePlan(path, 0, 10, scale=2.0).schedule()]
    assert slow == pytest.approx([2 * at for at in starts])
    assert TracePlan(path, 0, 10).with_rate(5.0).rate == pytest.approx(5.0)
    other = [session.turns[0].at_seconds for session in TracePlan(path, 1, 10).schedule()]
    assert other != starts
    assert all(abs(there - here) < 2 * TICK_SECONDS for there, here in zip(other, starts, strict=True))


def test_an_agents_turns_wait_for_its_answers_and_repeat_what_it_has_read(tmp_path: Path) -> None:
    (session,) = TracePlan(agentic(tmp_path), 0, 10).schedule()
    assert [turn.think_seconds for turn in session.turns] == [None, 0.0, 2.5]
    assert [turn.max_tokens for turn in session.turns] == [8, 4, 8]
    prompts = [session.messages(["an answer"] * n) for n in range(3)]
    assert all(len(messages) == 1 for messages in prompts), "a turn's text is all of its prompt"
    (slow,) = TracePlan(agentic(tmp_path), 0, 10, scale=2.0).schedule()
    assert [turn.think_seconds for turn in slow.turns] == [None, 0.0, 5.0]
    first, helper, second = (messages[0]["content"].split() for messages in prompts)
    assert (len(first), len(helper), len(second)) == (130, 70, 260)
    assert shared_words(first, second) == 128
    assert shared_words(first, helper) < 3


def test_only_so_many_requests_are_asked_and_none_that_does_not_fit(tmp_path: Path) -> None:
    assert len(texts(TracePlan(mooncake(tmp_path), 0, 2))) == 2
    assert len(texts(TracePlan(agentic(tmp_path), 0, 2))) == 2
    fitting = TracePlan(mooncake(tmp_path), 0, 10, shrink=2).fitting(1000)
    assert [len(text.split()) for text in texts(fitting)] == [500, 800, 450]
    arrivals = [session.turns[0].at_seconds for session in fitting.schedule()]
    assert all(earlier < later for earlier, later in pairwise(arrivals))


def test_the_first_requests_are_those_of_all_conversations_that_have_begun(tmp_path: Path) -> None:
    whole = TracePlan(agentic(tmp_path, 50), 0, 150)
    assert [len(session.turns) for session in whole.schedule()] == [3] * 50
    cut = [len(session.turns) for session in TracePlan(agentic(tmp_path, 50), 0, 100).schedule()]
    assert sum(cut) == 100
    assert whole.with_rate(10.0).rate == pytest.approx(10.0)


def test_it_survives_its_way_to_the_load_generator(tmp_path: Path) -> None:
    plan = TracePlan(mooncake(tmp_path), 3, 4, scale=0.5, shrink=4)
    write_plan(tmp_path / "plan.json", plan)
    assert read_plan(tmp_path / "plan.json") == plan


def test_what_is_no_trace_is_refused_with_what_was_expected(tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text('{"prompt": "hello"}\n')
    with pytest.raises(TraceError, match="hash_ids"):
        TracePlan(str(tmp_path / "other.jsonl"), 0, 10).schedule()


def test_a_trace_of_which_nothing_fits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no request"):
        TracePlan(mooncake(tmp_path), 0, 10).fitting(16).schedule()
