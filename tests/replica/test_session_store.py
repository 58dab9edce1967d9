from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from replica.session_file import SessionHeader, file_bytes
from replica.session_store import InvalidSessionName, SessionNotFound, SessionStore, StoreFull
from tests.replica.test_session_file import HEADER, PORTIONS, TOKENS

WRITER = """
import sys
from pathlib import Path
from replica.session_store import SessionStore
from tests.replica.test_session_file import HEADER, PORTIONS, TOKENS
with SessionStore(Path(sys.argv[1]), 10**6, "").writing("", "one", HEADER, TOKENS) as writer:
    writer.add(memoryview(PORTIONS[0]))
    print("half", flush=True)
    sys.stdin.read()
"""


def new_store(directory: Path, most_bytes: int = 10**6) -> SessionStore:
    return SessionStore(directory, most_bytes, "")


def save(store: SessionStore, name: str, tenant: str = "", portions: list[bytes] = PORTIONS) -> None:
    header = msgspec.structs.replace(HEADER, tenant=store.tenant_id(tenant))
    with store.writing(tenant, name, header, TOKENS) as writer:
        for portion in portions:
            writer.add(memoryview(portion))


def first_portion(store: SessionStore, name: str, tenant: str = "") -> bytes:
    with store.reading(tenant, name) as reader:
        reader.token_ids()
        return bytes(next(reader.portions()).stored)


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("*/*"))


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../x",
        "a/b",
        "/etc/passwd",
        "a\0b",
        "a\n",
        ".hidden",
        "-x",
        "a b",
        "é",
        "x" * 101,
        "x" * 300,
        "~",
    ],
)
def test_a_name_is_no_way_to_another_folder(tmp_path: Path, name: str) -> None:
    store = new_store(tmp_path / "sessions")
    for attempt in (lambda: save(store, name), lambda: store.session("", name), lambda: store.delete("", name)):
        with pytest.raises(InvalidSessionName, match="1 to 100"):
            attempt()
    assert {path.name for path in tmp_path.rglob("*")} <= {"sessions", ".lock"}


@pytest.mark.parametrize("name", ["a", "x" * 100, "Work.2026-01", "0", "a..b", "x.part", "x.kv"])
def test_ordinary_names_are_taken(tmp_path: Path, name: str) -> None:
    store = new_store(tmp_path)
    save(store, name)
    assert [session.name for session in store.sessions("")] == [name]
    assert store.session("", name).header == msgspec.structs.replace(HEADER, tenant=store.tenant_id(""))


def test_a_tenant_has_a_folder_of_its_own(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    save(store, "one", "a")
    save(store, "one", "b", [b"B" * 16, *PORTIONS[1:]])
    assert first_portion(store, "one", "a") != first_portion(store, "one", "b")
    for stranger in ("", "c", "../" + store.tenant_id("a"), store.tenant_id("a")):
        assert store.sessions(stranger) == []
        with pytest.raises(SessionNotFound):
            store.delete(stranger, "one")
    store.delete("a", "one")
    assert [len(store.sessions(tenant)) for tenant in "ab"] == [0, 1]


def test_nobody_else_on_the_machine_may_read_what_is_saved(tmp_path: Path) -> None:
    save(new_store(tmp_path / "sessions"), "one")
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "sessions").rglob("*"))


def test_a_save_that_fails_leaves_all_as_it_was(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    save(store, "one")
    before = files(tmp_path)

    def half(name: str) -> None:
        with store.writing("", name, HEADER, TOKENS) as writer:
            writer.add(memoryview(b"x" * 16))
            raise ValueError("the other half cannot be read")

    for name in ("one", "two"):
        with pytest.raises(ValueError, match="other half"):
            half(name)
    assert files(tmp_path) == before
    assert first_portion(store, "one") == PORTIONS[0]


def test_kill_9_while_saving_leaves_the_old_session_and_the_next_start_cleans_up(tmp_path: Path) -> None:
    save(new_store(tmp_path), "one", portions=[b"o" * 16, *PORTIONS[1:]])
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "half\n"
        new_store(tmp_path)  # another replica on the same folder leaves alone what is being written
        assert len(files(tmp_path)) == 2
        writer.send_signal(signal.SIGKILL)
    assert len(files(tmp_path)) == 2
    store = new_store(tmp_path)
    assert files(tmp_path) == ["one.kv"]
    assert first_portion(store, "one") == b"o" * 16


def test_a_session_is_synced_before_it_gets_its_name_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = new_store(tmp_path)
    save(store, "before")  # makes the tenant's folder
    order: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def noted_fsync(descriptor: int) -> None:
        order.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")  # noqa: PTH112
        fsync(descriptor)

    def noted_replace(path: Path, target: Path) -> Path:
        order.append("rename")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    save(store, "one")
    assert order == ["file", "rename", "folder"]


def test_a_full_folder_refuses_and_keeps_what_it_has(tmp_path: Path) -> None:
    size = file_bytes(msgspec.structs.replace(HEADER, tenant=new_store(tmp_path).tenant_id("")))
    store = new_store(tmp_path, 2 * size)
    save(store, "one")
    save(store, "two", "another tenant")
    with pytest.raises(StoreFull, match="--sessions-bytes"):
        save(store, "three")
    save(store, "one", portions=[b"n" * 16, *PORTIONS[1:]])  # takes the place of its own old one
    assert first_portion(store, "one") == b"n" * 16
    store.delete("another tenant", "two")
    save(store, "three")
    assert files(tmp_path) == ["one.kv", "three.kv"]


def test_two_saves_at_once_are_promised_the_same_room_once(tmp_path: Path) -> None:
    size = file_bytes(HEADER)
    store = new_store(tmp_path, int(1.5 * size))
    with contextlib.suppress(RuntimeError), store.writing("", "one", HEADER, TOKENS):
        with pytest.raises(StoreFull), store.writing("", "two", HEADER, TOKENS):
            pass
        raise RuntimeError
    with contextlib.suppress(RuntimeError), store.writing("", "two", HEADER, TOKENS):
        raise RuntimeError


def test_links_pipes_and_folders_are_no_sessions(tmp_path: Path) -> None:
    store = new_store(tmp_path / "sessions")
    save(store, "one")
    folder = tmp_path / "sessions" / store.tenant_id("")
    secret = tmp_path / "secret"
    secret.write_text("root:x:0:0")
    (folder / "link.kv").symlink_to(secret)
    os.mkfifo(folder / "pipe.kv")
    (folder / "folder.kv").mkdir()
    for name in ("link", "pipe", "folder"):
        with pytest.raises(SessionNotFound):
            store.session("", name)
    assert [session.name for session in store.sessions("")] == ["one"]


def test_a_damaged_session_is_listed_as_such_and_can_be_deleted(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    save(store, "one")
    path = tmp_path / store.tenant_id("") / "one.kv"
    path.write_bytes(path.read_bytes()[:-1])
    [session] = store.sessions("")
    assert session.header is None
    assert session.damage is not None
    assert "where its header says" in session.damage
    store.delete("", "one")
    assert store.sessions("") == []


def test_sessions_come_and_go_while_they_are_listed(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            save(store, "one")
            store.delete("", "one")

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(100):
            for session in store.sessions(""):
                assert isinstance(session.header, SessionHeader)
    finally:
        stop.set()
        thread.join()


def test_a_disk_that_is_full_is_an_error_that_says_so_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = new_store(tmp_path)

    def no_space(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    save(store, "one")
    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        save(store, "two")
    assert files(tmp_path) == ["one.kv"]
