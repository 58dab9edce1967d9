"""What `GET /cache` shows: sizes, counters, and the tree of what is held.

    { 120 blocks, used }                     0   the system prompt, in use
      { 3 blocks }                           1   one conversation
        { 9 blocks, host }                   2   its later turns, in host memory
      { 5 tokens of a block }                3   a tail

A node is a run of blocks without a branch. Nodes come as a list, parents first and the widest shared ones early, each
naming its parent's place in it: however deep the tree, nobody has to recurse.
"""

from __future__ import annotations

from array import array
from collections import defaultdict, deque
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import replace
from itertools import islice
from typing import Literal

import msgspec

from replica.prefix_cache import PrefixCache
from replica.scheduler import Counters
from replica.siblings import TOKEN_BYTES
from shared.blocks import BlockKey

__all__ = ["CacheDescription", "CacheNode", "describe"]

_LISTED_KEYS = 10_000
_SHOWN_TOKENS = 64


class CacheNode(msgspec.Struct, frozen=True, omit_defaults=True):
    """`key` is the published key of its last block, in hex; tails have none."""

    parent: int | None
    key: str
    blocks: int
    tokens: int
    tier: Literal["device", "host"]
    used: bool = False
    retained: bool = False
    token_ids: list[int] = []
    """Its first tokens, for those who may see them."""
    text: str = ""
    """The same in words."""


class CacheDescription(msgspec.Struct, frozen=True):
    """used + cached + free = capacity; a used block may be held (published) as well."""

    block_size: int
    capacity_blocks: int
    used_blocks: int
    cached_blocks: int
    free_blocks: int
    held_blocks: int
    retained_blocks: int
    host_capacity_blocks: int
    host_held_blocks: int
    keys: list[str]
    """Published keys of held blocks, parents first, each the hex of its 8 bytes as Redis has them; the first 10,000."""
    host_keys: list[str]
    counters: Counters
    evictions: dict[str, int]
    """By reason. capacity: given to someone else; to_host: moved there instead; host_capacity: pushed out of there;
    tail: part of a block, given to someone else; reset: asked to be forgotten."""
    tree: list[CacheNode]
    hidden_blocks: int
    """Held, but beyond the nodes asked for."""


def describe(cache: PrefixCache, counters: Counters, most_nodes: int, with_tokens: bool) -> CacheDescription:
    tree = _Tree(cache, with_tokens).nodes(most_nodes)
    shown = sum(node.blocks for node in tree if node.key)
    return CacheDescription(
        block_size=cache.block_size,
        capacity_blocks=cache.num_blocks,
        used_blocks=cache.pool.used_blocks,
        cached_blocks=cache.pool.cached_blocks,
        free_blocks=cache.pool.free_blocks,
        held_blocks=cache.held_blocks,
        retained_blocks=len(cache.retention),
        host_capacity_blocks=cache.host_blocks,
        host_held_blocks=len(cache.host),
        keys=[_hex(key) for key in cache.held_keys(_LISTED_KEYS)],
        host_keys=[_hex(key) for key, _ in islice(cache.host.items(), _LISTED_KEYS)],
        counters=replace(counters),
        evictions=dict(cache.evictions),
        tree=tree,
        hidden_blocks=cache.held_blocks + len(cache.host) - shown,
    )


class _Tree:
    def __init__(self, cache: PrefixCache, with_tokens: bool) -> None:
        self._cache = cache
        self._with_tokens = with_tokens
        self._host = dict(cache.host.items())
        self._host_children: dict[BlockKey, list[BlockKey]] = defaultdict(list)
        for key, block in self._host.items():
            self._host_children[block.parent_key].append(key)

    def nodes(self, most: int) -> list[CacheNode]:
        """Breadth first."""
        nodes: list[CacheNode] = []
        waiting: deque[tuple[int | None, int | BlockKey]] = deque((None, first) for first in self._firsts())
        while waiting and len(nodes) < most:
            parent, first = waiting.popleft()
            run = self._run(first)
            waiting.extend((len(nodes), child) for child in self._children(run[-1]))
            nodes.append(self._node(parent, run))
        return nodes

    def _firsts(self) -> Iterator[int | BlockKey]:
        """Blocks that continue none, of all namespaces."""
        held = self._cache.held
        for root in held.siblings.roots():
            yield from held.siblings.of(root)
        for parent_key, children in self._host_children.items():
            if parent_key not in self._host and held.find(parent_key) is None:
                yield from children

    def _children(self, block: int | BlockKey) -> list[int | BlockKey]:
        if not isinstance(block, int):
            return [*self._host_children.get(block, ())]
        key = self._cache.held.keys[block]
        on_host = () if key is None else self._host_children.get(key, ())
        return [*self._cache.held.siblings.of(block), *on_host]

    def _run(self, first: int | BlockKey) -> list[int | BlockKey]:
        run = [first]
        while len(children := self._children(run[-1])) == 1 and self._kind(children[0]) == self._kind(first):
            run += children
        return run

    def _kind(self, block: int | BlockKey) -> tuple[object, ...]:
        if not isinstance(block, int):
            return ("host",)
        cache = self._cache
        return (cache.held.is_tail(block), cache.pool.references[block] > 0, block in cache.retention)

    def _content(self, block: int | BlockKey) -> bytes:
        content = self._cache.held.contents[block] if isinstance(block, int) else self._host[block].content
        assert content is not None
        return content

    def _node(self, parent: int | None, run: Items[int | BlockKey]) -> CacheNode:
        first, last = run[0], run[-1]
        key = self._cache.held.keys[last] if isinstance(last, int) else last
        device_block = first if isinstance(first, int) else None
        token_ids: list[int] = []
        if self._with_tokens:
            for block in run[: -(-_SHOWN_TOKENS // self._cache.block_size)]:
                token_ids += array("I", self._content(block))
        return CacheNode(
            parent=parent,
            key="" if key is None else _hex(key),
            blocks=len(run),
            tokens=sum(len(self._content(block)) for block in run) // TOKEN_BYTES,
            tier="host" if device_block is None else "device",
            used=device_block is not None and self._cache.pool.references[device_block] > 0,
            retained=device_block is not None and device_block in self._cache.retention,
            token_ids=token_ids[:_SHOWN_TOKENS],
        )


def _hex(key: BlockKey) -> str:
    return key[:8].hex()
