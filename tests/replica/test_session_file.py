from __future__ import annotations

import contextlib
import hmac
import os
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replica.kv_layout import KVLayout
from replica.session_file import (
    HEADER_START,
    MAGIC,
    SEAL_BYTES,
    DamagedSession,
    SessionHeader,
    SessionReader,
    SessionWriter,
    file_bytes,
    seal_key,
)

KEY = seal_key("a secret")
LAYOUT = KVLayout(dtype="simulated", layers=1, kv_heads=1, head_dim=1, block_size=4, rope="", block_bytes=8)
HEADER = SessionHeader(
    weights="w",
    tokenizer="t",
    template="c",
    layout=LAYOUT,
    tenant="x",
    tokens=18,
    encoding="raw",
    stored_block_bytes=8,
    portion_blocks=2,
    created_at=1.5,
    package_version="1",
)
TOKENS = list(range(100, 118))
PORTIONS = [b"a" * 16, b"b" * 16, b"c" * 8]


def write(path: Path, header: SessionHeader = HEADER, portions: list[bytes] = PORTIONS, key: bytes = KEY) -> bytes:
    with path.open("wb", buffering=0) as file:
        writer = SessionWriter(file, header, TOKENS[: header.tokens], key)
        for portion in portions:
            writer.add(memoryview(portion))
    return path.read_bytes()


def read(path: Path, key: bytes = KEY) -> tuple[SessionHeader, list[int], list[tuple[int, bytes]]]:
    with path.open("rb", buffering=0) as file:
        reader = SessionReader(file, key)
        tokens = reader.token_ids()
        return reader.header, tokens, [(portion.first_block, bytes(portion.stored)) for portion in reader.portions()]


def refused(path: Path, content: bytes, key: bytes = KEY) -> str:
    path.write_bytes(content)
    with pytest.raises(DamagedSession) as raised:
        read(path, key)
    return str(raised.value)


def sealed(header: bytes, rest: bytes = b"", key: bytes = KEY, magic: bytes = MAGIC) -> bytes:
    """The beginning of a file whose first seal is right, whatever its header says."""
    start = magic + (1).to_bytes(4, "little") + len(header).to_bytes(4, "little") + header
    return start + hmac.digest(key, start, "sha256") + rest


def section_ends(header: SessionHeader) -> list[int]:
    end = HEADER_START + len(msgspec.json.encode(header))
    ends = [end, end := end + SEAL_BYTES, end := end + 4 * header.tokens, end := end + SEAL_BYTES]
    for portion in PORTIONS:
        ends += [end := end + len(portion), end := end + SEAL_BYTES]
    return ends


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "session"
    content = write(path)
    assert read(path) == (HEADER, TOKENS, [(0, PORTIONS[0]), (2, PORTIONS[1]), (4, PORTIONS[2])])
    assert len(content) == file_bytes(HEADER) == section_ends(HEADER)[-1]


def test_every_flipped_bit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "session"
    content = write(path)
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        refused(path, bytes(flipped))


def test_every_truncation_and_every_byte_too_many_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "session"
    content = write(path)
    lengths = set(range(0, len(content), 7)) | {end + off for end in section_ends(HEADER) for off in (-1, 0, 1)}
    for length in sorted(lengths - {len(content), len(content) + 1}):
        refused(path, content[:length])
    assert "where its header says" in refused(path, content + b"\0")


def test_a_section_of_another_file_is_refused_though_its_own_seal_is_right(tmp_path: Path) -> None:
    path = tmp_path / "session"
    one, other = write(path), write(path, portions=[PORTIONS[0], b"x" * 16, PORTIONS[2]])
    for start, end in zip(section_ends(HEADER)[1::2], section_ends(HEADER)[3::2], strict=False):
        mixed = one[:start] + other[start:end] + one[end:]
        if mixed not in (one, other):
            assert "sealed" in refused(path, mixed)


def test_portions_that_change_places_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "session"
    content = write(path)
    _, _, _, first, _, second, _, third, *_ = section_ends(HEADER)
    assert "sealed" in refused(path, content[:first] + content[second:third] + content[first:second] + content[third:])


def test_another_secret_refuses(tmp_path: Path) -> None:
    assert "another secret" in refused(tmp_path / "session", write(tmp_path / "session"), seal_key("another"))


def test_a_version_that_is_not_known_is_refused_by_its_number(tmp_path: Path) -> None:
    content = bytearray(write(tmp_path / "session"))
    content[len(MAGIC)] = 2
    assert "version 2" in refused(tmp_path / "session", bytes(content))


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "session"
    write(path)
    with path.open("rb", buffering=0) as file:
        reader = SessionReader(file, KEY)
        reader.token_ids()
        portions = reader.portions()
        next(portions)
        os.truncate(path, section_ends(HEADER)[5] + 3)
        with pytest.raises(DamagedSession, match="ends too early"):
            next(portions)


@pytest.mark.parametrize(
    ("tokens", "block_bytes", "portion_blocks"),
    [
        (2**24, 8, 2),
        (2**24, 2**30, 1),
        (2**24, 2**20, 2**24),
        (2**24, 2**30, 2**24),
        (2**31, 8, 2),
        (2**80, 8, 2),
        (18, 2**62, 2),
        (0, 8, 2),
        (-1, 8, 2),
        (18, 8, 0),
        (18, 0, 2),
    ],
)
def test_lengths_forged_under_a_right_seal_take_no_memory(
    tmp_path: Path, tokens: int, block_bytes: int, portion_blocks: int
) -> None:
    """A file of any length costs its forger nothing: it is a hole."""
    path = tmp_path / "session"
    forged = {"tokens": tokens, "stored_block_bytes": block_bytes, "portion_blocks": portion_blocks}
    header = msgspec.json.encode(msgspec.to_builtins(HEADER) | forged)
    path.write_bytes(sealed(header))
    blocks = -(-tokens // 4)
    seals = 2 + -(-blocks // max(1, portion_blocks))
    length = HEADER_START + len(header) + 4 * tokens + blocks * block_bytes + seals * SEAL_BYTES
    with path.open("r+b") as file:
        file.truncate(min(max(length, 1), 2**43))  # what file systems allow
    tracemalloc.start()
    try:
        with pytest.raises(DamagedSession):
            read(path)
        assert tracemalloc.get_traced_memory()[1] < 80 * 2**20
    finally:
        tracemalloc.stop()


def test_a_portion_that_is_no_portion_is_refused_with_the_header(tmp_path: Path) -> None:
    path = tmp_path / "session"
    header = msgspec.structs.replace(HEADER, tokens=2**20, stored_block_bytes=2**20, portion_blocks=2**18)
    path.write_bytes(sealed(msgspec.json.encode(header)))
    os.truncate(path, file_bytes(header))
    with path.open("rb", buffering=0) as file, pytest.raises(DamagedSession, match="portions are too large"):
        SessionReader(file, KEY)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from([*HEADER.__struct_fields__, "layout.block_size", "layout.dtype", "other"])


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.dictionaries(FIELDS, JUNK | st.integers(0, 2**40), max_size=4),
    body=st.binary(max_size=300),
    cut=st.integers(0, 40) | st.none(),
)
def test_whatever_a_sealed_header_says_is_read_or_refused(
    tmp_path: Path, changes: dict[str, Any], body: bytes, cut: int | None
) -> None:
    document = msgspec.to_builtins(HEADER)
    for name, value in changes.items():
        inner = document
        for part in name.split(".")[:-1]:
            inner = inner[part] if isinstance(inner.get(part), dict) else {}
        inner[name.rsplit(".", 1)[-1]] = value
    header = msgspec.json.encode(document)
    path = tmp_path / "session"
    path.write_bytes(sealed(header if cut is None else header[:-cut], body))
    with contextlib.suppress(DamagedSession):
        read(path)


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(start=st.sampled_from([b"", MAGIC, MAGIC + b"\1\0\0\0"]), rest=st.binary(max_size=400))
def test_arbitrary_bytes_are_refused(tmp_path: Path, start: bytes, rest: bytes) -> None:
    refused(tmp_path / "session", start + rest)


@pytest.mark.parametrize("header", [b"[" * 60_000, b'{"a":' * 10_000, b"\xff\xfe", b"1e999", b'"\\ud800"', b" " * 100])
def test_headers_that_are_hard_to_parse_are_refused(tmp_path: Path, header: bytes) -> None:
    assert "header cannot be read" in refused(tmp_path / "session", sealed(header))
