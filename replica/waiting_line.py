"""Who is served next: first come, first served within a tenant, and between tenants whoever has been served least.

    preempted    [ p2 p1 ]                      first of all: they were admitted once
    tenant a     [ a1 a2 a3 a4 ... ]  900       every token computed for a tenant, prefill and decode, is charged to it
    tenant b     [ b1 ]               880       its turn

A counter of tokens for each tenant, as in the Virtual Token Counter of Sheng et al. (2024). Two rules keep it honest:

- A tenant that comes back to the line cannot spend the time it was away: its counter is raised to where a tenant that
  took its fair share would stand by now, but never above everyone who waits.
- So whoever waits is overtaken by others for no more tokens than it has been ahead, however many new tenants come.

While nobody waits nothing is owed, and nothing is remembered.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterator

from replica.sequence import Sequence

__all__ = ["WaitingLine"]

_MOST_ABSENT_TENANTS = 1024


class WaitingLine:
    """Charge a tenant for what is computed for it; admit from `in_turn`."""

    def __init__(self) -> None:
        self._preempted: OrderedDict[str, Sequence] = OrderedDict()
        self._queues: dict[str, OrderedDict[str, tuple[int, Sequence]]] = {}
        self._tenants: dict[str, str] = {}  # of the sequences in the queues, by request id
        self._served: dict[str, float] = {}
        self._fair_share = 0.0
        """Tokens that a tenant would have been served, had it waited all the time and had its share."""
        self._arrivals = 0
        self.tokens = 0
        """To be computed for all that wait."""

    def __len__(self) -> int:
        return len(self._preempted) + len(self._tenants)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tenants or request_id in self._preempted

    def __iter__(self) -> Iterator[Sequence]:
        """All of them, in no particular order."""
        yield from self._preempted.values()
        for queue in self._queues.values():
            for _, sequence in queue.values():
                yield sequence

    def add(self, sequence: Sequence) -> None:
        """At the end of its tenant's queue."""
        tenant = sequence.tenant
        if tenant not in self._queues:
            self._come_back(tenant)
            self._queues[tenant] = OrderedDict()
        self._queues[tenant][sequence.request_id] = (self._arrivals, sequence)
        self._tenants[sequence.request_id] = tenant
        self._arrivals += 1
        self.tokens += len(sequence.tokens)

    def put_back(self, sequence: Sequence) -> None:
        """Preempted: before everyone else, and before those preempted earlier, who were admitted later."""
        self._preempted[sequence.request_id] = sequence
        self._preempted.move_to_end(sequence.request_id, last=False)
        self.tokens += len(sequence.tokens)

    def remove(self, request_id: str) -> Sequence | None:
        """Admitted, refused or aborted. None if it does not wait."""
        sequence = self._preempted.pop(request_id, None)
        if sequence is None:
            tenant = self._tenants.pop(request_id, None)
            if tenant is None:
                return None
            queue = self._queues[tenant]
            _, sequence = queue.pop(request_id)
            if not queue:
                del self._queues[tenant]
        self.tokens -= len(sequence.tokens)
        return sequence

    def charge(self, tenant: str, tokens: int) -> None:
        """So many tokens are computed for this tenant now."""
        if self._queues:
            self._served[tenant] = self._served.get(tenant, 0.0) + tokens
            self._fair_share += tokens / (len(self._queues) + (tenant not in self._queues))

    def in_turn(self) -> Iterator[Sequence]:
        """Whose turn it is, one after the other: who was given one and not admitted is passed over.

        Remove what is admitted and charge its tenant before asking for the next: the order follows.
        """
        yield from list(self._preempted.values())
        queues = {tenant: deque(queue.values()) for tenant, queue in self._queues.items()}
        turns = [(self._served[tenant], queue[0][0], tenant) for tenant, queue in queues.items()]
        heapq.heapify(turns)
        while turns:
            tenant = turns[0][2]
            queue = queues[tenant]
            yield queue.popleft()[1]
            if queue:
                heapq.heapreplace(turns, (self._served[tenant], queue[0][0], tenant))
            else:
                heapq.heappop(turns)

    def _come_back(self, tenant: str) -> None:
        own = self._served.get(tenant, 0.0)
        if not self._queues:
            self._served.clear()
            own = self._fair_share = 0.0
        else:
            # If others only decode, those who wait may all have had less than their share: nobody starts behind them.
            self._fair_share = min(self._fair_share, max(self._served[waiting] for waiting in self._queues))
        if len(self._served) > len(self._queues) + _MOST_ABSENT_TENANTS:
            self._forget_absent()
        self._served[tenant] = max(own, self._fair_share)

    def _forget_absent(self) -> None:
        """Of those who do not wait, keep who has had more than its share; and of too many such, the latest."""
        ahead = [tenant for tenant, tokens in self._served.items() if tokens > self._fair_share]
        kept = self._queues.keys() | set(ahead[-_MOST_ABSENT_TENANTS // 2 :])
        self._served = {tenant: tokens for tenant, tokens in self._served.items() if tenant in kept}
