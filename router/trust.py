"""How far a replica's published cache is believed: cached tokens as its engine counted them against those predicted.

A wrong template, tokenizer or salt makes keys that meet nothing in the engine, and no error: predictions then promise
hits that never come. The average of actual over predicted falls, the replica's match is discounted by it, and routing
turns to load. The floor keeps it from ever being exactly worthless, so that a healed replica earns its trust back.

A replica is *doubted* from the moment its factor falls below one mark until it has risen above another: so whoever is
told of changes is told once, however the factor wavers between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

__all__ = ["Trust"]

_LEARNING = 0.1
_FLOOR = 0.05
_DOUBTED_BELOW, _BELIEVED_ABOVE = 0.7, 0.95


class Trust:
    """One factor in [0.05, 1] per replica; 1 until something is known."""

    def __init__(self) -> None:
        self._factors: dict[str, float] = {}
        self._doubted: set[str] = set()
        self._listeners: list[Callable[[str, bool], None]] = []

    def subscribe(self, listener: Callable[[str, bool], None]) -> None:
        """Called with a replica's id and whether it is doubted, whenever that has changed."""
        self._listeners.append(listener)

    def doubted(self, replica_id: str) -> bool:
        return replica_id in self._doubted

    def factor(self, replica_id: str) -> float:
        return self._factors.get(replica_id, 1.0)

    def observe(self, replica_id: str, predicted_tokens: int, cached_tokens: int, block_size: int) -> None:
        """`predicted_tokens` were held by what is published. Less than a block short is what a last token may cost."""
        if predicted_tokens < block_size:
            return
        kept = cached_tokens + block_size > predicted_tokens
        share = 1.0 if kept else cached_tokens / predicted_tokens
        factor = self.factor(replica_id)
        factor = self._factors[replica_id] = max(_FLOOR, factor + _LEARNING * (share - factor))
        doubted = factor < (_BELIEVED_ABOVE if replica_id in self._doubted else _DOUBTED_BELOW)
        if doubted != (replica_id in self._doubted):
            (self._doubted.add if doubted else self._doubted.remove)(replica_id)
            for listener in self._listeners:
                listener(replica_id, doubted)

    def retain(self, replica_ids: Collection[str]) -> None:
        for replica_id in self._factors.keys() - set(replica_ids):
            del self._factors[replica_id]
            self._doubted.discard(replica_id)
