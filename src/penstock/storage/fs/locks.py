"""Access to files: the modes of new files and directories, and locks between processes.

Directories are created with mode 0700, files and lock files with 0600, regardless of the umask. The
environment variable `PENSTOCK_DATA_MODE` sets another mode for directories, such as 0750 or 0770. Files then
get the same read and write bits. Only users with write permission can open a lock file: a user who can open
it can hold the lock, and a reader that held it would stop every writer. Modes of existing files and
directories do not change, except that an old lock file loses the read bits of users who may not write it.

A lock is an `flock`. It ends with its process, but a stopped process keeps it, so a store never waits for it
indefinitely. The error then names the holder: from the kernel's lock table, or else from the process id that
the holder wrote to the file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import stat as stat_bits
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Final

from penstock.errors import ConfigError, PenstockError, Unavailable
from penstock.storage.fs.file_system import FileSystem

DATA_MODE: Final = "PENSTOCK_DATA_MODE"
_FIRST_LOOK_S: Final = 0.0005
_LOOK_S_MAX: Final = 0.02
_COMMAND_CHARS_MAX: Final = 120
_CONTINUE: Final = "which is stopped: continue it with"


class LockHeld(Unavailable):
    """Another process or thread holds the lock. The operation was not started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataModes:
    """The modes of new directories, files and lock files."""

    directory: int = 0o700
    file: int = 0o600
    lock: int = 0o600

    def new_file(self, path: str, flags: int, *, lock: bool = False) -> int:
        """Open `path` with `flags`, which may create it, and return its descriptor. Raise `OSError`."""
        mode = self.lock if lock else self.file
        if mode == 0o600 or os.path.exists(path):
            return os.open(path, flags, mode)
        fd = os.open(path, flags, mode)
        with contextlib.suppress(PermissionError):  # another user has just created it
            os.fchmod(fd, mode)  # the umask has removed requested bits
        return fd

    def new_directory(self, path: str) -> None:
        """Create one directory. Raise `OSError`."""
        os.mkdir(path, self.directory)
        if self.directory != 0o700:
            inherited = os.stat(path).st_mode & stat_bits.S_ISGID
            os.chmod(path, self.directory | inherited)


def data_modes() -> DataModes:
    """Return the modes that the environment sets for new files. Raise `ConfigError` for an invalid one."""
    return _parsed(os.environ.get(DATA_MODE, ""))


@functools.lru_cache(maxsize=8)
def _parsed(text: str) -> DataModes:
    if not text:
        return DataModes()
    digits = text.removeprefix("0o")
    mode = int(digits, 8) if digits and set(digits) <= set("01234567") else -1
    if not 0o700 <= mode <= 0o777:
        raise ConfigError(
            f"{DATA_MODE}: expected the octal mode of directories, 0700 to 0777 as in 0750, found {text!r}"
        )
    writers = mode & 0o222
    return DataModes(directory=mode, file=mode & 0o666, lock=writers | writers << 1)


class FileLock:
    """One held or awaited lock file. `fd` becomes None in a forked child, which never owned the lock."""

    __slots__ = ("fd", "path")

    def __init__(self, fd: int, path: str) -> None:
        self.fd: int | None = fd
        self.path = path

    def acquire(self, *, shared: bool, wait_s: float | None, note: bytes) -> None:
        """Take the lock. Wait at most `wait_s` seconds (None: indefinitely).

        Raise `LockHeld`, which names the holder, or `OSError`. Write `note` to the file, for errors of other
        processes.
        """
        assert self.fd is not None
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        if wait_s is None:
            fcntl.flock(self.fd, kind)
        elif not self._is_taken(kind, wait_s):
            waited = f" was not released within {wait_s:g} s: it" if wait_s else ""
            raise LockHeld(f"{self.path}{waited} is held by {advised(holder(self.path))}")
        if note and os.pread(self.fd, len(note) + 1, 0) != note:
            os.ftruncate(self.fd, 0)
            os.pwrite(self.fd, note, 0)

    def _is_taken(self, kind: int, wait_s: float) -> bool:
        """Poll the lock, because a blocking `flock` has no timeout. Return whether it was acquired."""
        assert self.fd is not None
        deadline = time.monotonic() + wait_s
        pause_s = _FIRST_LOOK_S
        while True:
            try:
                fcntl.flock(self.fd, kind | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return False
                time.sleep(min(pause_s, left_s))
                pause_s = min(2 * pause_s, _LOOK_S_MAX)


class _Locks:
    """The lock handles of this process, so that a forked child can drop its copies.

    A flock belongs to the open file, which a fork shares. A child that kept its copy would hold the parent's
    lock after the parent released it or died. The mutex prevents a fork between the opening of a lock file
    and its registration here.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._held: set[FileLock] = set()
        os.register_at_fork(
            before=self._mutex.acquire, after_in_parent=self._mutex.release, after_in_child=self._forget
        )

    def open(self, path: str) -> FileLock:
        with self._mutex:
            fd = data_modes().new_file(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, lock=True)
            lock = FileLock(fd, path)
            self._held.add(lock)
            _close_to_readers(fd)
            return lock

    def close(self, lock: FileLock) -> None:
        with self._mutex:
            self._held.discard(lock)
            fd, lock.fd = lock.fd, None
            if fd is not None:
                try:
                    # Unlock explicitly: a child that was just forked may not have closed its copy yet.
                    fcntl.flock(fd, fcntl.LOCK_UN)
                finally:
                    os.close(fd)

    def _forget(self) -> None:
        held, self._held = self._held, set()
        for lock in held:
            if lock.fd is not None:
                os.close(lock.fd)
                lock.fd = None
        self._mutex.release()


_LOCKS = _Locks()
open_lock = _LOCKS.open
close_lock = _LOCKS.close


def _close_to_readers(fd: int) -> None:
    """Remove the read bit of users who may not write. They could hold the lock, but never need it."""
    mode = stat_bits.S_IMODE(os.fstat(fd).st_mode)
    kept = mode & ~((mode & 0o444) & ~(mode & 0o222) << 1)
    if kept != mode:
        with contextlib.suppress(OSError):  # it belongs to another user, or the device keeps no modes
            os.fchmod(fd, kept)


def holder(path: str) -> str:
    """Describe the holder of a lock file for an error: process id, command, and whether it is stopped."""
    pid, source = _pid_in_kernel_table(path), ""
    if pid is None:
        pid, source = _pid_in_file(path), ", by its note in that file"
    if pid is None:
        return "an unknown process (it left no process id, and the kernel does not show one)"
    return described(pid, source)


def described(pid: int, source: str = "") -> str:
    """Describe a process for an error: its command, and what to do if it is stopped."""
    command, stopped = _command(pid), _is_stopped(pid)
    named = f"process {pid}{f' ({command})' if command else ''}{source}"
    return f"{named}, {_CONTINUE} `kill -CONT {pid}`, or end it" if stopped else named


def advised(named: str, advice: str = "wait for that process or stop it") -> str:
    """Return the text of `holder`, with advice unless it has its own."""
    return named if _CONTINUE in named else f"{named}; {advice}"


def _pid_in_kernel_table(path: str) -> int | None:
    """Return the process that /proc/locks lists for this file, or None."""
    try:
        info = os.stat(path)
        with open("/proc/locks", encoding="ascii", errors="replace") as table:
            lines = table.read().splitlines()
    except OSError:
        return None
    inode = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}:{info.st_ino}"
    for line in lines:
        fields = line.split()
        if len(fields) >= 6 and fields[1] == "FLOCK" and fields[5] == inode and fields[4].isdigit():
            return int(fields[4]) or None
    return None


def _pid_in_file(path: str) -> int | None:
    """Return the process id at the end of the holder's note if that process is alive, else None."""
    try:
        with open(path, "rb") as file:
            words = file.read(4096).decode("ascii", "replace").replace("=", " ").split()
    except OSError:
        return None
    if not words or not words[-1].isdigit():
        return None
    pid = int(words[-1])
    try:
        os.kill(pid, 0)
    except OSError as error:
        return pid if error.errno == errno.EPERM else None
    except OverflowError:
        return None
    return pid or None


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            raw = file.read(4096)
    except OSError:
        return ""
    words = " ".join(part.decode("utf-8", "replace") for part in raw.split(b"\0") if part)
    shown = "".join(char if char.isprintable() else "?" for char in words)
    return shown if len(shown) <= _COMMAND_CHARS_MAX else f"{shown[:_COMMAND_CHARS_MAX]}..."


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[:1] in ([b"T"], [b"t"])
    except OSError:
        return False


class DirectoryLock:
    """The exclusive lock of a data directory, as a context manager.

    Entering raises `LockHeld`, which names the holder's process id, if the directory is in use. The lock ends
    with the process, so nothing has to be cleaned up after a crash. `name` is the lock file in the directory.
    It contains `note` and then the process id.
    """

    __slots__ = ("_directory", "_fs", "_name", "_note", "_stack")

    def __init__(self, fs: FileSystem, directory: str, *, name: str = "LOCK", note: str = "") -> None:
        self._fs = fs
        self._directory = directory
        self._name = name
        self._note = note
        self._stack = ExitStack()

    def __enter__(self) -> DirectoryLock:
        self._fs.make_dirs(self._directory)
        path = os.path.join(self._directory, self._name)
        note = f"{self._note}{os.getpid()}\n".encode()
        try:
            self._stack.enter_context(self._fs.lock(path, wait=False, note=note))
        except LockHeld as error:
            named = advised(self._holder(path), "stop that process or choose another directory")
            raise LockHeld(f"data directory {self._directory} is in use by {named}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _holder(self, path: str) -> str:
        try:
            text = self._fs.read(path).decode("ascii", "replace").strip()
        except PenstockError:
            text = ""
        text = text.removeprefix(self._note)
        return described(int(text)) if text.isdigit() and len(text) < 20 else "process (unknown)"
