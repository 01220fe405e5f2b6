"""The local file system through POSIX calls, and the type of the file system of a directory."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat as stat_bits
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeVar

from penstock.errors import (
    Corrupt,
    InvalidInput,
    MediaError,
)
from penstock.storage.fs.file_system import Buffer, FileStat, FileView, LogFile, WritableFile, explain
from penstock.storage.fs.locks import close_lock, data_modes, open_lock

VOLATILE: Final = frozenset({"tmpfs", "ramfs"})
"""File systems in memory, whose content does not survive a restart of the machine."""

_T = TypeVar("_T")
_IOV_MAX = 1024
_ZEROS = bytes(1024 * 1024)
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
# One call that writes and syncs saves a system call and, next to a busy thread, a wait for the interpreter.
_DSYNC: int = getattr(os, "RWF_DSYNC", 0)
# The errors of a kernel for a bad sector, or for a block that fails a check of the file system.
_MEDIA = frozenset({errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.ENODATA, errno.EILSEQ, errno.EREMOTEIO})
_READ_TRIES = 2
_NO_MODES = frozenset({errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})


class _OsFile:
    """A file that is written through its descriptor."""

    __slots__ = ("_fd", "_path")

    def __init__(self, fd: int, path: str) -> None:
        self._fd: int | None = fd
        self._path = path

    def write(self, buffers: Sequence[Buffer]) -> None:
        with _explained(self._path, "write"):
            _write_all(self._descriptor(), buffers)

    def datasync(self) -> None:
        with _explained(self._path, "make durable"):
            os.fdatasync(self._descriptor())

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            with _explained(self._path, "close"):
                os.close(fd)

    def _descriptor(self) -> int:
        if self._fd is None:
            raise InvalidInput(f"{self._path} is closed; open a new file")
        return self._fd


class _OsLogFile:
    """A file that is written in place. Its methods are short, because an acknowledgement waits for each."""

    __slots__ = ("_fd", "_path", "size")

    def __init__(self, fd: int, path: str, size: int) -> None:
        self._fd: int | None = fd
        self._path = path
        self.size = size

    def write_at(self, offset: int, buffers: Sequence[Buffer]) -> None:
        try:
            _write_all_at(self._descriptor(), offset, buffers, self.size, 0)
        except OSError as error:
            raise explain(error, self._path, "write") from error

    def write_durably_at(self, offset: int, buffers: Sequence[Buffer]) -> None:
        try:
            fd = self._descriptor()
            if _DSYNC:
                try:
                    _write_all_at(fd, offset, buffers, self.size, _DSYNC)
                    return
                except OSError as error:
                    if error.errno != errno.EOPNOTSUPP:
                        raise
            _write_all_at(fd, offset, buffers, self.size, 0)
            os.fdatasync(fd)
        except OSError as error:
            raise explain(error, self._path, "write durably") from error

    def datasync(self) -> None:
        try:
            os.fdatasync(self._descriptor())
        except OSError as error:
            raise explain(error, self._path, "make durable") from error

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            with _explained(self._path, "close"):
                os.close(fd)

    def _descriptor(self) -> int:
        if self._fd is None:
            raise InvalidInput(f"{self._path} is closed; open it again")
        return self._fd


class _Descriptor:
    """An open file that is closed with its last reference."""

    __slots__ = ("fd", "path")

    def __init__(self, fd: int, path: str) -> None:
        self.fd = fd
        self.path = path

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.fd)

    def read(self, start: int, length: int) -> bytes:
        """Read `length` bytes from `start`, or fewer at the end of the file."""
        try:
            data = os.pread(self.fd, length, start)
        except OSError:
            data = b""  # the second read below explains the error
        if len(data) == length:
            return data
        with _explained(self.path, "read"):
            parts = [data]
            done = len(data)
            while done < length and (part := _pread(self.fd, self.path, length - done, start + done)):
                parts.append(part)
                done += len(part)
        return b"".join(parts)


class OsFileSystem:
    """The file system of this machine."""

    def create(self, path: str) -> WritableFile:
        with _explained(path, "create"):
            return _OsFile(data_modes().new_file(path, _NEW_FILE), path)

    def allocate(self, path: str, size: int, *, reserve_only: bool = False) -> None:
        with _explained(path, "allocate"):
            fd = data_modes().new_file(path, _NEW_FILE)
            try:
                if not (reserve_only and size and _is_reserved(fd, size)):
                    _fill_with_zeros(fd, size)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(path)
                raise
            finally:
                os.close(fd)

    def open_log(self, path: str) -> LogFile:
        with _explained(path, "open"):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            return _OsLogFile(fd, path, os.fstat(fd).st_size)

    def open_append(self, path: str, size: int) -> WritableFile:
        with _explained(path, "open"):
            fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                _cut_to(fd, path, size)
            except BaseException:
                os.close(fd)
                raise
            return _OsFile(fd, path)

    def map(self, path: str) -> memoryview:
        with _explained(path, "map"):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return memoryview(mmap.mmap(fd, 0, prot=mmap.PROT_READ)) if _size(fd) else memoryview(b"")
            finally:
                os.close(fd)

    def open_view(self, path: str) -> FileView:
        with _explained(path, "open"):
            source = _Descriptor(os.open(path, os.O_RDONLY | os.O_CLOEXEC), path)
            return FileView(path, _size(source.fd), source.read)

    def truncate(self, path: str, size: int) -> None:
        with _explained(path, "truncate"):
            fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.ftruncate(fd, size)
                os.fsync(fd)
            finally:
                os.close(fd)

    def read(self, path: str, start: int | None = 0, length: int | None = None) -> bytes:
        with _explained(path, "read"):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return _read_range(fd, path, start, length)
            finally:
                os.close(fd)

    def read_into(
        self, path: str, start: int | None, length: int | None, allocate: Callable[[int], memoryview]
    ) -> memoryview:
        with _explained(path, "read"):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                begin, size = _range(fd, start, length)
                memory = allocate(size)
                return memory[: _fill(fd, path, begin, memory)]
            finally:
                os.close(fd)

    def stat(self, path: str) -> FileStat:
        with _explained(path, "look at"):
            return _file_stat(os.stat(path))

    def rename(self, source: str, target: str) -> None:
        with _explained(target, f"move {source} to"):
            os.rename(source, target)

    def unlink(self, path: str) -> None:
        with _explained(path, "remove"):
            os.unlink(path)

    def protect(self, path: str) -> bool:
        with _explained(path, "protect"):
            try:
                os.chmod(path, stat_bits.S_IMODE(os.stat(path).st_mode) & ~0o222)
            except OSError as error:
                if error.errno in _NO_MODES:
                    return False
                raise
            return not os.stat(path).st_mode & 0o222

    def make_dirs(self, path: str) -> None:
        with _explained(path, "create the directory"):
            _make_dirs(path)

    def remove_dir(self, path: str) -> None:
        with _explained(path, "remove the directory"):
            os.rmdir(path)

    def sync_dir(self, path: str) -> None:
        with _explained(path, "make durable the directory"):
            _sync_dir(path)

    def free_bytes(self, path: str) -> int:
        with _explained(path, "look at"):
            info = os.statvfs(path)
            return info.f_bavail * info.f_frsize

    def list_files(self, path: str) -> list[tuple[str, FileStat]]:
        with _explained(path, "list"):
            return sorted(_walk(path, ""), key=lambda found: found[0])

    @contextlib.contextmanager
    def lock(
        self,
        path: str,
        *,
        shared: bool = False,
        wait: bool = True,
        wait_s: float | None = None,
        note: bytes = b"",
    ) -> Iterator[None]:
        with _explained(path, "lock"):
            lock = open_lock(path)
        try:
            with _explained(path, "lock"):
                lock.acquire(shared=shared, wait_s=wait_s if wait else 0.0, note=note)
            yield
        finally:
            close_lock(lock)


@contextlib.contextmanager
def _explained(path: str, doing: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise explain(error, path, doing) from error


def _write_all(fd: int, buffers: Sequence[Buffer]) -> None:
    views = [view for view in (memoryview(buffer).cast("B") for buffer in buffers) if view.nbytes]
    first = 0
    while first < len(views):
        written = os.writev(fd, views[first : first + _IOV_MAX])
        while first < len(views) and written >= views[first].nbytes:
            written -= views[first].nbytes
            first += 1
        if written:
            views[first] = views[first][written:]


def _write_all_at(fd: int, offset: int, buffers: Sequence[Buffer], size: int, flags: int) -> None:
    """Write with one system call if possible. Join too many buffers, and continue a short write."""
    if len(buffers) > _IOV_MAX:
        buffers = [b"".join(buffers)]
    byte_count = sum(map(len, buffers))
    if offset + byte_count > size:
        raise InvalidInput(f"{byte_count} bytes at {offset} reach past the end of a file of {size}")
    written = os.pwritev(fd, buffers, offset, flags)
    if written != byte_count:
        rest = memoryview(b"".join(buffers))
        while written < len(rest):
            written += os.pwritev(fd, [rest[written:]], offset + written, flags)


def _is_reserved(fd: int, size: int) -> bool:
    """Allocate space without writing it. Return False if the file system cannot do that."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        return False
    os.fsync(fd)
    return True


def _fill_with_zeros(fd: int, size: int) -> None:
    for start in range(0, size, len(_ZEROS)):
        _write_all(fd, [_ZEROS[: size - start]])
        # Sync each piece, so that a sync of another process on this device does not wait for all of them.
        os.fdatasync(fd)


def _cut_to(fd: int, path: str, size: int) -> None:
    found = _size(fd)
    if found < size:
        raise Corrupt(
            f"{path} has {found} bytes where at least {size} were written; keep it and restore a copy"
        )
    if found > size:
        os.ftruncate(fd, size)
    os.lseek(fd, size, os.SEEK_SET)


def _size(fd: int) -> int:
    info = os.fstat(fd)
    if stat_bits.S_ISDIR(info.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    return info.st_size


def _range(fd: int, start: int | None, length: int | None) -> tuple[int, int]:
    """Return the start of a read, and the number of bytes that currently exist in its range."""
    size = _size(fd)
    if start is None:
        start = max(0, size - (size if length is None else length))
    return start, max(0, size - start) if length is None else max(0, min(length, size - start))


def _pread(fd: int, path: str, length: int, start: int) -> bytes:
    return _retried(path, start, length, lambda: os.pread(fd, length, start))


def _preadv(fd: int, path: str, memory: memoryview, start: int) -> int:
    return _retried(path, start, len(memory), lambda: os.preadv(fd, [memory], start))


def _retried(path: str, start: int, length: int, read: Callable[[], _T]) -> _T:
    """Read, and retry once, because a failure may be transient. Raise `MediaError` if both fail."""
    for tries_left in reversed(range(_READ_TRIES)):
        try:
            return read()
        except OSError as error:
            if error.errno not in _MEDIA:
                raise
            if not tries_left:
                raise MediaError(path, start, length, os.strerror(error.errno)) from error
    raise AssertionError("unreachable")


def _fill(fd: int, path: str, start: int, memory: memoryview) -> int:
    """Read until the memory is full or the file ends. Return the number of bytes."""
    filled = 0
    while filled < len(memory):
        count = _preadv(fd, path, memory[filled:], start + filled)
        if count == 0:
            break
        filled += count
    return filled


def _read_range(fd: int, path: str, start: int | None, length: int | None) -> bytes:
    start, remaining = _range(fd, start, length)
    parts: list[bytes] = []
    while remaining > 0:
        part = _pread(fd, path, remaining, start)
        if not part:
            break
        parts.append(part)
        start += len(part)
        remaining -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _file_stat(info: os.stat_result) -> FileStat:
    return FileStat(
        size=info.st_size,
        modified_ms=info.st_mtime_ns // 1_000_000,
        is_dir=stat_bits.S_ISDIR(info.st_mode),
    )


def _make_dirs(path: str) -> None:
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    if parent != path:
        _make_dirs(parent)
    created = True
    try:
        data_modes().new_directory(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None
        created = False
    try:
        # Sync even a directory of another process, which may not have synced it yet.
        _sync_dir(parent)
    except OSError:
        if created:
            # Remove it, because the next call would assume that it is durable.
            with contextlib.suppress(OSError):
                os.rmdir(path)
        raise


def _sync_dir(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        # A file system that keeps its names only in memory, such as an automounter's, has nothing to sync.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(fd)


def _walk(path: str, prefix: str) -> Iterator[tuple[str, FileStat]]:
    try:
        entries = list(os.scandir(path))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(entry.path, f"{prefix}{entry.name}/")
            continue
        with contextlib.suppress(FileNotFoundError):
            info = _file_stat(entry.stat())
            if not info.is_dir:
                yield f"{prefix}{entry.name}", info


def filesystem_of(path: str, mounts: str) -> str:
    """Return the type of the file system of `path` from the text of /proc/mounts, or "" if unknown."""
    best, kind = "", ""
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ")
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, fields[2]
    return kind


def device_kind(path: str) -> str:
    """Return the type of the file system of `path`, or "" if the machine does not report it."""
    try:
        return filesystem_of(os.path.realpath(path), Path("/proc/mounts").read_text(encoding="utf-8"))
    except OSError:
        return ""
