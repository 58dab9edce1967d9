"""Prompt beginnings that an operator lets all tenants share: a common system prompt, a manual, a set of examples.

    public blocks           [ p0 | p1 | p2 ]                  in the public namespace: computed once, for everyone
    tenant a, behind them                  '- [ a3 | a4 ... ]  in chains of their own, which nobody else can compute
    tenant b                               '- [ b3 | b4 ... ]

A prompt leaves the public blocks where it leaves the registered text, or where that text no longer fills a block. What
comes behind continues a root made of the last public key and the tenant: keys stay chained, so holding one still means
holding the whole prefix. Requests without a tenant are public altogether.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple

from shared.blocks import BlockKey, block_keys, branch_root, namespace_root

__all__ = ["Branch", "Namespace", "PublicPrefixes"]


class Branch(NamedTuple):
    """Where a prompt leaves the public blocks: how many there are, and what the block behind them continues."""

    blocks: int
    root: BlockKey


class Namespace(NamedTuple):
    """How the keys of a prompt begin: with `root`, and behind the branch (if there is one) with its root."""

    root: BlockKey
    branch: Branch | None = None


class PublicPrefixes:
    """For one model and block size; both tiers ask it, so they agree by construction."""

    def __init__(
        self, fingerprint: str, block_size: int, secret: str = "", prompts: Iterable[Sequence[int]] = ()
    ) -> None:
        """`prompts` are the registered beginnings, as token ids; what does not fill a block is not shared."""
        self._fingerprint = fingerprint
        self._block_size = block_size
        self._secret = secret
        self._public_root = namespace_root(fingerprint, "", secret)
        chains = [block_keys(self._public_root, prompt, block_size) for prompt in prompts]
        self._keys = frozenset(key for chain in chains for key in chain)
        self._most_tokens = max(map(len, chains), default=0) * block_size

    def namespace(self, tenant: str, tokens: Sequence[int]) -> Namespace:
        """Where the keys of a tenant's prompt begin and where they turn private."""
        if not tenant:
            return Namespace(self._public_root)
        shared = self._shared(tokens)
        if not shared:
            return Namespace(namespace_root(self._fingerprint, tenant, self._secret))
        return Namespace(self._public_root, Branch(len(shared), branch_root(shared[-1], tenant, self._secret)))

    def shared_blocks(self, tokens: Sequence[int]) -> int:
        """How many of a prompt's first blocks are registered, whoever asks."""
        return len(self._shared(tokens))

    def _shared(self, tokens: Sequence[int]) -> list[BlockKey]:
        keys = block_keys(self._public_root, tokens[: self._most_tokens], self._block_size)
        return list(takewhile(self._keys.__contains__, keys))
