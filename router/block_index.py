"""Which replicas hold which block, and how far from its first block on each of them holds a prompt.

    _device  {key: holders}    holders is a bit mask, one bit (slot) per replica; Python ints, so any number of replicas
    _host    {key: holders}    the second tier: what a replica can bring back from host memory

What a replica publishes is prefix-closed and keys are chained, so along a prompt its bit is a run of ones followed by
zeros. A range of blocks whose two ends have the same holders needs no further look: one bisection answers for all
replicas at once.

        block    0    1    2    3    4
        r0       1    1    1    1    0      4 blocks
        r1       1    1    0    0    0      2 blocks

A replica that leaves costs nothing at once: its slot is struck from `_alive`, which every query starts from, and
`sweep` clears its bits in small steps. Only then is the slot given to another. A replica's keys are replaced likewise:
loaded into a fresh slot that no query sees, which then takes over in one assignment.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import NamedTuple

from shared.blocks import PublishedKey, checksum

__all__ = ["BlockIndex", "HeldKeys", "HeldTier"]

_LOAD_KEYS = 1024
_SWEEP_KEYS = 4096
"""Keys between two pauses while a replica's keys are put in, or cleared up: about a millisecond of work."""
_MAX_INTERNED = 1 << 16
_MAX_NAMED = 1 << 12


class HeldTier(NamedTuple):
    """How many keys are held, and their order-free checksum."""

    blocks: int = 0
    checksum: int = 0

    def changed(self, added: Sequence[PublishedKey], gone: Sequence[PublishedKey] = ()) -> HeldTier:
        return HeldTier(self.blocks + len(added) - len(gone), self.checksum ^ checksum(added) ^ checksum(gone))


class HeldKeys(NamedTuple):
    """What the index has for a replica, to compare with what the replica says."""

    device: HeldTier = HeldTier()
    host: HeldTier = HeldTier()


class BlockIndex:
    """One event loop's; no method waits for anything."""

    def __init__(self) -> None:
        self._device: dict[PublishedKey, int] = {}
        self._host: dict[PublishedKey, int] = {}
        self._slots: dict[str, int] = {}
        self._owners: dict[int, str] = {}
        self._held: dict[str, HeldKeys] = {}
        # Every slot is in exactly one of these four: owned and seen by queries, being loaded, to be swept, free.
        self._alive = 0
        self._loading = 0
        self._retired = 0
        self._free: set[int] = set()
        self._sweep: Iterator[None] | None = None
        # Keys by the thousand have equal holders: they share one mask object instead of some 32 bytes each.
        self._interned: dict[int, int] = {}
        # The owners of masks met lately.
        self._names: dict[int, tuple[str, ...]] = {}

    def __len__(self) -> int:
        """Distinct device keys, those not yet swept included."""
        return len(self._device)

    def __contains__(self, replica_id: str) -> bool:
        return replica_id in self._slots

    def held(self, replica_id: str) -> HeldKeys:
        return self._held.get(replica_id, HeldKeys())

    def apply(
        self,
        replica_id: str,
        stored: Iterable[PublishedKey] = (),
        removed: Iterable[PublishedKey] = (),
        host_stored: Iterable[PublishedKey] = (),
        host_removed: Iterable[PublishedKey] = (),
    ) -> HeldKeys:
        """Change what a replica holds; one not seen before starts empty. The same change twice is the change once."""
        if len(self._interned) > _MAX_INTERNED:
            self._interned.clear()
        if replica_id not in self._slots:
            self._own(replica_id, self._take_slot(), HeldKeys())
        bit = 1 << self._slots[replica_id]
        device, host = self._held[replica_id]
        held = HeldKeys(
            device.changed(self._add(self._device, bit, stored), self._clear(self._device, bit, removed)),
            host.changed(self._add(self._host, bit, host_stored), self._clear(self._host, bit, host_removed)),
        )
        self._held[replica_id] = held
        return held

    def replace(
        self, replica_id: str, keys: Sequence[PublishedKey], host_keys: Sequence[PublishedKey] = ()
    ) -> HeldKeys:
        """From now on the replica holds exactly these."""
        for _ in self.replacing(replica_id, keys, host_keys):
            pass
        return self._held[replica_id]

    def replacing(
        self, replica_id: str, keys: Sequence[PublishedKey], host_keys: Sequence[PublishedKey] = ()
    ) -> Generator[None, None, None]:
        """`replace` in small steps. Queries see the old keys until the last step, then the new ones.

        Closed before its end, the old ones stay. Do not `apply` to the replica meanwhile: it would be lost.
        """
        slot = self._take_slot()
        bit = 1 << slot
        self._loading |= bit
        tiers = []
        try:
            for tier, listed in ((self._device, keys), (self._host, host_keys)):
                held = HeldTier()
                for start in range(0, len(listed), _LOAD_KEYS):
                    held = held.changed(self._add(tier, bit, listed[start : start + _LOAD_KEYS]))
                    yield
                tiers.append(held)
        except BaseException:
            self._loading ^= bit
            self._retired |= bit
            raise
        self._loading ^= bit
        self.remove(replica_id)
        self._own(replica_id, slot, HeldKeys(*tiers))

    def remove(self, replica_id: str) -> None:
        """The replica holds nothing any more, from this moment on. Unknown ids are fine."""
        slot = self._slots.pop(replica_id, None)
        if slot is not None:
            del self._owners[slot], self._held[replica_id]
            self._names.clear()
            self._alive ^= 1 << slot
            self._retired |= 1 << slot

    def sweep(self) -> bool:
        """One small step of clearing up after removed replicas. True while there is more to do."""
        if self._sweep is None and self._retired:
            self._sweep = self._sweeping(self._retired)
        if self._sweep is not None and next(self._sweep, self._sweep) is self._sweep:
            self._sweep = None
        return bool(self._retired)

    def held_prefixes(self, keys: Sequence[PublishedKey]) -> dict[str, int]:
        """Device blocks of this chain that each replica holds, from the first on; those that hold none are absent."""
        return self._by_owner(_depths(self._device.get, self._alive, keys))

    @property
    def tiered(self) -> bool:
        """Somebody holds blocks in host memory, so `resident_prefixes` may differ from `held_prefixes`."""
        return bool(self._host)

    def resident_prefixes(self, keys: Sequence[PublishedKey]) -> dict[str, int]:
        """As `held_prefixes`, of blocks on the device or in host memory: never fewer.

        A block moves to host memory only after its children: the two tiers *together* are prefix-closed.
        """
        device, host = self._device.get, self._host.get
        return self._by_owner(_depths(lambda key, none: device(key, none) | host(key, none), self._alive, keys))

    def _by_owner(self, depths: list[tuple[int, int]]) -> dict[str, int]:
        held: dict[str, int] = {}
        for holders, blocks in depths:
            names = self._names.get(holders)
            if names is None:
                if len(self._names) >= _MAX_NAMED:
                    self._names.clear()
                names = self._names[holders] = tuple(
                    self._owners[slot] for slot in range(holders.bit_length()) if holders >> slot & 1
                )
            held.update(dict.fromkeys(names, blocks))
        return held

    def check_integrity(self) -> None:
        """Every mask names slots in use, and every replica's count and checksum are those of its keys. O(index)."""
        free = sum(1 << slot for slot in self._free)
        parts = (self._alive, self._loading, self._retired, free)
        assert sum(parts) == (1 << self._slot_count()) - 1, "a slot is lost, or in two places"
        assert self._slots == {replica_id: slot for slot, replica_id in self._owners.items()}, "slots and owners differ"
        assert self._alive == sum(1 << slot for slot in self._owners), "alive differs from the owners"
        for tier in (self._device, self._host):
            for holders in tier.values():
                assert holders > 0, "a key that nobody holds"
                assert not holders & ~(sum(parts) ^ free), "a key is held by a slot that is not in use"
        for replica_id, slot in self._slots.items():
            tiers = (
                [key for key, holders in tier.items() if holders >> slot & 1] for tier in (self._device, self._host)
            )
            counted = HeldKeys(*(HeldTier().changed(keys) for keys in tiers))
            assert self._held[replica_id] == counted, f"{replica_id}: {self._held[replica_id]} is not {counted}"

    def _slot_count(self) -> int:
        return len(self._free) + (self._alive.bit_count() + self._loading.bit_count() + self._retired.bit_count())

    def _take_slot(self) -> int:
        if not self._free:
            return self._slot_count()
        slot = min(self._free)  # low bits keep the masks short
        self._free.remove(slot)
        return slot

    def _own(self, replica_id: str, slot: int, held: HeldKeys) -> None:
        self._slots[replica_id] = slot
        self._owners[slot] = replica_id
        self._names.clear()
        self._held[replica_id] = held
        self._alive |= 1 << slot

    def _add(self, tier: dict[PublishedKey, int], bit: int, keys: Iterable[PublishedKey]) -> list[PublishedKey]:
        """Returns the keys that were not there before."""
        added = []
        get, interned = tier.get, self._interned
        for key in keys:
            holders = get(key, 0)
            if not holders & bit:
                holders |= bit
                tier[key] = interned.setdefault(holders, holders)
                added.append(key)
        return added

    def _clear(self, tier: dict[PublishedKey, int], bits: int, keys: Iterable[PublishedKey]) -> list[PublishedKey]:
        """Returns the keys that were there."""
        gone = []
        get, interned = tier.get, self._interned
        for key in keys:
            holders = get(key, 0)
            if holders & bits:
                gone.append(key)
                if kept := holders & ~bits:
                    tier[key] = interned.setdefault(kept, kept)
                else:
                    del tier[key]
        return gone

    def _sweeping(self, retired: int) -> Iterator[None]:
        """Slots retired meanwhile wait for the next round; keys stored meanwhile cannot have one of these."""
        for tier in (self._device, self._host):
            keys = list(tier)
            yield
            for start in range(0, len(keys), _SWEEP_KEYS):
                self._clear(tier, retired, keys[start : start + _SWEEP_KEYS])
                yield
        self._retired ^= retired
        self._free.update(slot for slot in range(retired.bit_length()) if retired >> slot & 1)


def _depths(
    holders_of: Callable[[PublishedKey, int], int], alive: int, keys: Sequence[PublishedKey]
) -> list[tuple[int, int]]:
    """(slots, blocks that they hold from the first on), by bisection; slots that hold none are absent."""
    depths: list[tuple[int, int]] = []
    first = holders_of(keys[0], 0) & alive if keys else 0
    # Each span: `holders` have block `low`; `still` of them have block `high` too (none do where the prompt ends).
    spans = [(0, first, len(keys), 0)]
    while spans:
        low, holders, high, still = spans.pop()
        while holders != still:
            if high - low == 1:
                depths.append((holders & ~still, high))
                break
            middle = (low + high) >> 1
            there = holders_of(keys[middle], 0) & holders
            if there == holders:
                low = middle
            else:
                spans.append((middle, there, high, still))
                high, still = middle, there
    return depths
