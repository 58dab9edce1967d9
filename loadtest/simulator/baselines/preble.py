"""Preble's E2 (Srivatsa and others, ICLR 2025): exploit what is cached if that is most of the prompt, else explore.

exploit    more of the prompt is cached than not: the least loaded of those that hold most of it; if its load is more
           than twice that of the least loaded of all, that one
explore    lowest load over the last three minutes + seconds of prefill + seconds of what would be evicted for it

Load is the seconds of prefill and decode placed there within the window. What would be evicted is counted at its
prefill seconds times how often it was hit per placement within the window, on average over the replica.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

from loadtest.simulator.observer import Observer
from router.policies.base import Candidate, Pick, Request

__all__ = ["Preble"]

_WINDOW_SECONDS = 180.0
_UNBALANCED_RATIO = 2.0


class Preble(Observer):
    name = "preble"

    def __init__(self, decode_seconds: float = 0.02) -> None:
        """`decode_seconds` stands for an answer whose length is not known."""
        self._decode_seconds = decode_seconds
        self._placed: defaultdict[str, deque[tuple[float, float, float]]] = defaultdict(deque)
        self._load: defaultdict[str, float] = defaultdict(float)
        self._hit_share: defaultdict[str, float] = defaultdict(float)
        self._last: dict[str, Candidate] = {}

    def choose(self, request: Request, candidates: Sequence[Candidate]) -> Pick:
        self._last = {candidate.replica_id: candidate for candidate in candidates}
        for candidate in candidates:
            self._forget(candidate.replica_id)
        longest = max(candidate.held_tokens for candidate in candidates)
        idlest = min(candidates, key=lambda candidate: self._load[candidate.replica_id])
        if longest > request.prompt_tokens - longest:
            holders = [candidate for candidate in candidates if candidate.held_tokens == longest]
            best = min(holders, key=lambda candidate: self._load[candidate.replica_id])
            if self._load[best.replica_id] > _UNBALANCED_RATIO * self._load[idlest.replica_id] > 0:
                return Pick(idlest, "rebalance")
            return Pick(best, "exploit")
        return Pick(min(candidates, key=lambda candidate: self._explored(request, candidate)), "explore")

    def placed(self, request: Request, replica_id: str) -> None:
        candidate = self._last[replica_id]
        seconds = candidate.service_seconds + self._decode_seconds
        share = candidate.held_tokens / max(1, request.prompt_tokens)
        self._placed[replica_id].append((self.clock.now, seconds, share))
        self._load[replica_id] += seconds
        self._hit_share[replica_id] += share

    def _explored(self, request: Request, candidate: Candidate) -> float:
        replica_id = candidate.replica_id
        load = self.replicas[replica_id].engine.load()
        uncached = request.prompt_tokens - candidate.held_tokens
        evicted = max(0, uncached - load.free_blocks * request.block_size) / max(1, uncached)
        hits = self._hit_share[replica_id] / max(1, len(self._placed[replica_id]))
        return self._load[replica_id] + candidate.service_seconds * (1.0 + evicted * hits)

    def _forget(self, replica_id: str) -> None:
        placed, oldest = self._placed[replica_id], self.clock.now - _WINDOW_SECONDS
        while placed and placed[0][0] < oldest:
            _, seconds, share = placed.popleft()
            self._load[replica_id] -= seconds
            self._hit_share[replica_id] -= share
