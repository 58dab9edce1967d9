"""From a parsed request to its growing answer: the replica between HTTP and the engine.

One engine step makes one call into the event loop, whatever the batch: `_deliver` runs in the engine's thread and hands
the step's events over, `_dispatch` gives each to its answer. An answer that is left, for whatever reason, is aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from replica.answer import Answer, Finish
from replica.choices import Choices
from replica.engine import Engine, EngineFull, EngineStopped, InvalidPrompt, PromptTooLong, TokenEvent
from replica.metrics import ReplicaMetrics
from replica.sequence import FinishReason, SamplingParams, Sequence
from replica.token_bytes import TokenBytes
from shared.api import ApiError, GenerationRequest
from shared.api_errors import context_length_exceeded, engine_full, invalid_value, model_not_found, shutting_down
from shared.prompts import EncodedPrompt, PromptEncoder, PromptError, PromptInput
from shared.public_prefixes import PublicPrefixes

__all__ = ["Deliver", "ServedModel", "Service"]

Deliver = Callable[[list[TokenEvent]], None]

_LONG_TEXT_CHARACTERS = 8192
"""More than this is tokenized in a thread: about 3 ms of the event loop."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`context_tokens` is what fits the model, the operator's limit and the KV pool."""

    name: str
    fingerprint: str
    encoder: PromptEncoder
    block_size: int
    context_tokens: int
    eos_token_ids: frozenset[int]


class Service:
    """Belongs to one event loop."""

    def __init__(
        self,
        model: ServedModel,
        start_engine: Callable[[Deliver], Engine],
        metrics: ReplicaMetrics,
        prefixes: PublicPrefixes,
        seed: int = 0,
    ) -> None:
        """`prefixes` tells which blocks tenants share; `seed` decides the sampling of requests that bring none."""
        self.model = model
        self.bytes_of = TokenBytes(model.encoder.tokenizer)
        self._metrics = metrics
        self._prefixes = prefixes
        self._loop = asyncio.get_running_loop()
        self._answers: dict[str, Answer] = {}
        self._numbers = itertools.count()
        self._seeds = random.Random(seed)
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self.engine = start_engine(self._deliver)

    @property
    def draining(self) -> bool:
        return self._draining

    async def encode(self, prompt: PromptInput) -> EncodedPrompt:
        """Raises ApiError 400 where the prompt cannot be rendered or tokenized."""
        encoder = self.model.encoder
        try:
            prepared = encoder.prepare(prompt)
            if prepared.unseen_characters > _LONG_TEXT_CHARACTERS:
                await self._loop.run_in_executor(None, encoder.tokenize_missing, prepared)
            else:
                encoder.tokenize_missing(prepared)
            return encoder.finish(prepared)
        except PromptError as error:
            raise ApiError(400, "invalid_prompt", error.message, param=error.param) from None

    def check_model(self, name: str) -> None:
        if name != self.model.name:
            raise model_not_found(name, [self.model.name])

    @contextlib.contextmanager
    def answer(
        self, request: GenerationRequest, encoded: EncodedPrompt, tenant: str, expected_cached_tokens: int = 0
    ) -> Iterator[Choices]:
        """Submit, and give the answers for as long as they are read. Raises ApiError where the engine does not take it.

        Where the cache holds much less than expected, the answer is that error alone and nothing is computed.
        """
        if self._draining:
            raise shutting_down()
        changed = asyncio.Event()
        sequences = self._sequences(request, encoded, tenant, expected_cached_tokens)
        answers = {
            sequence.request_id: self._answer_of(sequence, request.stop, index, changed)
            for index, sequence in enumerate(sequences)
        }
        self._answers |= answers
        self._idle.clear()
        try:
            for sequence in sequences:
                self._submit(sequence)
            yield Choices(list(answers.values()), changed)
        finally:
            for request_id, answer in answers.items():
                del self._answers[request_id]
                if answer.computing:
                    self.engine.abort(request_id)
            if not self._answers:
                self._idle.set()

    def start_draining(self) -> None:
        """From now on nothing new is taken."""
        self._draining = True

    async def drained(self, grace_seconds: float, hurry: asyncio.Event | None = None) -> None:
        """Wait for the answers that run. What still runs after the grace, or at `hurry`, ends as aborted."""
        waits = [asyncio.ensure_future(event.wait()) for event in (self._idle, hurry) if event is not None]
        try:
            await asyncio.wait(waits, timeout=grace_seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        for request_id, answer in self._answers.items():
            self.engine.abort(request_id)
            answer.end(Finish(FinishReason.ABORT))

    def _sequences(
        self, request: GenerationRequest, encoded: EncodedPrompt, tenant: str, expected_cached_tokens: int
    ) -> list[Sequence]:
        """One for each answer. Raises ApiError where no such sequence can be."""
        params = self._sampling(request, encoded)
        namespace = self._prefixes.namespace(tenant, encoded.token_ids)
        now = time.monotonic()
        return [
            Sequence(
                f"r{next(self._numbers)}",  # our own: clients may repeat theirs
                list(encoded.token_ids),
                encoded.token_count,
                replace(params, seed=_seed_of_choice(params.seed, index)),
                namespace.root,
                arrival_seconds=now,
                keep_seconds=request.keep_seconds,
                branch=namespace.branch,
                tenant=tenant,
                expected_cached_tokens=expected_cached_tokens,
            )
            for index in range(request.n)
        ]

    def _sampling(self, request: GenerationRequest, encoded: EncodedPrompt) -> SamplingParams:
        max_tokens = request.routing.max_tokens
        room = self.model.context_tokens - encoded.token_count
        if room < (0 if max_tokens == 0 else 1):
            raise context_length_exceeded(encoded.token_count, self.model.context_tokens)
        vocabulary = self.model.encoder.vocabulary_size
        if request.logit_bias and (token := max(request.logit_bias)) >= vocabulary:
            raise invalid_value("logit_bias", f"names token {token}, but the vocabulary ends at {vocabulary - 1}")
        return SamplingParams(
            max_tokens=room if max_tokens is None else max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            min_p=request.min_p,
            repetition_penalty=request.repetition_penalty,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            logit_bias=request.logit_bias,
            seed=self._seeds.getrandbits(63) if request.seed is None else request.seed,
            stop_token_ids=request.stop_token_ids,
            ignore_eos=request.ignore_eos,
            top_logprobs=request.top_logprobs,
        )

    def _answer_of(self, sequence: Sequence, stops: tuple[str, ...], index: int, changed: asyncio.Event) -> Answer:
        params = sequence.params
        return Answer(
            sequence.prompt_tokens,
            self.model.block_size,
            self.model.encoder.incremental_decoder(),
            stops,
            params.stop_token_ids | (frozenset() if params.ignore_eos else self.model.eos_token_ids),
            sequence.arrival_seconds,
            index,
            changed,
        )

    def _submit(self, sequence: Sequence) -> None:
        try:
            self.engine.submit(sequence)
        except EngineFull:
            raise engine_full() from None
        except EngineStopped:
            raise shutting_down() from None
        except PromptTooLong as error:
            raise ApiError(400, "context_length_exceeded", str(error), param="max_tokens") from None
        except InvalidPrompt as error:
            raise ApiError(400, "invalid_prompt", str(error)) from None

    def _deliver(self, events: list[TokenEvent]) -> None:
        """The engine's thread calls this once a step."""
        self._loop.call_soon_threadsafe(self._dispatch, events)

    def _dispatch(self, events: list[TokenEvent]) -> None:
        now = time.monotonic()
        for event in events:
            answer = self._answers.get(event.request_id)
            if answer is not None and answer.finish is None:
                self._advance(answer, event, now)

    def _advance(self, answer: Answer, event: TokenEvent, now: float) -> None:
        begins = not answer.begun and answer.index == 0
        answer.push(event)
        if answer.finish is not None and answer.finish.failure is not None:
            return
        if begins:
            self._metrics.count_prompt(answer.usage.prompt_tokens)
        latency = now - answer.arrival_seconds
        if event.first:
            answer.first_token_seconds = now
            self._metrics.observe_first_token(latency)
        if answer.finish is None:
            return
        if answer.computing:  # a stop string, which the engine cannot see
            self.engine.abort(event.request_id)
            answer.computing = False
        self._metrics.observe_answer(latency, now - answer.first_token_seconds, answer.usage.completion_tokens)


def _seed_of_choice(seed: int | None, index: int) -> int | None:
    """The request's own for its first answer, so that more answers do not change it; derived from it for the others."""
    return seed if index == 0 or seed is None else random.Random(f"{seed}/choice/{index}").getrandbits(63)
