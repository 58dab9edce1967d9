"""The approximate view of replicas whose news do not come: what this router sent them, bounded and aged.

Each replica has one LRU of block keys, touched from the tail of a chain to its head: a head is never older than its
tail, so forgetting the oldest keeps what is left prefix-closed, and the depth of a chain is a bisection.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

from shared.blocks import PublishedKey

__all__ = ["SentView"]


class SentView:
    """`max_blocks` per replica; a key not sent again for `max_age_seconds` counts as evicted there."""

    def __init__(self, max_blocks: int = 65_536, max_age_seconds: float = 900.0) -> None:
        self._max_blocks = max_blocks
        self._max_age_seconds = max_age_seconds
        self._sent: dict[str, OrderedDict[PublishedKey, float]] = {}

    def record(self, replica_id: str, keys: Sequence[PublishedKey], now: float) -> None:
        """The replica has computed the prompt with this chain."""
        sent = self._sent.setdefault(replica_id, OrderedDict())
        for key in reversed(keys[: self._max_blocks]):
            sent[key] = now
            sent.move_to_end(key)
        while len(sent) > self._max_blocks:
            sent.popitem(last=False)
        oldest = now - self._max_age_seconds
        while sent and next(iter(sent.values())) < oldest:
            sent.popitem(last=False)

    def depth(self, replica_id: str, keys: Sequence[PublishedKey], now: float) -> int:
        """Blocks of the chain that the replica probably holds, from the first on."""
        sent = self._sent.get(replica_id)
        if not sent:
            return 0
        oldest = now - self._max_age_seconds
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            if sent.get(keys[middle], float("-inf")) >= oldest:
                low = middle + 1
            else:
                high = middle
        return low

    def size(self, replica_id: str) -> int:
        """Blocks it was sent, as far as remembered."""
        return len(self._sent.get(replica_id, ()))

    def clear(self) -> None:
        self._sent.clear()

    def retain(self, replica_ids: Collection[str]) -> None:
        for replica_id in self._sent.keys() - set(replica_ids):
            del self._sent[replica_id]
