"""Token ids -> chained block keys: the one definition that router and replica must share to the bit.

    root  = xxh3_128("wr1" | namespace)
    key_0 = xxh3_128(root  | tokens[0 : B])            tokens as little-endian uint32
    key_i = xxh3_128(key_{i-1} | tokens[iB : (i+1)B])  only full blocks have a key

Behind a prefix that all tenants share (see `public_prefixes`), a tenant's keys continue a root of its own:

    branch = xxh3_128("wr1" | "branch" | last public key | tenant)

Because keys are chained, equal keys mean equal prefixes from the first token on: holding key_i *means* holding
blocks 0..i. The engine keeps all 16 bytes; what is published is the first 8, as an unsigned integer.
"""

from __future__ import annotations

import hashlib
import hmac
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NewType

import xxhash

__all__ = [
    "BlockKey",
    "ModelIdentity",
    "PublishedKey",
    "block_keys",
    "branch_root",
    "checksum",
    "golden_key",
    "namespace_root",
    "pack_keys",
    "pack_tokens",
    "published_key",
    "published_keys",
    "unpack_keys",
    "unpack_tokens",
]

BlockKey = NewType("BlockKey", bytes)
"""All 16 bytes of a block's chained hash."""

PublishedKey = NewType("PublishedKey", int)
"""The first 8 bytes of a `BlockKey`, little-endian: what Redis and the router's index hold."""

_VERSION = b"wr1"
_GOLDEN_BLOCKS = 2
_KEY_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Everything that must be equal for two engines' KV blocks to mean the same."""

    weights: str
    tokenizer: str
    template: str
    block_size: int
    adapter: str = ""

    @property
    def fingerprint(self) -> str:
        """32 hex digits. Fields are length-prefixed, so no two identities can spell the same bytes."""
        digest = hashlib.blake2b(digest_size=16)
        for field in (self.weights, self.tokenizer, self.template, str(self.block_size), self.adapter):
            encoded = field.encode()
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
        return digest.hexdigest()


def namespace_root(fingerprint: str, tenant: str = "", secret: str = "") -> BlockKey:
    """The key before the first block. Under a cluster `secret` nobody outside can compute a tenant's keys."""
    return BlockKey(xxhash.xxh3_128_digest(_VERSION + fingerprint.encode() + b"|" + _tenant_part(tenant, secret)))


def branch_root(last_public: BlockKey, tenant: str, secret: str = "") -> BlockKey:
    """What a tenant's first block behind a public prefix continues, in place of that prefix's last key."""
    return BlockKey(xxhash.xxh3_128_digest(_VERSION + b"branch" + last_public + _tenant_part(tenant, secret)))


def block_keys(parent: BlockKey, tokens: Sequence[int], block_size: int) -> list[BlockKey]:
    """Keys of the full blocks of `tokens`, which follow the block (or root) whose key is `parent`."""
    packed = pack_tokens(tokens)
    step = 4 * block_size
    hashed = xxhash.xxh3_128_digest
    keys: list[BlockKey] = []
    key: bytes = parent
    for start in range(0, len(packed) - step + 1, step):
        key = hashed(key + packed[start : start + step])
        keys.append(BlockKey(key))
    return keys


def published_keys(parent: BlockKey, packed: bytes, block_size: int) -> tuple[tuple[PublishedKey, ...], BlockKey]:
    """The same of tokens that are packed already, as they are published; and the last of them in full."""
    step = 4 * block_size
    hashed, number_of = xxhash.xxh3_128_digest, int.from_bytes
    numbers = []
    key: bytes = parent
    for start in range(0, len(packed) - step + 1, step):
        key = hashed(key + packed[start : start + step])
        numbers.append(PublishedKey(number_of(key[:8], "little")))
    return tuple(numbers), BlockKey(key)


def published_key(key: BlockKey) -> PublishedKey:
    return PublishedKey(int.from_bytes(key[:8], "little"))


def golden_key(root: BlockKey, block_size: int) -> str:
    """The last key of a fixed token list, in hex. Equal on both sides, or their keys will never meet."""
    return block_keys(root, range(_GOLDEN_BLOCKS * block_size), block_size)[-1].hex()


def checksum(keys: Iterable[PublishedKey]) -> int:
    """An order-free digest of a set of keys that both sides keep up by XOR: adding and removing are the same."""
    total = 0
    for key in keys:
        total ^= _mix(key)
    return total


def pack_keys(keys: Iterable[PublishedKey]) -> bytes:
    """Keys as a little-endian uint64 array, as they stand in Redis."""
    return _to_little_endian(array("Q", keys)).tobytes()


def unpack_keys(packed: bytes) -> list[PublishedKey]:
    """The inverse of `pack_keys`. Raises ValueError when the length is not a multiple of 8."""
    keys = array("Q")
    keys.frombytes(packed)
    return _to_little_endian(keys).tolist()  # type: ignore[return-value]


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """As little-endian uint32. Raises OverflowError for what is not one."""
    return _to_little_endian(array("I", tokens)).tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    return _to_little_endian(array("I", packed)).tolist()


def _tenant_part(tenant: str, secret: str) -> bytes:
    # A header's bytes that are no UTF-8 arrive as lone surrogates, and name a tenant like any others.
    return hmac.digest(secret.encode(), tenant.encode(errors="surrogateescape"), "sha256")


def _mix(key: int) -> int:
    # A plain XOR of keys would let two wrong keys cancel against their own XOR; spreading the bits first
    # (the finalizer of splitmix64) makes that as unlikely as any other 64-bit collision.
    key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _KEY_MASK
    key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _KEY_MASK
    return key ^ (key >> 31)


def _to_little_endian(values: array[int]) -> array[int]:
    if sys.byteorder == "big":
        values.byteswap()
    return values
