"""How a request is hashed to a replica: by its content, from the place where it becomes its own.

Rendezvous hashing (Thaler and Ravishankar): every replica scores the anchor, the highest wins; a replica that leaves
moves only its own share.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from router.policies.base import Candidate, Request

__all__ = ["conversation_anchor", "fewest_active", "prefix_anchor", "ranked", "session_anchor"]

_CONVERSATION_BLOCKS = 8


def prefix_anchor(request: Request, shared_blocks: int) -> bytes:
    """The first key past `shared_blocks`, which all contenders hold alike: what everyone shares must not decide."""
    if not request.keys:
        return request.affinity
    return request.keys[min(shared_blocks, len(request.keys) - 1)].to_bytes(8, "little")


def session_anchor(request: Request, shared_blocks: int) -> bytes:
    """The session if the client names one, else as `prefix_anchor`."""
    return request.session or prefix_anchor(request, shared_blocks)


def conversation_anchor(request: Request) -> bytes:
    """The session if the client names one, else a block near the start, the same at every turn of a conversation."""
    return session_anchor(request, _CONVERSATION_BLOCKS - 1)


def ranked(candidates: Sequence[Candidate], anchor: bytes) -> list[Candidate]:
    """Highest score first."""
    return sorted(
        candidates,
        key=lambda candidate: (xxhash.xxh3_64_intdigest(anchor + candidate.replica_id.encode()), candidate.replica_id),
        reverse=True,
    )


def fewest_active(candidates: Sequence[Candidate], anchor: bytes) -> Candidate:
    """Fewest requests active; among equals the highest score."""
    fewest = min(candidate.active for candidate in candidates)
    return ranked([candidate for candidate in candidates if candidate.active == fewest], anchor)[0]
