"""KV blocks that change their place before a step computes: a log, carried out in the order in which it was written.

    Copy     device block -> device block, its first tokens     a prompt ends inside a cached block
    Offload  device block -> host block                         an evicted block moves to host memory
    Onload   host block   -> device block                       and comes back on a hit

A move is written down at the moment it is decided on, and nothing computes before all are carried out. So whatever a
move reads is still there when its turn comes, even if a later one writes over it, and no source has to be held.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from typing import NamedTuple, Protocol, TypeVar, cast

__all__ = ["Copy", "Move", "Mover", "Offload", "Onload", "Transferred", "carry_out"]


class Copy(NamedTuple):
    source: int
    target: int
    tokens: int
    """How many of the first slots count; what comes behind them may be anything."""


class Offload(NamedTuple):
    source: int
    target: int
    """In host memory."""


class Onload(NamedTuple):
    source: int
    """In host memory."""
    target: int


Move = Copy | Offload | Onload

_M = TypeVar("_M", Copy, Offload, Onload)


class Mover(Protocol):
    """What carries moves out. Those of one call neither read nor write what another of them writes."""

    def copy_blocks(self, moves: Items[Copy]) -> None: ...

    def offload_blocks(self, moves: Items[Offload]) -> float:
        """How many seconds it took."""
        ...

    def onload_blocks(self, moves: Items[Onload]) -> float:
        """How many seconds it took."""
        ...


class Transferred(NamedTuple):
    """Blocks that crossed between device and host, and how long that took."""

    offloaded_blocks: int = 0
    offload_seconds: float = 0.0
    onloaded_blocks: int = 0
    onload_seconds: float = 0.0


def carry_out(mover: Mover, moves: Items[Move]) -> Transferred:
    """As if one by one and in order; in truth in as few calls as that allows."""
    done = Transferred()
    for run in _runs(moves):
        match run[0]:
            case Copy():
                mover.copy_blocks(cast(list[Copy], run))
            case Offload():
                seconds = mover.offload_blocks(cast(list[Offload], run))
                done = done._replace(
                    offloaded_blocks=done.offloaded_blocks + len(run), offload_seconds=done.offload_seconds + seconds
                )
            case Onload():
                seconds = mover.onload_blocks(cast(list[Onload], run))
                done = done._replace(
                    onloaded_blocks=done.onloaded_blocks + len(run), onload_seconds=done.onload_seconds + seconds
                )
    return done


def _runs(moves: Iterable[Move]) -> Iterator[list[Move]]:
    """Neighbours of one kind, cut where one would read or write what an earlier one of the run has written.

    What an earlier one has read may be written over: within a call all is read before anything is written, except by
    a copy, whose sources and targets are the same memory.
    """
    run: list[Move] = []
    written: set[int] = set()
    read: set[int] = set()
    for move in moves:
        is_copy = isinstance(move, Copy)
        clash = move.target in written or (is_copy and (move.source in written or move.target in read))
        if run and (type(move) is not type(run[0]) or clash):
            yield run
            run, written, read = [], set(), set()
        run.append(move)
        written.add(move.target)
        read.add(move.source)
    if run:
        yield run
