"""The ideal equals what brute force finds: the longest beginning shared with any earlier text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loadtest.oracle import ideal_hits
from loadtest.records import RequestRecord, unsent
from loadtest.workloads import Message, Session, Turn

TEXT = st.text("ab", max_size=12)


def encode_prompt(messages: list[Message]) -> list[int]:
    """A character is a token; a turn starts with its role's first letter and ends with a dot."""
    return [ord(c) for message in messages for c in message["role"][0] + message["content"] + "."] + [ord("a")]


def encode_answer(text: str) -> list[int]:
    return [ord(c) for c in text]


def record(session: int, turn: int, answer: str = "", error: str | None = None) -> RequestRecord:
    return RequestRecord(
        session=session,
        turn=turn,
        scheduled_seconds=0.0,
        sent_seconds=0.0,
        lag_ms=0.0,
        answer=answer,
        completion_tokens=len(answer) + 1,  # the last one is a stop token, which has no text
        error=error,
    )


def conversation(session: int, *texts: str, opening: str = "") -> Session:
    return Session(session, ({"role": "system", "content": opening},), tuple(Turn(0.0, t, 8) for t in texts))


@given(
    sessions=st.lists(st.tuples(TEXT, st.lists(TEXT, min_size=1, max_size=3)), min_size=1, max_size=4),
    answers=st.lists(TEXT, min_size=12, max_size=12),
    order=st.randoms(use_true_random=False),
)
def test_ideal_equals_brute_force(sessions: list[tuple[str, list[str]]], answers: list[str], order: object) -> None:
    made = [conversation(n, *texts, opening=opening) for n, (opening, texts) in enumerate(sessions)]
    slots = [session.id for session in made for _ in session.turns]
    order.shuffle(slots)  # type: ignore[attr-defined]
    records, texts, expected = [], list[list[int]](), []
    said: dict[int, list[str]] = {session.id: [] for session in made}
    for n, number in enumerate(slots):
        prompt = encode_prompt(made[number].messages(said[number]))
        depth = 0
        for text in texts:
            shared = min(len(text), len(prompt) - 1)
            while text[:shared] != prompt[:shared]:
                shared -= 1
            depth = max(depth, shared)
        expected.append((len(prompt), depth))
        records.append(record(number, len(said[number]), answers[n]))
        texts.append(prompt + encode_answer(answers[n]))
        said[number].append(answers[n])
    assert ideal_hits(made, records, encode_prompt, encode_answer) == expected


def test_a_whole_prompt_seen_before_still_computes_its_last_token() -> None:
    again = [conversation(0, "aaaa"), conversation(1, "aaaa")]
    first, second = ideal_hits(again, [record(0, 0), record(1, 0)], encode_prompt, encode_answer)
    assert first is not None
    assert second is not None
    assert second.cached_tokens == second.prompt_tokens - 1


def test_turns_that_were_never_asked_have_no_ideal() -> None:
    one = [conversation(0, "aa", "bb", "ab")]
    records = [record(0, 0, "b"), record(0, 1, error="refused"), unsent(0, 2, 0.0, "An earlier turn failed.")]
    hits = ideal_hits(one, records, encode_prompt, encode_answer)
    assert [hit is None for hit in hits] == [False, False, True]
