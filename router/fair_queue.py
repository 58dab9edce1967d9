"""Who waits for a turn: first come, first served within a tenant, and tenants in proportion to their weights.

    tenant a, weight 1   [ a1 a2 a3 ]   starts at 4.0, and 1 later for every turn it is given
    tenant b, weight 2   [ b1 ]         starts at 3.5, and 1/2 later: its turn

Start-time fair queueing (Goyal et al., 1996) with turns of equal size. Only a tenant's first has a start, so whoever
leaves the line has cost its tenant nothing. A tenant that comes to the line starts at the present virtual time, which
is the start of the last turn given, or behind its own last turn: nobody saves up turns, and nobody gets ahead by
leaving and coming back. While nobody waits nothing is owed, and nothing is remembered.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import Generic, TypeVar

__all__ = ["FairQueue"]

_MOST_ABSENT_TENANTS = 1024

T = TypeVar("T")


class _Line(Generic[T]):
    """Of one tenant; never empty. `entry` is its place among the others."""

    __slots__ = ("entry", "items", "tenant", "weight")

    def __init__(self, tenant: str, weight: float) -> None:
        self.tenant = tenant
        self.weight = weight
        self.items: OrderedDict[T, None] = OrderedDict()
        self.entry = (0.0, 0, tenant)


class FairQueue(Generic[T]):
    """Items are hashable, and each waits once at a time."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line[T]] = {}
        self._turns: list[tuple[float, int, str]] = []
        """A heap of (start, order of equal starts, tenant); entries of lines that are gone stay until they come up."""
        self._virtual_time = 0.0
        self._absent: dict[str, float] = {}
        """Where tenants that do not wait would start, as far as that is ahead of the virtual time."""
        self._tenants: dict[T, str] = {}
        self._turns_made = 0

    def __len__(self) -> int:
        return len(self._tenants)

    def __contains__(self, item: T) -> bool:
        return item in self._tenants

    def add(self, item: T, tenant: str, weight: float = 1.0) -> None:
        """At the end of its tenant's line. A weight counts from when the tenant comes to the line."""
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = _Line(tenant, weight)
            self._place(line, max(self._virtual_time, self._absent.pop(tenant, 0.0)))
        line.items[item] = None
        self._tenants[item] = tenant

    def pop(self) -> T:
        """Whose turn it is. Raises IndexError where nobody waits."""
        while True:
            entry = heapq.heappop(self._turns)
            line = self._lines.get(entry[2])
            if line is not None and line.entry is entry:
                break
        item, _ = line.items.popitem(last=False)
        del self._tenants[item]
        self._virtual_time = entry[0]
        self._passed(line, entry[0] + 1.0 / line.weight)
        return item

    def remove(self, item: T) -> None:
        """It waits no longer."""
        line = self._lines[self._tenants.pop(item)]
        del line.items[item]
        if not line.items:
            self._passed(line, line.entry[0])

    def crowding_out(self, tenant: str, weight: float = 1.0) -> T | None:
        """The last of the line that is longest for its weight, if one more of this tenant is a smaller claim."""
        longest = max(self._lines.values(), key=_claim, default=None)
        own = self._lines.get(tenant)
        claim = (len(own.items) + 1) / own.weight if own is not None else 1.0 / weight
        return next(reversed(longest.items)) if longest is not None and _claim(longest) > claim else None

    def check_integrity(self) -> None:
        """Raises AssertionError where the books contradict each other."""
        assert {item: line.tenant for line in self._lines.values() for item in line.items} == self._tenants
        assert all(line.items for line in self._lines.values()), "an empty line is kept"
        there = {id(entry) for entry in self._turns}
        assert all(id(line.entry) in there for line in self._lines.values()), "a line never gets its turn"
        assert all(line.entry[0] >= self._virtual_time for line in self._lines.values()), "a turn was passed over"
        assert len(self._turns) <= 2 * len(self._lines) + 1, "entries of gone lines pile up"
        assert len(self._absent) <= _MOST_ABSENT_TENANTS
        assert not (self._absent.keys() & self._lines.keys())
        assert self._tenants or not (self._absent or self._turns or self._virtual_time)

    def _passed(self, line: _Line[T], start: float) -> None:
        """The line's next turn is at `start`; or it is gone."""
        if line.items:
            self._place(line, start)
            return
        del self._lines[line.tenant]
        if not self._lines:
            self._turns.clear()
            self._absent.clear()
            self._virtual_time = 0.0
            return
        if start > self._virtual_time:
            self._absent[line.tenant] = start
            if len(self._absent) > _MOST_ABSENT_TENANTS:
                self._forget_absent()
        if len(self._turns) > 2 * len(self._lines) + 1:
            self._turns = [line.entry for line in self._lines.values()]
            heapq.heapify(self._turns)

    def _place(self, line: _Line[T], start: float) -> None:
        self._turns_made += 1
        line.entry = (start, self._turns_made, line.tenant)
        heapq.heappush(self._turns, line.entry)

    def _forget_absent(self) -> None:
        """Those whose start has gone by; and of too many others, those who came first."""
        ahead = [(tenant, start) for tenant, start in self._absent.items() if start > self._virtual_time]
        self._absent = dict(ahead[-_MOST_ABSENT_TENANTS // 2 :])


def _claim(line: _Line[T]) -> float:
    return len(line.items) / line.weight
