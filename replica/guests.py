"""Sequences that hold blocks and are never computed: what is being saved to a session, or brought back from one.

    save      hold -> read, read, ...   -> leave        the blocks cannot be evicted or written over meanwhile
    restore   expect -> write, write, ... -> settle     they are found by nobody before all are there; then by everyone
                                          '-> leave     or, if something is wrong, by nobody ever

Only the engine's thread calls these methods, between steps; each touches as many blocks as its caller asks for, so a
long session is read and written by portions while steps go on. A guest never takes a block that somebody uses. Who
waits for blocks that guests have, or for the ones that a restore brings, waits until the guest is gone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Items

from replica.prefix_cache import PrefixMatch
from replica.runner import Runner
from replica.scheduler import Scheduler
from replica.sequence import SamplingParams, Sequence
from shared.blocks import BlockKey
from shared.public_prefixes import Branch

__all__ = ["GuestLost", "Guests", "NotEnoughRoom"]


class NotEnoughRoom(Exception):  # noqa: N818 - a state, not a mistake
    """`forever` where not even an idle pool has it."""

    def __init__(self, message: str, *, forever: bool = False) -> None:
        super().__init__(message)
        self.forever = forever


class GuestLost(Exception):  # noqa: N818 - a state, not a mistake
    """The cache has started over meanwhile, and the guest's blocks are somebody else's."""


class Guests:
    """`move_blocks` carries out what the cache wants moved, now."""

    def __init__(self, runner: Runner, scheduler: Scheduler, move_blocks: Callable[[], None]) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._move_blocks = move_blocks
        self._numbers = itertools.count()

    def hold(self, token_ids: Items[int], root: BlockKey, branch: Branch | None = None) -> Sequence | None:
        """The longest computed beginning of a prompt; None if the cache holds nothing of it. Raises GuestLost."""
        cache = self._scheduler.cache
        guest = self._guest(token_ids[: cache.num_blocks * cache.block_size], root, branch)
        match = self._match(guest)
        # Where there is no room to copy or to bring back, what needs no room will do.
        for choice in (match, PrefixMatch(match.block_ids, None)):
            full = len(choice.block_ids) + len(choice.host_keys)
            tokens = full * cache.block_size + (choice.partial.tokens if choice.partial is not None else 0)
            guest.tokens = list(token_ids[:tokens])
            del guest.keys[full:]
            if tokens and cache.allocate(guest, choice):
                self._let_in(guest)
                return guest
        return None

    def expect(self, token_ids: Items[int], root: BlockKey, branch: Branch | None = None) -> Sequence:
        """Room for a prompt's KV; its first `registered_blocks` are held already. Raises NotEnoughRoom, GuestLost."""
        cache = self._scheduler.cache
        blocks = cache.blocks_for(len(token_ids))
        if blocks > cache.num_blocks:
            raise NotEnoughRoom(f"it needs {blocks} blocks, and there are {cache.num_blocks} in all", forever=True)
        guest = self._guest(token_ids, root, branch)
        match = PrefixMatch(self._match(guest).block_ids, None)
        guest.tokens.pop()
        spare_blocks = self._scheduler.running  # one more for each, so that the next decodes preempt nobody
        if not cache.allocate(guest, match, spare_blocks):
            missing, used = blocks - len(match.block_ids), cache.pool.used_blocks
            raise NotEnoughRoom(f"{missing} blocks are needed, and {used} of {cache.num_blocks} are in use")
        self._let_in(guest)
        return guest

    def read(self, guest: Sequence, first: int, last: int) -> memoryview:
        """KV of its blocks first to last - 1. Raises GuestLost."""
        self._check(guest)
        return self._runner.read_blocks(guest, first, last)

    def write(self, guest: Sequence, first: int, raw: memoryview) -> None:
        """KV of its blocks from `first` on, none of which anybody else can find. Raises GuestLost."""
        self._check(guest)
        assert first >= guest.registered_blocks, "these blocks are shared"
        self._runner.write_blocks(guest, first, raw)

    def settle(self, guest: Sequence) -> int:
        """All is written: from now on it is cached like what was computed. How many blocks can be found now."""
        self._check(guest)
        guest.computed_tokens = len(guest.tokens)
        self._scheduler.cache.register(guest)
        found = guest.registered_blocks
        self.leave(guest)
        return found

    def leave(self, guest: Sequence) -> None:
        """Who has left may leave again."""
        if guest in self._scheduler.guests:
            self._scheduler.guests.remove(guest)
            self._scheduler.cache.free(guest)

    def _guest(self, token_ids: Items[int], root: BlockKey, branch: Branch | None) -> Sequence:
        # The last token of a prompt is never part of a match. One more, which counts for nothing, and all of ours are.
        tokens = [*token_ids, 0]
        name, params = f"guest-{next(self._numbers)}", SamplingParams(max_tokens=0)
        return Sequence(name, tokens, len(token_ids), params, root, branch=branch)

    def _match(self, guest: Sequence) -> PrefixMatch:
        match = self._scheduler.cache.match(guest)
        del guest.keys[(len(guest.tokens) - 1) // self._scheduler.cache.block_size :]  # not the one with that token
        return match

    def _let_in(self, guest: Sequence) -> None:
        self._scheduler.guests.append(guest)
        self._move_blocks()
        self._check(guest)

    def _check(self, guest: Sequence) -> None:
        if guest not in self._scheduler.guests:
            raise GuestLost("the cache started over meanwhile: try again")
