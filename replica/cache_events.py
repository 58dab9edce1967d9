"""What became findable and what did not any more, per tier: the words between prefix cache and publisher."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple

from shared.blocks import BlockKey

__all__ = ["CacheEvents", "TierChanges"]


class CacheEvents(NamedTuple):
    """Net change since the last events: disjoint, parents stored before children, children removed before parents.

    A block that moves between the tiers is removed from the one and stored in the other by the same events.
    """

    stored: Items[BlockKey]
    removed: Items[BlockKey]
    host_stored: Items[BlockKey] = ()
    host_removed: Items[BlockKey] = ()

    def __bool__(self) -> bool:
        return any(self)


class TierChanges:
    """The keys of one tier, netted: what comes and goes again between two looks was never there."""

    __slots__ = ("_removed", "_stored")

    def __init__(self) -> None:
        self._stored: dict[BlockKey, None] = {}
        self._removed: dict[BlockKey, None] = {}

    def store(self, key: BlockKey) -> None:
        if key in self._removed:
            del self._removed[key]
        else:
            self._stored[key] = None

    def remove(self, key: BlockKey) -> None:
        if key in self._stored:
            del self._stored[key]
        else:
            self._removed[key] = None

    def take(self) -> tuple[list[BlockKey], list[BlockKey]]:
        """(stored, removed) since the last time."""
        stored, removed = list(self._stored), list(self._removed)
        self._stored.clear()
        self._removed.clear()
        return stored, removed
