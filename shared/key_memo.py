"""Block keys of prompts whose beginnings have been seen: only the new tail is hashed.

A prompt is a row of runs. What the keys of a run depend on is the state of the chain before it: the last key and the
tokens since the last full block. So the memo maps

    (block size, last key, open tokens, run)  ->  (keys completed in the run, the state after it)

and each conversation stores its runs once, however often it grows. What is kept is nothing that could be part of a
cycle, and is kept from the garbage collector: it would go through all of it now and then, and hold up everything.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from shared.blocks import BlockKey, PublishedKey, published_keys
from shared.byte_lru import ByteLru

__all__ = ["KeyMemo", "Run"]


class Run(msgspec.Struct, frozen=True, gc=False):
    """Consecutive tokens of a prompt. Two runs with the same `serial` hold the same ids."""

    packed: bytes
    """Their ids, as they stand in block keys."""
    serial: int | None
    """None: its keys are not kept, since it is short and seldom met again."""


class _State(msgspec.Struct, frozen=True, gc=False):
    last_key: BlockKey
    open_tokens: bytes


class _Step(msgspec.Struct, frozen=True, gc=False):
    keys: tuple[PublishedKey, ...]
    after: _State


_STEP_OVERHEAD_BYTES = 500
_KEY_BYTES = 44
"""An int and its place in a tuple."""


class KeyMemo:
    """Bounded to about `max_bytes`, least recently used first out. For one thread."""

    def __init__(self, max_bytes: int) -> None:
        self._steps: ByteLru[tuple[int, _State, int], _Step] = ByteLru(max_bytes)

    @property
    def used_bytes(self) -> int:
        return self._steps.used_bytes

    def check_integrity(self) -> None:
        self._steps.check_integrity()

    def keys(self, runs: Iterable[Run], root: BlockKey, block_size: int) -> list[PublishedKey]:
        """Equal to the published `block_keys` of all the tokens."""
        keys: list[PublishedKey] = []
        state = _State(root, b"")
        for run in runs:
            memo_key = None if run.serial is None else (block_size, state, run.serial)
            step = None if memo_key is None else self._steps.get(memo_key)
            if step is None:
                step = _extend(state, run.packed, block_size)
                if memo_key is not None:
                    size = _STEP_OVERHEAD_BYTES + _KEY_BYTES * len(step.keys) + 4 * block_size
                    self._steps.put(memo_key, step, size)
            keys.extend(step.keys)
            state = step.after
        return keys


def _extend(state: _State, packed: bytes, block_size: int) -> _Step:
    tokens = state.open_tokens + packed
    keys, last_key = published_keys(state.last_key, tokens, block_size)
    return _Step(keys, _State(last_key, tokens[4 * block_size * len(keys) :]))
