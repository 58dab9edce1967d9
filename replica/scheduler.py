"""What the next step computes. Pure: no clock, no threads, no tensors; the fleet simulator runs these lines too.

There is no prefill phase and no decode phase: every sequence's computed tokens catch up with its tokens, at most
`token_budget` tokens a step.

    waiting  -- admit: all blocks for its tokens, cached ones shared -->  running  -- stop, length, abort -->  finished
       ^------------ preempted: the last admitted gives its blocks back and begins again -----'

- Sequences that lack one token (decodes) go first, then prefills in order of admission, then admission by turns (see
  `waiting_line`). A sequence that does not fit holds back those behind it, so none starves.
- A sequence that expects to find much more of its prompt in the cache than there is, is refused when its turn comes.
- A waiting sequence whose next block is being computed by a running one is passed over until that block is there:
  of N equal cold prompts, one is computed.
- The first admitted is never preempted, and what can never fit is refused: something always finishes.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

from replica.prefix_cache import PrefixCache, PrefixMatch
from replica.runner import Chunk, StepResult, TokenLogprobs
from replica.sequence import FinishReason, Sequence, SequenceStatus
from replica.waiting_line import WaitingLine

__all__ = ["Counters", "EngineFull", "InvalidPrompt", "Progress", "PromptTooLong", "Scheduler"]

_COLD_TOKENS = 512
"""Fewer cached tokens than expected, by less than this, are not worth another journey."""


class EngineFull(Exception):  # noqa: N818 - a state, not a mistake
    """As many requests as the engine takes are running and waiting. Try again later, or elsewhere."""


class InvalidPrompt(Exception):  # noqa: N818 - says what is wrong with the prompt
    """The prompt can never be computed here."""


class PromptTooLong(InvalidPrompt):
    """Prompt and answer together exceed the context or the KV pool. The message names both numbers."""


class Progress(NamedTuple):
    """What a step did for one sequence: at most one new token; `sequence.finish_reason` says whether it ended."""

    sequence: Sequence
    token: int | None
    logprobs: TokenLogprobs | None = None
    """Of the token, where the sequence asks for them."""


@dataclass(slots=True)
class Counters:
    """Since the start. Prompt tokens are counted at first admission, so hit / prompt is the hit rate."""

    queries: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    """Of those, found in the cache, by whole blocks or less."""
    hit_blocks: int = 0
    copied_tokens: int = 0
    """Of the hit tokens, those that were part of a block only."""
    onloaded_tokens: int = 0
    """Of the hit tokens, those that came back from host memory."""
    computed_tokens: int = 0
    """Prefill, decode and recompute."""
    output_tokens: int = 0
    preemptions: int = 0


class Scheduler:
    """Owns running and waiting sequences; `cache` owns their blocks.

    `eos_token_ids` end a sequence that does not ignore them; `context_tokens` is the model's limit (None: the pool's).
    """

    def __init__(
        self,
        cache: PrefixCache,
        token_budget: int,
        max_running: int,
        max_waiting: int,
        *,
        context_tokens: int | None = None,
        eos_token_ids: Collection[int] = (),
    ) -> None:
        if min(token_budget, max_running) < 1 or max_waiting < 0:
            raise ValueError(f"absurd limits: {token_budget=}, {max_running=}, {max_waiting=}")
        self.cache = cache
        self.counters = Counters()
        self.token_budget = token_budget
        self.max_running = max_running
        self.max_sequences = max_running + max_waiting
        self.context_tokens = context_tokens
        self._eos_token_ids = frozenset(eos_token_ids)
        self._running: dict[str, Sequence] = {}  # in order of admission
        self._waiting = WaitingLine()
        self._refused: list[Sequence] = []
        self.guests: list[Sequence] = []
        """They have blocks, and are none of ours to compute (see `guests`)."""

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def queued_prefill_tokens(self) -> int:
        """Tokens that wait, or that running sequences lack beyond their next decode."""
        behind = (sequence.uncomputed_tokens for sequence in self._running.values())
        return self._waiting.tokens + sum(tokens for tokens in behind if tokens > 1)

    def sequences(self) -> list[Sequence]:
        return [*self._running.values(), *self._waiting]

    def check_fits(self, sequence: Sequence) -> None:
        """Raises InvalidPrompt for what can never run. Reads constants alone: any thread may call it."""
        prompt, answer = sequence.prompt_tokens, sequence.params.max_tokens
        if prompt < 1:
            raise InvalidPrompt("the prompt is empty: send at least one token")
        wanted = f"the prompt has {prompt} tokens and the answer may have {answer}"
        if self.context_tokens is not None and prompt + answer > self.context_tokens:
            raise PromptTooLong(
                f"{wanted}, {prompt + answer} together, but the context is {self.context_tokens} tokens: "
                "shorten the prompt or lower max_tokens"
            )
        # The last token of an answer is never computed: it needs no place.
        capacity = self.cache.num_blocks * self.cache.block_size
        if prompt + max(answer - 1, 0) > capacity:
            raise PromptTooLong(
                f"{wanted}, {prompt + answer} together, but this replica's KV pool holds {capacity} tokens: "
                "shorten the prompt or lower max_tokens"
            )

    def add(self, sequence: Sequence) -> None:
        """Raises EngineFull or InvalidPrompt; ValueError if the id is already here."""
        self.check_fits(sequence)
        if sequence.request_id in self._running or sequence.request_id in self._waiting:
            raise ValueError(f"request {sequence.request_id} is already here")
        if self.running + self.waiting >= self.max_sequences:
            raise EngineFull(f"{self.max_sequences} requests are running or waiting, which is the limit")
        self._waiting.add(sequence)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> Sequence | None:
        """End a sequence and free what it holds. None if it is not (or no longer) here. Only between steps."""
        sequence = self._running.get(request_id)
        if sequence is None:
            sequence = self._waiting.remove(request_id)
            if sequence is None:
                return None
            sequence.status, sequence.finish_reason = SequenceStatus.FINISHED, reason
        else:
            self._finish(sequence, reason)
        return sequence

    def schedule(self) -> list[Chunk]:
        """The next step; empty only if there is no work, or all of it was refused, or waits until a guest leaves.

        `commit` must follow, or `abort` of all its sequences.
        Before the step computes, the cache's `take_moves` are to be carried out.
        """
        chunks: list[Chunk] = []
        budget = self.token_budget
        # Whoever is preempted on the way lacks all its tokens from then on, and so is passed over.
        for sequence in list(self._running.values()):
            if sequence.uncomputed_tokens == 1 and self._make_room(sequence):
                budget -= self._append_chunk(chunks, sequence, budget)
        for sequence in self._running.values():
            if sequence.uncomputed_tokens > 1 and budget:
                budget -= self._append_chunk(chunks, sequence, budget)
        self._admit(chunks, budget)
        return chunks

    def take_refused(self) -> list[Sequence]:
        """Those that ended as `COLD` since the last call. `cached_tokens` says what the cache does hold for each."""
        refused, self._refused = self._refused, []
        return refused

    def commit(self, chunks: Items[Chunk], result: StepResult) -> list[Progress]:
        """Take in what the runner did with `chunks`: computed blocks are cached, tokens appended, ended ones freed."""
        progress = []
        all_logprobs = result.logprobs or [None] * len(chunks)
        for chunk, token, logprobs in zip(chunks, result.sampled, all_logprobs, strict=True):
            sequence = chunk.sequence
            complete = chunk.samples
            sequence.computed_tokens = chunk.end
            self.counters.computed_tokens += chunk.end - chunk.start
            self.cache.register(sequence)
            if complete:
                assert token is not None, f"no token for {sequence.request_id}, whose tokens are all computed"
                progress.append(self._take_token(sequence, token, logprobs))
        return progress

    def start_over(self) -> list[Sequence]:
        """Drop all sequences and the cache with them, in whatever state they are. The sequences dropped."""
        dropped = self.sequences()
        self._running.clear()
        self._waiting = WaitingLine()
        self.guests.clear()
        self.cache.start_over()
        return dropped

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every block is accounted for. O(pool)."""
        self.cache.check_integrity([*self.sequences(), *self.guests])

    def _make_room(self, sequence: Sequence) -> bool:
        """Blocks for a running sequence's next token, at the cost of the last admitted. False: that was itself."""
        while not self.cache.grow(sequence):
            victim = next(reversed(self._running.values()))
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        del self._running[sequence.request_id]
        self.cache.free(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.preemptions += 1
        self.counters.preemptions += 1
        self._waiting.put_back(sequence)

    def _admit(self, chunks: list[Chunk], budget: int) -> None:
        """Move waiting sequences to running while the step has tokens left for them: never more than it has tokens."""
        for sequence in self._waiting.in_turn():
            # A sequence that waits for a block costs one look-up a step, however many they are.
            if sequence.awaited_key is not None and self.cache.is_claimed(sequence.awaited_key):
                continue
            # Room for one more block each, so that admission is not undone by the next decodes.
            spare_blocks = len(self._running)
            if not budget or len(self._running) >= self.max_running or spare_blocks >= self.cache.pool.idle_blocks:
                return
            match = self.cache.match(sequence)
            sequence.awaited_key = match.awaited_key
            if match.awaited_key is not None:
                continue
            held_tokens = (len(match.block_ids) + len(match.host_keys)) * self.cache.block_size
            if _is_cold(sequence, held_tokens):
                self._refuse(sequence, held_tokens)
                continue
            if not self.cache.allocate(sequence, match, spare_blocks):
                return
            self._waiting.remove(sequence.request_id)
            self._running[sequence.request_id] = sequence
            sequence.status = SequenceStatus.RUNNING
            self._count_admission(sequence, match)
            budget -= self._append_chunk(chunks, sequence, budget)

    def _refuse(self, sequence: Sequence, held_tokens: int) -> None:
        self._waiting.remove(sequence.request_id)
        sequence.cached_tokens = held_tokens
        sequence.status, sequence.finish_reason = SequenceStatus.FINISHED, FinishReason.COLD
        self._refused.append(sequence)

    def _count_admission(self, sequence: Sequence, match: PrefixMatch) -> None:
        if sequence.preemptions:
            return
        sequence.cached_tokens = sequence.computed_tokens
        counters, block_size = self.counters, self.cache.block_size
        counters.queries += 1
        counters.prompt_tokens += sequence.prompt_tokens
        counters.hit_tokens += sequence.cached_tokens
        counters.hit_blocks += sequence.registered_blocks
        counters.copied_tokens += sequence.cached_tokens - sequence.registered_blocks * block_size
        counters.onloaded_tokens += len(match.host_keys) * block_size

    def _append_chunk(self, chunks: list[Chunk], sequence: Sequence, budget: int) -> int:
        """The tokens of `sequence` that fit into the rest of the step; how many they are."""
        start = sequence.computed_tokens
        end = min(start + budget, len(sequence.tokens))
        chunks.append(Chunk(sequence, start, end))
        self._waiting.charge(sequence.tenant, end - start)
        return end - start

    def _take_token(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> Progress:
        params = sequence.params
        if params.max_tokens == 0:  # computed for the cache alone
            self._finish(sequence, FinishReason.LENGTH)
            return Progress(sequence, None)
        sequence.tokens.append(token)
        self.counters.output_tokens += 1
        if token in params.stop_token_ids or (token in self._eos_token_ids and not params.ignore_eos):
            self._finish(sequence, FinishReason.STOP)
        elif sequence.output_tokens >= params.max_tokens:
            self._finish(sequence, FinishReason.LENGTH)
        return Progress(sequence, token, logprobs)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        del self._running[sequence.request_id]
        self.cache.free(sequence)
        sequence.status, sequence.finish_reason = SequenceStatus.FINISHED, reason


def _is_cold(sequence: Sequence, held_tokens: int) -> bool:
    """Less than half of what was expected is there, and what is missing is worth another journey."""
    missing = sequence.expected_cached_tokens - held_tokens
    return missing >= _COLD_TOKENS and missing > held_tokens and not sequence.preemptions
