"""A breaker per replica, fed by what requests meet. Pure: the clock is handed in.

    closed --3 failures in a row--> open --after a while--> half-open: one trial --success--> closed
                                      ^---------------------------------------failure-----'  (the while doubles)

A failure is a connection that cannot be made or breaks, an answer that never comes, or a 5xx that is not 503. 429 and
503 are pressure: the replica is well and says so. One sick replica says nothing about the others. Down and up have
thresholds of their own: three failures in a row, and one trial that begins to answer. Only the trial's own request
speaks for the trial: what was sent earlier may end meanwhile. Apart from that, a replica that is probed may be found
unreachable.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["Health", "Trial"]

_FAILURES_TO_OPEN = 3
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 30.0


class Trial:
    """The one request that is let through to an open breaker's replica."""

    __slots__ = ()


class _Breaker:
    __slots__ = ("failures", "open_until", "pause_seconds", "trial")

    def __init__(self) -> None:
        self.failures = 0
        self.open_until: float | None = None
        self.pause_seconds = _FIRST_PAUSE_SECONDS
        self.trial: Trial | None = None
        """Under way."""


class Health:
    """Only replicas that failed lately have an entry. `begin` is followed by `succeeded`, `failed` or `abandoned`."""

    def __init__(self) -> None:
        self._breakers: dict[str, _Breaker] = {}
        self._unreachable: set[str] = set()
        self._processes: dict[str, float] = {}

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
        return now >= breaker.open_until and breaker.trial is None

    def begin(self, replica_id: str, now: float) -> Trial | None:
        """A request is being sent there: the trial, if one is due and nobody is making it.

        Where all breakers are open others are sent there too. They decide nothing, or each of them would double the
        pause, and a fleet that was away for a moment would be kept out for long.
        """
        breaker = self._breakers.get(replica_id)
        if breaker is None or breaker.open_until is None or not self.usable(replica_id, now):
            return None
        breaker.trial = Trial()
        return breaker.trial

    def answering(self, replica_id: str) -> None:
        """An answer has begun. That ends a trial well enough to try others, but one more failure opens it again."""
        breaker = self._breakers.get(replica_id)
        if breaker is not None and breaker.open_until is not None:
            breaker.open_until = breaker.trial = None
            breaker.failures = _FAILURES_TO_OPEN - 1

    def succeeded(self, replica_id: str) -> None:
        """An answer was complete."""
        self._breakers.pop(replica_id, None)

    def failed(self, replica_id: str, now: float, trial: Trial | None = None) -> None:
        breaker = self._breakers.setdefault(replica_id, _Breaker())
        breaker.failures += 1
        if trial is not None and breaker.trial is trial:
            breaker.trial = None
            breaker.pause_seconds = min(_LONGEST_PAUSE_SECONDS, 2 * breaker.pause_seconds)
            breaker.open_until = now + breaker.pause_seconds
        elif breaker.open_until is None and breaker.failures >= _FAILURES_TO_OPEN:
            breaker.open_until = now + breaker.pause_seconds

    def abandoned(self, replica_id: str, trial: Trial) -> None:
        """It ended without a verdict on the replica, whose client left. The trial is up for the next one."""
        breaker = self._breakers.get(replica_id)
        if breaker is not None and breaker.trial is trial:
            breaker.trial = None

    def state(self, replica_id: str, now: float) -> str:
        """One of `closed`, `open`, `half-open`."""
        breaker = self._breakers.get(replica_id)
        if breaker is None or breaker.open_until is None:
            return "closed"
        return "open" if now < breaker.open_until else "half-open"

    def retain(self, processes: Mapping[str, float]) -> None:
        """By id, when the process started that runs there: forget all others, whose failures are not its own."""
        before, self._processes = self._processes, dict(processes)
        for replica_id in list(self._breakers):
            if replica_id not in processes or processes[replica_id] != before.get(replica_id, processes[replica_id]):
                del self._breakers[replica_id]
        self._unreachable &= processes.keys()
