"""What every policy gets and gives: a request, the priced candidates, and a pick with its reason.

Policies see the same candidates and change nothing when they choose; a policy that remembers does so in `placed`, when
the request really goes there. Same inputs and same memory, same pick (randomness is handed in).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from shared.blocks import PublishedKey

__all__ = ["Candidate", "Pick", "Policy", "Request"]


class Request(msgspec.Struct, frozen=True, gc=False):
    """What placement needs to know of a request."""

    prompt_tokens: int
    keys: list[PublishedKey]
    """Of the prompt's full blocks; empty for a prompt shorter than a block or one that cannot be tokenized here."""
    block_size: int
    affinity: bytes = b""
    """What ties the request to its like where keys say nothing: a digest of its prompt."""
    session: bytes = b""
    """A digest of what the client calls the session; empty if it has no name."""
    streamed: bool = True


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """One replica that could take the request, with its price."""

    replica_id: str
    held_blocks: int
    held_tokens: int
    """Prompt tokens it holds by what it published (or by what this router sent it, where it publishes nothing)."""
    matched_tokens: int
    """The same with the blocks that requests on their way there will have computed."""
    trust: float
    """How far the match is believed, from the engine's own counts so far."""
    wait_seconds: float
    service_seconds: float
    guard_seconds: float
    cost_seconds: float
    active: int
    host_tokens: int = 0
    """Behind the matched ones: held in host memory, and brought back sooner than computed."""

    @property
    def predicted_tokens(self) -> int:
        """Of the prompt, that the engine will count as cached."""
        return self.matched_tokens + self.host_tokens


class Pick(NamedTuple):
    candidate: Candidate
    reason: str
    """A stable word for headers and metrics."""


class Policy:
    """One way to choose. `name` is what `--policy` takes."""

    name: str
    reads_view: bool = False
    """It is worth little without a view of the replicas' caches; the ladder's lower rungs replace it then."""

    def choose(self, request: Request, candidates: Sequence[Candidate]) -> Pick:
        """Pick one of `candidates`, of which there is at least one."""
        raise NotImplementedError

    def placed(self, request: Request, replica_id: str) -> None:
        """The request goes there: remember it, if that matters."""
