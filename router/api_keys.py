"""Who asks: API keys from a file, each with its tenant.

    [[key]]
    sha256 = "5e884898da28..."      of the key: the file then holds nothing that opens anything
    tenant = "acme"

    [[key]]
    key = "sk-..."                  or the key itself
    tenant = "globex"
    weight = 3                      of the tenant's share while requests wait for their turn; 1 where no entry says

A presented key is looked up by its digest, so that neither time nor order tells how close a guess was. The file is read
again when it changes; one that cannot be used leaves the keys that were valid before, and says so once. Messages name
the file and the entry at fault, never what stands in it.
"""

from __future__ import annotations

import logging
import re
import tomllib
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from router.file_watch import FileWatch
from shared.api import ApiError
from shared.telemetry import fields

__all__ = ["ApiKeys", "ApiKeysError"]

_logger = logging.getLogger(__name__)

_MOST_FILE_BYTES = 2**24
_TENANT = re.compile(r"[A-Za-z0-9._:@+-]{1,128}")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_SHORTEST_KEY = 16
_LEAST_WEIGHT, _MOST_WEIGHT = 0.001, 1000
_SHAPE = "`key` or `sha256`, `tenant`, perhaps `weight`, and nothing else"


class ApiKeysError(Exception):
    """The file cannot be used. One line, which names it and the entry at fault."""


class _Keys(NamedTuple):
    tenants: dict[bytes, str]
    """By the digests of their keys."""
    weights: dict[str, float]
    """Of the tenants for whom an entry gives one."""


class ApiKeys:
    """The keys of one file."""

    def __init__(self, path: Path) -> None:
        """Raises ApiKeysError."""
        self._path = path
        self._watch = FileWatch(path)
        self._keys = _read(path)

    def tenant_of(self, authorization: bytes | None, x_api_key: bytes | None) -> str:
        """By OpenAI's header or Anthropic's. Raises ApiError 401 where neither holds a valid key."""
        key = x_api_key
        if authorization is not None and authorization[:7].lower() == b"bearer ":
            key = authorization[7:].strip()
        if not key:
            message = "this path needs an API key: send it as Authorization: Bearer KEY or x-api-key: KEY"
            raise ApiError(401, "missing_api_key", message)
        tenant = self._keys.tenants.get(sha256(key).digest())
        if tenant is None:
            raise ApiError(401, "invalid_api_key", "this API key is not valid here: check it, or ask for a new one")
        return tenant

    def weight_of(self, tenant: str) -> float:
        """Of its share while requests wait for their turn."""
        return self._keys.weights.get(tenant, 1.0)

    def reload(self) -> None:
        """Take the file's keys; where it cannot be used, keep the ones there are."""
        try:
            self._keys = _read(self._path)
        except ApiKeysError as error:
            _logger.error("the API keys stay as they were: %s", error)
        else:
            _logger.info("API keys read", extra=fields(keys=len(self._keys.tenants)))

    async def watch(self) -> None:
        """Reload whenever the file has changed, until cancelled."""
        await self._watch.run(self.reload)


def _read(path: Path) -> _Keys:
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_FILE_BYTES + 1)
        if len(text) > _MOST_FILE_BYTES:
            raise ApiKeysError(f"{path}: is over {_MOST_FILE_BYTES} bytes")
        document = tomllib.loads(text.decode())
    except OSError as error:
        raise ApiKeysError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError:  # its message might quote a key
        raise ApiKeysError(f"{path}: is not TOML in UTF-8") from None
    entries = document.get("key", [])
    if document.keys() - {"key"} or not isinstance(entries, list):
        raise ApiKeysError(f"{path}: must hold [[key]] entries and nothing else")
    keys = _Keys({}, {})
    for number, entry in enumerate(entries, 1):
        try:
            digest, tenant, weight = _entry(entry)
            if keys.tenants.setdefault(digest, tenant) != tenant:
                raise ValueError("repeats a key that is another tenant's")
            if weight is not None and keys.weights.setdefault(tenant, weight) != weight:
                raise ValueError("gives its tenant another weight than an entry before it")
        except ValueError as error:
            raise ApiKeysError(f"{path}: [[key]] number {number} {error}") from None
    return keys


def _entry(entry: object) -> tuple[bytes, str, float | None]:
    """Digest, tenant and weight. Raises ValueError with what follows the entry's name."""
    if not isinstance(entry, dict) or entry.keys() - {"weight"} not in ({"key", "tenant"}, {"sha256", "tenant"}):
        raise ValueError(f"must have {_SHAPE}")
    tenant, weight = entry["tenant"], entry.get("weight")
    if not isinstance(tenant, str) or not _TENANT.fullmatch(tenant):
        raise ValueError("must have a tenant of 1 to 128 letters, digits or ._:@+-")
    if weight is not None and (type(weight) not in (int, float) or not _LEAST_WEIGHT <= weight <= _MOST_WEIGHT):
        raise ValueError(f"must have a weight from {_LEAST_WEIGHT} to {_MOST_WEIGHT}")
    if "sha256" in entry:
        digest = entry["sha256"]
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise ValueError("must have a sha256 of 64 hex digits")
        return bytes.fromhex(digest), tenant, weight
    key = entry["key"]
    if not isinstance(key, str) or len(key) < _SHORTEST_KEY or not (key.isascii() and key.isprintable()) or " " in key:
        raise ValueError(f"must have a key of at least {_SHORTEST_KEY} printable ASCII characters without spaces")
    return sha256(key.encode()).digest(), tenant, weight
