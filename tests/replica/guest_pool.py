"""Everything behind the engine's thread, stepped by hand, with guests."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items

from replica.block_moves import carry_out
from replica.guests import Guests
from replica.prefix_cache import PrefixCache
from replica.scheduler import Scheduler
from replica.sequence import Sequence
from tests.replica.pool_runner import ROOT, PoolRunner, answer_to, make_sequence

__all__ = ["PROMPT", "SIZE", "Pool", "kv_of"]

SIZE = 4
PROMPT = [*range(10, 10 + 4 * SIZE), 7, 8]  # four blocks, and half of one


class Pool:
    """Everything behind the engine's thread, stepped by hand."""

    def __init__(self, num_blocks: int = 16, *, finer: bool = False, host_blocks: int = 0) -> None:
        self.runner = PoolRunner(num_blocks, SIZE, host_blocks=host_blocks)
        self.cache = PrefixCache(num_blocks, SIZE, finer=finer, host_blocks=host_blocks)
        self.scheduler = Scheduler(self.cache, token_budget=16, max_running=4, max_waiting=100)
        self.guests = Guests(self.runner, self.scheduler, self.move_blocks)
        self.stalled = False

    def move_blocks(self) -> None:
        carry_out(self.runner, self.cache.take_moves())

    def step(self) -> None:
        chunks = self.scheduler.schedule()
        self.stalled = not chunks
        assert chunks or self.scheduler.guests or not self.scheduler.has_work
        self.move_blocks()
        if chunks:
            self.scheduler.commit(chunks, self.runner.execute(chunks))
        self.scheduler.check_integrity()

    def answer(self, prompt: list[int], max_tokens: int = 4) -> Sequence:
        sequence = make_sequence(prompt, max_tokens)
        self.scheduler.add(sequence)
        while sequence.finish_reason is None:
            self.step()
            assert not self.stalled
        assert sequence.tokens[len(prompt) :] == answer_to(prompt, max_tokens)
        return sequence

    def saved(self, prompt: list[int]) -> tuple[list[int], bytes]:
        guest = self.guests.hold(prompt, ROOT)
        assert guest is not None
        kv = bytes(self.guests.read(guest, 0, len(guest.block_ids)))
        tokens = list(guest.tokens)
        self.guests.leave(guest)
        self.scheduler.check_integrity()
        return tokens, kv

    def write(self, guest: Sequence, kv: bytes) -> None:
        for block in range(guest.registered_blocks, len(guest.block_ids)):
            self.guests.write(guest, block, memoryview(kv)[block * 8 * SIZE : (block + 1) * 8 * SIZE])


def kv_of(tokens: Items[int]) -> bytes:
    """What the slots of these tokens hold, and zeros up to the end of the block."""
    slots: list[int] = []
    for token in tokens:
        slots.append(hash((slots[-1] if slots else 0, token)))
    slots += [0] * (-len(slots) % SIZE)
    return array("q", slots).tobytes()
