"""A breaker per replica, fed by what requests meet. Pure: the clock is handed in.

    closed --3 failures in a row--> open --after a while--> half-open: one trial --success--> closed
                                      ^---------------------------------------failure-----'  (the while doubles)

A failure is a connection that cannot be made or breaks, an answer that never comes, or a 5xx that is not 503. 429 and
503 are pressure: the replica is well and says so. One sick replica says nothing about the others. Apart from that, a
replica that is probed may be found unreachable.
"""

from __future__ import annotations

from collections.abc import Collection

__all__ = ["Health"]

_FAILURES_TO_OPEN = 3
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 30.0


class _Breaker:
    __slots__ = ("failures", "open_until", "pause_seconds", "trial_under_way")

    def __init__(self) -> None:
        self.failures = 0
        self.open_until: float | None = None
        self.pause_seconds = _FIRST_PAUSE_SECONDS
        self.trial_under_way = False


class Health:
    """Only replicas that failed lately have an entry. `begin` is followed by `succeeded`, `failed` or `abandoned`."""

    def __init__(self) -> None:
        self._breakers: dict[str, _Breaker] = {}
        self._unreachable: set[str] = set()

    @property
    def all_well(self) -> bool:
        """Nobody failed lately, everybody is reachable."""
        return not (self._breakers or self._unreachable)

    def reachable(self, replica_id: str) -> bool:
        """As its probes say; a replica that nobody probes is."""
        return replica_id not in self._unreachable

    def set_reachable(self, replica_id: str, reachable: bool) -> None:
        if reachable:
            self._unreachable.discard(replica_id)
        else:
            self._unreachable.add(replica_id)

    def usable(self, replica_id: str, now: float) -> bool:
        """Closed, or due for a trial that nobody is making yet."""
        breaker = self._breakers.get(replica_id)
        if breaker is None or breaker.open_until is None:
            return True
        return now >= breaker.open_until and not breaker.trial_under_way

    def begin(self, replica_id: str) -> None:
        """A request is being sent there; on an open breaker it is the trial."""
        breaker = self._breakers.get(replica_id)
        if breaker is not None and breaker.open_until is not None:
            breaker.trial_under_way = True

    def answering(self, replica_id: str) -> None:
        """An answer has begun. That ends a trial well enough to try others, but one more failure opens it again."""
        breaker = self._breakers.get(replica_id)
        if breaker is not None and breaker.open_until is not None:
            breaker.open_until = None
            breaker.trial_under_way = False
            breaker.failures = _FAILURES_TO_OPEN - 1

    def succeeded(self, replica_id: str) -> None:
        """An answer was complete."""
        self._breakers.pop(replica_id, None)

    def failed(self, replica_id: str, now: float) -> None:
        breaker = self._breakers.setdefault(replica_id, _Breaker())
        breaker.failures += 1
        if breaker.trial_under_way:
            breaker.trial_under_way = False
            breaker.pause_seconds = min(_LONGEST_PAUSE_SECONDS, 2 * breaker.pause_seconds)
            breaker.open_until = now + breaker.pause_seconds
        elif breaker.open_until is None and breaker.failures >= _FAILURES_TO_OPEN:
            breaker.open_until = now + breaker.pause_seconds

    def abandoned(self, replica_id: str) -> None:
        """The request ended without a verdict on the replica: its client left. A trial is up for the next one."""
        breaker = self._breakers.get(replica_id)
        if breaker is not None:
            breaker.trial_under_way = False

    def state(self, replica_id: str, now: float) -> str:
        """One of `closed`, `open`, `half-open`."""
        breaker = self._breakers.get(replica_id)
        if breaker is None or breaker.open_until is None:
            return "closed"
        return "open" if now < breaker.open_until else "half-open"

    def retain(self, replica_ids: Collection[str]) -> None:
        for replica_id in self._breakers.keys() - set(replica_ids):
            del self._breakers[replica_id]
        self._unreachable &= set(replica_ids)
