"""A session on disk: the KV blocks of one prompt, with its tokens and all that must be equal for them to be of use.

     0   "warmKV\\r\\n"                     8 bytes, which a copy in text mode would spoil
     8   version | header bytes           2 x uint32; all numbers are little-endian
    16   header                           JSON: SessionHeader, at most 64 KiB
     .   seal 0                           32 bytes: of everything before it
     .   token ids                        uint32 each
     .   seal 1                           of seal 0 and the tokens
     .   portion 0                        blocks 0 to k - 1, each as `kv_layout` draws it
     .   seal 2                           of seal 1 and portion 0
     .   portion 1 ...                    the last one may be shorter
     .   last seal                        and here the file ends

A seal is an HMAC-SHA256 under a key made from the cluster's secret. It covers the seal before it, so no section can be
changed, moved, or taken from another file. With an empty secret it finds every accident, but who can write files could
also forge one.

Every length follows from the header, which is checked first, and all together must be the length of the file before
anything of that size is read. Sections are read one after another into one buffer, and a section is given away only
once its seal was right.
"""

from __future__ import annotations

import hmac
import os
import sys
from array import array
from collections.abc import Iterator
from typing import Annotated, Final, Literal, NamedTuple, Protocol

import msgspec

from replica.kv_layout import KVLayout

__all__ = ["DamagedSession", "Portion", "SessionHeader", "SessionReader", "SessionWriter", "file_bytes", "seal_key"]

MAGIC: Final = b"warmKV\r\n"
VERSION: Final = 1
SEAL_BYTES: Final = 32
HEADER_START: Final = len(MAGIC) + 8
_MOST_HEADER_BYTES = 1 << 16
_MOST_TOKENS = 1 << 24
_MOST_BLOCK_BYTES = 1 << 30
_MOST_PORTION_BYTES = 1 << 26
"""Unless a portion is a single block."""
_TOKEN_BYTES = 4

_Name = Annotated[str, msgspec.Meta(max_length=1024)]


class DamagedSession(Exception):  # noqa: N818 - says what became of the file
    """The file is not, or not any more, what a writer wrote. The message says where it is wrong."""


class SessionHeader(msgspec.Struct, frozen=True, kw_only=True):
    weights: _Name
    tokenizer: _Name
    template: _Name
    layout: KVLayout
    tenant: _Name
    """An HMAC of the tenant's name: the file does not tell it."""
    tokens: Annotated[int, msgspec.Meta(ge=1, le=_MOST_TOKENS)]
    """The last block may be filled in part."""
    encoding: Literal["raw", "int8"]
    stored_block_bytes: Annotated[int, msgspec.Meta(ge=1, le=_MOST_BLOCK_BYTES)]
    portion_blocks: Annotated[int, msgspec.Meta(ge=1, le=_MOST_TOKENS)]
    created_at: float
    package_version: _Name

    @property
    def blocks(self) -> int:
        return -(-self.tokens // self.layout.block_size)

    @property
    def portions(self) -> int:
        return -(-self.blocks // self.portion_blocks)


class Portion(NamedTuple):
    first_block: int
    stored: memoryview
    """Of whole blocks. Valid until the next portion is read."""


class ByteSink(Protocol):
    def write(self, data: bytes | memoryview, /) -> int | None: ...


class ByteSource(Protocol):
    def readinto(self, buffer: memoryview, /) -> int | None: ...

    def fileno(self) -> int: ...


def seal_key(secret: str) -> bytes:
    return hmac.digest(secret.encode(), b"warmroute session file 1", "sha256")


def file_bytes(header: SessionHeader) -> int:
    """How long the file of a session is."""
    return _file_bytes(header, len(msgspec.json.encode(header)))


def _file_bytes(header: SessionHeader, header_bytes: int) -> int:
    sections = header_bytes + header.tokens * _TOKEN_BYTES + header.blocks * header.stored_block_bytes
    return HEADER_START + sections + (2 + header.portions) * SEAL_BYTES


class _Chain:
    """The seals of a file, one after another."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._last = b""

    def next(self, *section: bytes | memoryview) -> bytes:
        seal = hmac.new(self._key, self._last, "sha256")
        for piece in section:
            seal.update(piece)
        self._last = seal.digest()
        return self._last


class SessionWriter:
    """Writes header and tokens at once, then what `add` brings: the portions in order, all of `header.portions`."""

    def __init__(self, file: ByteSink, header: SessionHeader, token_ids: list[int], key: bytes) -> None:
        assert len(token_ids) == header.tokens, "the header counts other tokens"
        self._file = file
        self._chain = _Chain(key)
        encoded = msgspec.json.encode(header)
        lengths = VERSION.to_bytes(4, "little") + len(encoded).to_bytes(4, "little")
        self._section(MAGIC, lengths, encoded)
        self._section(_swapped_on_big_endian(array("I", token_ids)).tobytes())

    def add(self, stored: memoryview) -> None:
        self._section(stored)

    def _section(self, *pieces: bytes | memoryview) -> None:
        for piece in (*pieces, self._chain.next(*pieces)):
            rest = memoryview(piece)
            while rest:
                rest = rest[self._file.write(rest) or 0 :]


class SessionReader:
    """Reads and checks the header at once. Then `token_ids`, then `portions`, once each and in this order.

    Everything raises DamagedSession, and OSError where the disk fails.
    """

    def __init__(self, file: ByteSource, key: bytes) -> None:
        self._file = file
        self._chain = _Chain(key)
        self.header = self._read_header()

    def token_ids(self) -> list[int]:
        packed = self._section(bytearray(self.header.tokens * _TOKEN_BYTES), "its tokens are")
        tokens = array("I")
        tokens.frombytes(packed)
        return _swapped_on_big_endian(tokens).tolist()

    def portions(self) -> Iterator[Portion]:
        header = self.header
        buffer = memoryview(bytearray(min(header.blocks, header.portion_blocks) * header.stored_block_bytes))
        for first in range(0, header.blocks, header.portion_blocks):
            last = min(first + header.portion_blocks, header.blocks)
            stored = buffer[: (last - first) * header.stored_block_bytes]
            yield Portion(first, self._section(stored, f"its KV of blocks {first} to {last - 1} is"))

    def _read_header(self) -> SessionHeader:
        file_size = os.fstat(self._file.fileno()).st_size
        start = self._read(bytearray(HEADER_START))
        if bytes(start[: len(MAGIC)]) != MAGIC:
            raise DamagedSession("it does not begin like a session file")
        version, length = (int.from_bytes(start[at : at + 4], "little") for at in (len(MAGIC), len(MAGIC) + 4))
        if version != VERSION:
            raise DamagedSession(f"version {version} of the format is not known here, only {VERSION}")
        if not 0 < length <= min(_MOST_HEADER_BYTES, file_size):
            raise DamagedSession(f"its header cannot be {length} bytes long")
        encoded = self._read(bytearray(length))
        self._check(self._chain.next(start, encoded), "its header is")
        try:
            header = msgspec.json.decode(encoded, type=SessionHeader)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise DamagedSession(f"its header cannot be read: {error}") from None
        if (expected := _file_bytes(header, length)) != file_size:
            raise DamagedSession(f"it has {file_size} bytes where its header says {expected}")
        if header.portion_blocks > 1 and header.portion_blocks * header.stored_block_bytes > _MOST_PORTION_BYTES:
            raise DamagedSession("its portions are too large")
        return header

    def _section(self, buffer: bytearray | memoryview, what: str) -> memoryview:
        section = self._read(buffer)
        self._check(self._chain.next(section), what)
        return section

    def _check(self, expected: bytes, what: str) -> None:
        if not hmac.compare_digest(self._read(bytearray(SEAL_BYTES)), expected):
            raise DamagedSession(f"{what} not what was sealed: damaged, or sealed under another secret")

    def _read(self, buffer: bytearray | memoryview) -> memoryview:
        """Fills the whole buffer."""
        whole = rest = memoryview(buffer)
        while rest:
            count = self._file.readinto(rest)
            if not count:
                raise DamagedSession("it ends too early")
            rest = rest[count:]
        return whole


def _swapped_on_big_endian(values: array[int]) -> array[int]:
    if sys.byteorder == "big":
        values.byteswap()
    return values
