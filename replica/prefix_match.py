"""What a prompt finds in the prefix cache."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple

from replica.siblings import Sibling
from shared.blocks import BlockKey

__all__ = ["PrefixMatch"]


class PrefixMatch(NamedTuple):
    """The longest held prefix of a sequence, and the key worth waiting for if someone computes what comes next."""

    block_ids: list[int]
    """On the device, from the first block on."""
    awaited_key: BlockKey | None
    host_keys: Items[BlockKey] = ()
    """Behind those, in host memory, and worth bringing back."""
    partial: Sibling | None = None
    """Or behind those, the cached block that begins most like what comes next."""
