from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from replica.model_runner import ModelRunner
from replica.runner import Chunk, RunnerError
from replica.sequence import Sequence
from tests.replica.tiny_zoo import FAMILIES, SmallEngine, build, make_prompt, make_sequence


def placed(tokens: list[int], blocks: list[int], **params: Any) -> Sequence:
    sequence = make_sequence(tokens, **params)
    sequence.block_ids = blocks
    return sequence


def rounded(family: str, dtype: torch.dtype) -> PreTrainedModel:
    model = build(family)
    torch.nn.Module.to(model, dtype)  # `to` of a transformers model is wrapped in an untyped decorator
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_mixed_chunks_over_shared_blocks_equal_those_of_the_whole_prompts(family: str) -> None:
    reference, runner = build(family), ModelRunner(build(family), 64, 4)
    shared = make_prompt(8)
    first = placed(shared + make_prompt(9, seed=1), [5, 2, 9, 7, 30])
    second = placed(shared + make_prompt(5, seed=2), [5, 2, 11, 1])
    runner.logits([Chunk(first, 0, 6)])
    runner.logits([Chunk(first, 6, 16)])

    logits = runner.logits([Chunk(second, 8, 13), Chunk(first, 16, 17)])

    with torch.inference_mode():
        expected = [reference(torch.tensor([each.tokens]), use_cache=False).logits[0, -1] for each in (second, first)]
    torch.testing.assert_close(logits, torch.stack(expected), rtol=1e-4, atol=1e-4)
    top = logits.topk(2).values
    assert (top[:, 0] - top[:, 1]).min() > 1e-2, "too close a race for greedy answers to be compared elsewhere"


@pytest.mark.parametrize(("dtype", "deviations"), [(torch.bfloat16, 0.08), (torch.float16, 0.01)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_in_half_precision_are_as_near_to_the_truth_as_those_of_transformers(
    family: str, dtype: torch.dtype, deviations: float
) -> None:
    """The truth is the same rounded weights, in single precision."""
    tokens = make_prompt(120)
    runner = ModelRunner(rounded(family, dtype), 40, 4)
    sequence = placed(tokens, list(range(39, 9, -1)))
    runner.logits([Chunk(sequence, 0, 50)])
    runner.logits([Chunk(sequence, 50, 119)])

    logits = runner.logits([Chunk(sequence, 119, 120)])[0].float()

    with torch.inference_mode():
        exact = rounded(family, dtype)
        torch.nn.Module.to(exact, torch.float32)
        truth = exact(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        theirs = rounded(family, dtype)(torch.tensor([tokens]), use_cache=False).logits[0, -1].float()
    error, their_error = ((each - truth).std() / truth.std() for each in (logits, theirs))
    assert error < max(deviations, 1.5 * their_error)


def test_a_step_answers_in_the_order_of_its_chunks_and_only_where_they_end() -> None:
    runner = ModelRunner(build("llama"), 256, 4)
    unfinished = placed(make_prompt(30), list(range(8)))
    short = placed(make_prompt(9), [20, 21, 22])
    long = placed(make_prompt(300), list(range(100, 175)))
    alone = [runner.execute([Chunk(each, 0, len(each.tokens))]).sampled[0] for each in (long, short)]

    result = runner.execute([Chunk(unfinished, 0, 20), Chunk(long, 299, 300), Chunk(short, 8, 9)])

    assert result.sampled == [None, *alone]
    assert result.seconds > 0


def test_a_step_in_which_nothing_ends_samples_nothing() -> None:
    sequence = placed(make_prompt(10), [0, 1, 2])

    assert ModelRunner(build("gpt2"), 4, 4).execute([Chunk(sequence, 0, 7)]).sampled == [None]


def test_a_seeded_answer_is_the_same_alone_in_a_batch_and_preempted() -> None:
    prompts = [make_prompt(10, seed=seed) for seed in range(6)]
    ample, scarce = SmallEngine(build("llama"), num_blocks=200), SmallEngine(build("llama"), num_blocks=20)

    def asked() -> list[Sequence]:
        return [make_sequence(p, 30, temperature=1.0, top_p=0.9, seed=seed) for seed, p in enumerate(prompts)]

    alone = [ample.run(sequence)[0] for sequence in asked()]
    preempted = scarce.run(*asked())

    assert scarce.scheduler.counters.preemptions > 0
    assert preempted == alone


def test_a_failing_forward_pass_is_a_runner_error_and_the_next_step_works() -> None:
    runner = ModelRunner(build("llama"), 8, 4)
    good = placed(make_prompt(5), [0, 1])

    with pytest.raises(RunnerError, match="forward pass"):
        runner.execute([Chunk(placed([10**6], [2]), 0, 1)])

    assert runner.execute([Chunk(good, 0, 5)]).sampled[0] is not None


def test_forgetting_an_unknown_request_is_fine() -> None:
    ModelRunner(build("llama"), 8, 4).forget("nobody")
