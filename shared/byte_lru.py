"""A mapping bounded by the bytes its values take; the least recently used go first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["ByteLru"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class ByteLru(Generic[K, V]):
    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: K, value: V, size_bytes: int) -> None:
        """`size_bytes` counts key and value. What is larger than the whole bound is not kept."""
        if (replaced := self._entries.pop(key, None)) is not None:
            self.used_bytes -= replaced[1]
        if size_bytes > self.max_bytes:
            return
        self._entries[key] = (value, size_bytes)
        self.used_bytes += size_bytes
        while self.used_bytes > self.max_bytes:
            _, (_, evicted_bytes) = self._entries.popitem(last=False)
            self.used_bytes -= evicted_bytes

    def check_integrity(self) -> None:
        assert self.used_bytes == sum(size for _, size in self._entries.values())
        assert self.used_bytes <= self.max_bytes
