"""A session stays with the replica that took it last; a new or orphaned one goes where fewest are active."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from router.policies.base import Candidate, Pick, Policy, Request
from router.policies.hashing import conversation_anchor, fewest_active

__all__ = ["Session"]


class Session(Policy):
    """Remembers the `most_sessions` used last. Without one from the client, the conversation's start stands for it."""

    name = "session"

    def __init__(self, most_sessions: int = 100_000) -> None:
        self._most_sessions = most_sessions
        self._replicas: OrderedDict[bytes, str] = OrderedDict()

    def choose(self, request: Request, candidates: Sequence[Candidate]) -> Pick:
        anchor = conversation_anchor(request)
        home = self._replicas.get(anchor)
        for candidate in candidates:
            if candidate.replica_id == home:
                return Pick(candidate, "session")
        return Pick(fewest_active(candidates, anchor), "new-session")

    def placed(self, request: Request, replica_id: str) -> None:
        anchor = conversation_anchor(request)
        self._replicas[anchor] = replica_id
        self._replicas.move_to_end(anchor)
        if len(self._replicas) > self._most_sessions:
            self._replicas.popitem(last=False)
