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
from dataclasses import dataclass

from replica.answer import Answer, Finish
from replica.engine import Engine, EngineFull, EngineStopped, InvalidPrompt, PromptTooLong, TokenEvent
from replica.metrics import ReplicaMetrics
from replica.sequence import FinishReason, SamplingParams, Sequence
from shared.api import ApiError, GenerationRequest
from shared.api_errors import context_length_exceeded, engine_full, model_not_found, shutting_down
from shared.blocks import namespace_root
from shared.prompts import EncodedPrompt, PromptEncoder, PromptError, PromptInput

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
        secret: str = "",
        seed: int = 0,
    ) -> None:
        """`seed` decides the sampling of requests that bring none."""
        self.model = model
        self._metrics = metrics
        self._secret = secret
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
    def answer(self, request: GenerationRequest, encoded: EncodedPrompt, tenant: str) -> Iterator[Answer]:
        """Submit, and give the answer for as long as it is read. Raises ApiError where the engine does not take it."""
        if self._draining:
            raise shutting_down()
        request_id = f"r{next(self._numbers)}"  # our own: clients may repeat theirs
        sequence = self._sequence(request_id, request, encoded, tenant)
        ends = request.stop_token_ids | (frozenset() if request.ignore_eos else self.model.eos_token_ids)
        answer = Answer(
            sequence.prompt_tokens,
            self.model.block_size,
            self.model.encoder.incremental_decoder(),
            request.stop,
            ends,
            sequence.arrival_seconds,
        )
        self._answers[request_id] = answer
        self._idle.clear()
        try:
            self._submit(sequence)
            yield answer
        finally:
            del self._answers[request_id]
            if not self._answers:
                self._idle.set()
            if answer.computing:
                self.engine.abort(request_id)

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

    def _sequence(self, request_id: str, request: GenerationRequest, encoded: EncodedPrompt, tenant: str) -> Sequence:
        room = self.model.context_tokens - encoded.token_count
        if room < 1:
            raise context_length_exceeded(encoded.token_count, self.model.context_tokens)
        params = SamplingParams(
            max_tokens=request.routing.max_tokens or room,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            seed=self._seeds.getrandbits(63) if request.seed is None else request.seed,
            stop_token_ids=request.stop_token_ids,
            ignore_eos=request.ignore_eos,
        )
        return Sequence(
            request_id,
            encoded.token_ids,
            encoded.token_count,
            params,
            namespace_root(self.model.fingerprint, tenant, self._secret),
            arrival_seconds=time.monotonic(),
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
        answer.push(event)
        latency = now - answer.arrival_seconds
        if event.first:
            answer.first_token_seconds = now
            self._metrics.observe_first_token(latency, answer.usage.prompt_tokens)
        if answer.finish is None or answer.finish.failure is not None:
            return
        if answer.computing:  # a stop string, which the engine cannot see
            self.engine.abort(event.request_id)
            answer.computing = False
        self._metrics.observe_answer(latency, now - answer.first_token_seconds, answer.usage.completion_tokens)
