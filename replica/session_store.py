"""The folder of saved sessions: which files there are, whose they are, and how one takes the place of another.

    DIR/.lock                            shared while somebody writes, exclusive to clean up
    DIR/<tenant, as an HMAC>/<name>.kv   one session (see `session_file`)
    DIR/<tenant, as an HMAC>/.*.part     one being written: synced, renamed, and the folder synced

A tenant sees its own folder alone. What a crash leaves behind is a .part file, which the next start removes; the
session that was to be replaced is still there. Several replicas may share a folder. When it is full, saving is refused:
a session was saved on purpose, and is deleted on purpose only.

Everything here blocks, so it is called in a thread.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hmac
import os
import re
import secrets
import stat
import threading
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from replica.session_file import DamagedSession, SessionHeader, SessionReader, SessionWriter, file_bytes, seal_key

__all__ = [
    "InvalidSessionName",
    "SessionNotFound",
    "SessionStore",
    "StoreFull",
    "StoredSession",
    "check_session_name",
]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_SUFFIX = ".kv"
_PART = ".part"
_MOST_SESSIONS = 1000
"""Of one tenant."""


class InvalidSessionName(ValueError):  # noqa: N818 - says what is wrong with it
    def __init__(self) -> None:
        super().__init__("a session's name is 1 to 100 letters, digits, '.', '_' and '-', the first a letter or digit")


class SessionNotFound(Exception):  # noqa: N818 - a state, not a mistake
    """This tenant has no session of that name."""


class StoreFull(Exception):  # noqa: N818 - a state, not a mistake
    """There is no room for what is to be saved. The message says what to do."""


class StoredSession(NamedTuple):
    """`damage` where there is no header."""

    name: str
    file_bytes: int
    header: SessionHeader | None
    damage: str | None = None


class SessionStore:
    """Any number of threads may use one. Raises OSError where the folder cannot be used."""

    def __init__(self, directory: Path, most_bytes: int, secret: str) -> None:
        self.most_bytes = most_bytes
        self._directory = directory
        self._secret = secret.encode()
        self._seal_key = seal_key(secret)
        self._promised_bytes = 0
        self._promises = threading.Lock()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._remove_parts()

    def tenant_id(self, tenant: str) -> str:
        return hmac.digest(
            self._secret, b"warmroute session tenant\0" + tenant.encode(errors="surrogateescape"), "sha256"
        ).hex()[:32]

    def sessions(self, tenant: str) -> list[StoredSession]:
        """By name."""
        found = []
        for path in sorted(self._files(tenant)):
            with contextlib.suppress(SessionNotFound):  # deleted meanwhile
                found.append(self.session(tenant, path.name.removesuffix(_SUFFIX)))
        return found

    def session(self, tenant: str, name: str) -> StoredSession:
        with self._opened(tenant, name) as file:
            size = os.fstat(file.fileno()).st_size
            try:
                return StoredSession(name, size, SessionReader(file, self._seal_key).header)
            except DamagedSession as error:
                return StoredSession(name, size, None, str(error))

    @contextlib.contextmanager
    def reading(self, tenant: str, name: str) -> Iterator[SessionReader]:
        """Raises SessionNotFound and DamagedSession."""
        with self._opened(tenant, name) as file:
            yield SessionReader(file, self._seal_key)

    @contextlib.contextmanager
    def writing(self, tenant: str, name: str, header: SessionHeader, token_ids: list[int]) -> Iterator[SessionWriter]:
        """What is written becomes the session when the block ends; if it raises, all stays as it was.

        Raises StoreFull before anything is written.
        """
        path = self._path(tenant, name)
        with self._locked(fcntl.LOCK_SH), self._room(path, file_bytes(header)):
            self._make_folder(path.parent)
            part = path.parent / f".{secrets.token_hex(8)}{_PART}"
            try:
                with FileIO(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                    yield SessionWriter(file, header, token_ids, self._seal_key)
                    os.fsync(file.fileno())
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)
            _sync(path.parent)

    def delete(self, tenant: str, name: str) -> None:
        path = self._path(tenant, name)
        try:
            path.unlink()
        except FileNotFoundError:
            raise SessionNotFound from None
        _sync(path.parent)

    def _path(self, tenant: str, name: str) -> Path:
        check_session_name(name)
        return self._folder(tenant) / (name + _SUFFIX)

    def _folder(self, tenant: str) -> Path:
        return self._directory / self.tenant_id(tenant)

    def _files(self, tenant: str) -> list[Path]:
        return [path for path in self._folder(tenant).glob(f"*{_SUFFIX}") if _NAME.fullmatch(path.stem)]

    @contextlib.contextmanager
    def _opened(self, tenant: str, name: str) -> Iterator[FileIO]:
        path = self._path(tenant, name)
        try:
            # No link leads elsewhere, and a pipe does not keep us waiting.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP):
                raise SessionNotFound from None
            raise
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise SessionNotFound
        with FileIO(descriptor, "rb") as file:
            yield file

    @contextlib.contextmanager
    def _room(self, path: Path, wanted_bytes: int) -> Iterator[None]:
        replaced_bytes = _size(path)
        if not replaced_bytes and len(list(path.parent.glob(f"*{_SUFFIX}"))) >= _MOST_SESSIONS:
            raise StoreFull(f"there are {_MOST_SESSIONS} sessions, which is the limit: delete some first")
        with self._promises:
            used_bytes = sum(_size(file) for file in self._directory.glob(f"*/*{_SUFFIX}"))
            left = self.most_bytes - used_bytes - self._promised_bytes + replaced_bytes
            if wanted_bytes > left:
                raise StoreFull(
                    f"the session needs {wanted_bytes} bytes, and {max(0, left)} of {self.most_bytes} are left: "
                    "delete sessions, or start the replica with more --sessions-bytes"
                )
            self._promised_bytes += wanted_bytes
        try:
            yield
        finally:
            with self._promises:
                self._promised_bytes -= wanted_bytes

    def _make_folder(self, folder: Path) -> None:
        if not folder.is_dir():
            folder.mkdir(mode=0o700, exist_ok=True)
            _sync(self._directory)

    @contextlib.contextmanager
    def _locked(self, kind: int) -> Iterator[None]:
        descriptor = os.open(self._directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, kind)
            yield
        finally:
            os.close(descriptor)

    def _remove_parts(self) -> None:
        # Whoever writes holds the lock; where nobody does, what is unfinished stays so.
        with contextlib.suppress(BlockingIOError), self._locked(fcntl.LOCK_EX | fcntl.LOCK_NB):
            for part in self._directory.glob(f"*/.*{_PART}"):
                part.unlink(missing_ok=True)


def check_session_name(name: str) -> None:
    """Raises InvalidSessionName. What passes is a file's name, and never a way to another folder."""
    if not _NAME.fullmatch(name):
        raise InvalidSessionName


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
