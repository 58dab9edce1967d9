"""The proof of the engine: greedy answers equal those of transformers' own `generate`, token for token, whatever the
cache, the batch, the chunks and the pressure on memory were."""

from __future__ import annotations

import pytest

from replica import attention_cascade, attention_varlen
from replica.attention_cascade import CascadeAttention
from replica.attention_gathered import GatheredAttention
from replica.attention_varlen import VarlenAttention
from replica.paged_attention import Attention
from replica.tiny_model import build_tiny
from replica.tiny_tokenizer import tiny_bundle
from shared.prompts import ChatPrompt, PromptEncoder
from tests.replica.plain_varlen import plain_varlen
from tests.replica.tiny_zoo import FAMILIES, SmallEngine, build, generate, make_prompt, make_sequence


@pytest.mark.parametrize("family", FAMILIES)
def test_cold_then_fully_then_partly_cached_prompts_get_the_answers_of_generate(family: str) -> None:
    reference, engine = build(family), SmallEngine(build(family))
    prompt = make_prompt(41)
    branch = prompt[:22] + make_prompt(17, seed=1)
    cold, hot, partial = (make_sequence(tokens, 12) for tokens in (prompt, prompt, branch))

    assert engine.run(cold) == [generate(reference, prompt, 12)]
    assert engine.run(hot) == [generate(reference, prompt, 12)]
    assert engine.run(partial) == [generate(reference, branch, 12)]

    assert [sequence.cached_tokens for sequence in (cold, hot, partial)] == [0, 40, 20]


def test_the_answer_is_cached_too_and_the_next_turn_goes_on_from_it() -> None:
    reference, engine = build("llama"), SmallEngine(build("llama"))
    first = make_sequence(make_prompt(18), 15)
    engine.run(first)
    turn = make_sequence([*first.tokens, *make_prompt(6, seed=2)], 10)

    assert engine.run(turn) == [generate(reference, turn.tokens[: turn.prompt_tokens], 10)]

    assert turn.cached_tokens == 32  # 18 + 15 tokens, the last of which was never computed: eight blocks of four


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_that_decodes_and_prefills_at_once_gets_the_answers_of_each_alone(family: str) -> None:
    reference, engine = build(family), SmallEngine(build(family), num_blocks=200, token_budget=23)
    shared = make_prompt(30)
    prompts = [shared + make_prompt(length, seed=length) for length in (1, 2, 9, 31)] + [make_prompt(5), [7]]
    sequences = [make_sequence(prompt, 9 + index) for index, prompt in enumerate(prompts)]

    answers = engine.run(*sequences)

    assert answers == [generate(reference, prompt, 9 + index) for index, prompt in enumerate(prompts)]


@pytest.mark.parametrize("token_budget", [1, 3, 7, 16])
def test_odd_chunks_of_a_prompt_change_nothing(token_budget: int) -> None:
    reference, engine = build("qwen3"), SmallEngine(build("qwen3"), token_budget=token_budget)
    prompt = make_prompt(45)

    assert engine.run(make_sequence(prompt, 8)) == [generate(reference, prompt, 8)]


def test_after_eviction_an_evicted_prompt_is_computed_again_and_answered_alike() -> None:
    reference, engine = build("llama"), SmallEngine(build("llama"), num_blocks=16)
    prompt = make_prompt(40)
    engine.run(make_sequence(prompt, 8))
    engine.run(*(make_sequence(make_prompt(40, seed=seed), 8) for seed in (3, 4)))
    assert engine.cache.evictions["capacity"] > 0
    again = make_sequence(prompt, 8)

    assert engine.run(again) == [generate(reference, prompt, 8)]

    assert again.cached_tokens < 36


def test_preempted_sequences_get_the_answers_they_would_have_had_alone() -> None:
    reference, engine = build("llama"), SmallEngine(build("llama"), num_blocks=20)
    prompts = [make_prompt(10, seed=seed) for seed in range(6)]

    answers = engine.run(*(make_sequence(prompt, 30) for prompt in prompts))

    assert engine.scheduler.counters.preemptions > 0
    assert answers == [generate(reference, prompt, 30) for prompt in prompts]


def test_part_of_a_block_is_reused_with_the_answers_of_a_cold_start() -> None:
    reference = build("llama")
    engine = SmallEngine(build("llama"), num_blocks=8, block_size=32, finer=True)
    beginning = make_prompt(20)
    for seed, cached_tokens in ((1, 0), (2, 20), (3, 20)):
        sequence = make_sequence(beginning + make_prompt(30, seed=seed), 6)
        assert engine.run(sequence) == [generate(reference, beginning + make_prompt(30, seed=seed), 6)]
        assert sequence.cached_tokens == cached_tokens
    goes_on = make_sequence([*sequence.tokens, 5, 6], 6)
    assert engine.run(goes_on) == [generate(reference, [*sequence.tokens, 5, 6], 6)]
    # All but the last token of the answer, which was never computed: 55 tokens, 23 of them in a block half full.
    assert goes_on.cached_tokens == 55


def test_what_comes_back_from_host_memory_gives_the_answers_of_a_cold_start() -> None:
    reference = build("qwen3")
    engine = SmallEngine(build("qwen3"), num_blocks=16, host_blocks=40)
    prompts = [make_prompt(40, seed=seed) for seed in range(3)]
    for _ in range(3):
        for prompt in prompts:
            sequence = make_sequence(prompt, 8)
            assert engine.run(sequence) == [generate(reference, prompt, 8)]
    assert sequence.cached_tokens == 36
    assert engine.scheduler.counters.onloaded_tokens > 100


def test_contexts_beyond_the_padded_decodes_are_answered_alike() -> None:
    reference, engine = build("gpt2"), SmallEngine(build("gpt2"), num_blocks=400, token_budget=128)
    prompts = [make_prompt(length, seed=length) for length in (250, 255, 300, 20)]

    answers = engine.run(*(make_sequence(prompt, 10) for prompt in prompts))

    assert answers == [generate(reference, prompt, 10) for prompt in prompts]


@pytest.mark.parametrize("kind", [GatheredAttention, CascadeAttention, VarlenAttention])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_batch_behind_one_prefix_is_answered_alike_by_every_attention(
    kind: type[Attention], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_varlen, "_kernel", plain_varlen)
    monkeypatch.setattr(attention_cascade, "_WORTHWHILE_TOKENS", 32)
    reference, engine = build(family), SmallEngine(build(family), 300, token_budget=100, attention=kind)
    shared = make_prompt(80)
    prompts = [shared + make_prompt(length, seed=length) for length in (1, 4, 9, 30)] + [make_prompt(20)]
    engine.run(make_sequence(shared, 1))

    answers = engine.run(*(make_sequence(prompt, 10) for prompt in prompts))

    assert answers == [generate(reference, prompt, 10) for prompt in prompts]


def test_a_conversation_with_tiny_is_answered_alike_and_hits_its_own_answers() -> None:
    engine, reference = SmallEngine(build_tiny(), num_blocks=200, block_size=16, token_budget=100), build_tiny()
    encoder = PromptEncoder(tiny_bundle())
    messages = [{"role": "system", "content": "You answer questions about refunds. " * 10}]
    for question in ("What is the refund policy?", "And for an order of last year?"):
        messages.append({"role": "user", "content": question})
        prompt = encoder.encode(ChatPrompt(messages)).token_ids
        sequence = make_sequence(prompt, 40)
        [answer] = engine.run(sequence)
        assert answer == generate(reference, prompt, 40)
        messages.append({"role": "assistant", "content": encoder.decode(answer)})

    # The second turn holds the first question and all but the last token of its answer.
    known = len(encoder.encode(ChatPrompt(messages[:3], add_generation_prompt=False)).token_ids) - 2
    assert sequence.cached_tokens == known // 16 * 16
