"""The same seed gives the same traffic; each workload shares what its name says."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.workloads import SHAPES, Plan, Session

SMALL = {name: replace(shape, opening_words=shape.opening_words // 10, turn_words=10) for name, shape in SHAPES.items()}


def plan(workload: str, **changes: object) -> Plan:
    return replace(Plan(workload, SMALL[workload], seed=7, rate=5.0, requests=60), **changes)  # type: ignore[arg-type]


def arrivals(sessions: list[Session]) -> list[float]:
    return sorted(turn.at_seconds for session in sessions for turn in session.turns)


@pytest.mark.parametrize("workload", SHAPES)
def test_the_same_seed_gives_the_same_sessions_and_another_seed_others(workload: str) -> None:
    assert plan(workload).schedule() == plan(workload).schedule()
    assert plan(workload).schedule() != plan(workload, seed=8).schedule()


@pytest.mark.parametrize("workload", SHAPES)
def test_a_plan_survives_its_way_to_the_load_generator(workload: str) -> None:
    sent = msgspec.json.encode(plan(workload))
    assert msgspec.json.decode(sent, type=Plan).schedule() == plan(workload).schedule()


@given(
    workload=st.sampled_from(sorted(SHAPES)),
    requests=st.integers(1, 80),
    open_sessions=st.integers(1, 20),
    turns=st.integers(1, 6),
    seed=st.integers(0, 1000),
)
def test_a_schedule_holds_exactly_the_requests_asked_for_and_turns_come_in_order(
    workload: str, requests: int, open_sessions: int, turns: int, seed: int
) -> None:
    shape = replace(SMALL[workload], open_sessions=open_sessions, turns=turns)
    sessions = plan(workload, shape=shape, requests=requests, seed=seed).schedule()
    assert sum(len(session.turns) for session in sessions) == requests
    assert len({session.id for session in sessions}) == len(sessions)
    for session in sessions:
        times = [turn.at_seconds for turn in session.turns]
        assert times == sorted(times)
        assert 1 <= len(times) <= turns


def test_another_rate_changes_when_things_are_said_but_not_what() -> None:
    slow, fast = plan("chat", rate=1.0).schedule(), plan("chat", rate=10.0).schedule()
    texts = [[[turn.text for turn in session.turns] for session in sessions] for sessions in (slow, fast)]
    assert texts[0] == texts[1]
    assert arrivals(slow) == pytest.approx([10 * at for at in arrivals(fast)])


def test_arrivals_keep_the_rate_and_fixed_ones_the_gap() -> None:
    random = arrivals(plan("shared-prefix", requests=2000, rate=5.0).schedule())
    assert random[-1] == pytest.approx(400, rel=0.1)
    fixed = arrivals(plan("shared-prefix", arrivals="fixed", rate=5.0).schedule())
    assert fixed == pytest.approx([n / 5 for n in range(60)])


def test_a_chat_keeps_as_many_conversations_open_as_it_says() -> None:
    shape = replace(SMALL["chat"], open_sessions=5, turns=4)
    sessions = plan("chat", shape=shape, requests=400).schedule()
    at = arrivals(sessions)[200]
    under_way = [s for s in sessions if s.turns[0].at_seconds <= at <= s.turns[-1].at_seconds]
    assert len(under_way) <= 5
    full = [len(session.turns) for session in sessions[5:-5]]
    assert set(full) == {4}


def test_each_turn_carries_the_conversation_so_far() -> None:
    session = max(plan("chat").schedule(), key=lambda session: len(session.turns))
    first, second = session.messages([]), session.messages(["An answer."])
    assert second[: len(first)] == first
    assert second[len(first)] == {"role": "assistant", "content": "An answer."}
    assert second[-1] == {"role": "user", "content": session.turns[1].text}
    assert len(second) == len(first) + 2


@pytest.mark.parametrize("workload", ["shared-prefix", "few-shot", "chat"])
def test_openings_are_shared_by_many_sessions_and_questions_by_none(workload: str) -> None:
    sessions = plan(workload, requests=400).schedule()
    openings = {session.messages([])[0]["content"] for session in sessions}
    assert len(openings) <= SMALL[workload].groups
    assert len(openings) < 0.8 * len(sessions)
    questions = [turn.text for session in sessions for turn in session.turns]
    assert len(set(questions)) == len(questions)


def test_rag_repeats_popular_documents_more_often() -> None:
    sessions = plan("rag", requests=300).schedule()
    first = [session.messages([])[-1]["content"].split("\n\n")[0] for session in sessions]
    counts = sorted((first.count(document) for document in set(first)), reverse=True)
    assert counts[0] > 3 * counts[-1]
    assert len(counts) > SMALL["rag"].groups // 2
