"""The file system as a seam: the few calls that durable code needs, with errors that say what to do.

What is durable when:

- a file's bytes, once `datasync` on its handle has returned;
- a name (created, renamed or removed), once `sync_dir` on the directory that holds it has returned; until
  then a file that was renamed within its directory is found under its old name, its new one, or both;
- the bytes of one `write_durably_at`, once it has returned: those bytes alone, not what was written before.

A failed `datasync` or `sync_dir` is never repeated on the same handle: the kernel reports a lost page once
and then forgets it, so a second call would succeed over missing bytes. The caller gets the error and has to
write the file anew.

`stage` and `publish` are the one way in which a whole file is put in place: readers see the old bytes or
the new ones, never a mixture, whatever happens in between.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import stat as stat_bits
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from penstock.errors import (
    Conflict,
    Corrupt,
    InvalidInput,
    MediaError,
    NotFound,
    OutcomeUnknown,
    PenstockError,
    PermissionDenied,
    StorageFull,
    Unavailable,
    Unsupported,
)
from penstock.storage.file_access import LockHeld, close_lock, data_modes, open_lock

__all__ = [
    "Buffer",
    "FileStat",
    "FileSystem",
    "FileView",
    "LockHeld",
    "LogFile",
    "OsFileSystem",
    "WritableFile",
    "explain",
    "publish",
    "stage",
]

Buffer: TypeAlias = bytes | bytearray | memoryview
_T = TypeVar("_T")
_LOGGER = logging.getLogger(__name__)

_IOV_MAX = 1024
_WRITE_BYTES = 256 * 1024
_ZEROS = bytes(1024 * 1024)
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
# One call that writes and syncs saves a system call and, beside a busy thread, a wait for the interpreter.
_DSYNC: int = getattr(os, "RWF_DSYNC", 0)
# What a kernel answers for a bad sector, and for a block that fails a check of the file system.
_MEDIA = frozenset({errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.ENODATA, errno.EILSEQ, errno.EREMOTEIO})
_READ_TRIES = 2
_SECTOR = 4096
"""A kernel reads whole pages, so that is how much one bad sector costs."""
_BAD_MAX = 1024
"""So many unreadable ranges of one file are kept apart; more of them are taken for one."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_NO_MODES = frozenset({errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})
_SHAPE = frozenset({errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.ENAMETOOLONG, errno.ELOOP})


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStat:
    """What `stat` tells of a name."""

    size: int
    modified_ms: int
    is_dir: bool = False


class WritableFile(Protocol):
    """A new file, written from its start to its end by one owner."""

    def write(self, buffers: Sequence[Buffer]) -> None:
        """Append every byte of `buffers`, in order. After a failure the file's tail is undefined."""
        ...

    def datasync(self) -> None:
        """Return when every byte written so far is durable. After a failure never call it again."""
        ...

    def close(self) -> None:
        """Release the handle; says nothing about durability. May be called twice."""
        ...


class LogFile(Protocol):
    """A file of fixed size, written in place by one owner. Buffers are bytes or views of bytes."""

    @property
    def size(self) -> int:
        """Its bytes; a write never reaches past them."""
        ...

    def write_at(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Write every byte of `buffers`, in order, from `offset` on.

        After a failure that range is undefined.
        """
        ...

    def write_durably_at(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """As `write_at`, and return when these bytes are durable; earlier writes may still not be.

        After a failure that range is undefined, and what it holds may become durable or not.
        """
        ...

    def datasync(self) -> None:
        """Return when every byte written so far is durable. After a failure never call it again."""
        ...

    def close(self) -> None:
        """Release the handle; says nothing about durability. May be called twice."""
        ...


class FileView:
    """A file as large as it was when it was opened, read piece by piece; it outlives the name.

    `view[start:stop]` is a copy of these bytes, read now, so later writes in place are seen. It is always as
    long as it was asked for within `len(view)`: bytes that the device cannot read, or that were cut off
    meanwhile, are zeros, and are added to `bad`. So whoever reads checks what they get, by its checksum. It
    holds a descriptor, so keep few of them. Safe to share between threads.
    """

    __slots__ = ("_read", "_size", "bad", "path")

    def __init__(self, path: str, size: int, read: Callable[[int, int], bytes]) -> None:
        """`read` returns so many bytes from an offset on, fewer at the end; it raises `MediaError`."""
        self.path = path
        self._size = size
        self._read = read
        self.bad: list[tuple[int, int]] = []
        """First byte and end of every range that could not be read so far, in order."""

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> memoryview:
        start, stop, _ = part.indices(self._size)
        return memoryview(self.read(start, stop))

    def read(self, start: int, stop: int) -> bytes:
        """The bytes `start` to `stop - 1`; those that cannot be read are zeros."""
        wanted = stop - start
        if wanted <= 0:
            return b""
        try:
            data = self._read(start, wanted)
        except MediaError:
            data = self._around(start, stop)
        if len(data) < wanted:
            there = start + len(data)
            self._note(there, stop, "the file was cut while it was in use")
            data += bytes(wanted - len(data))
        return data

    def read_exactly(self, start: int, stop: int) -> bytes:
        """The same, but raises `MediaError` unless every byte can be read."""
        data = self.read(start, stop)
        for low, high in self.bad:
            if low < stop and start < high:
                raise MediaError(self.path, max(low, start), min(high, stop) - max(low, start), "it is lost")
        return data

    def until(self, size: int) -> FileView:
        """The first `size` bytes of it."""
        part = FileView(self.path, min(size, self._size), self._read)
        part.bad = self.bad
        return part

    def _around(self, start: int, stop: int) -> bytes:
        """What can be read, with zeros for each page that cannot."""
        parts: list[bytes] = []
        while start < stop:
            data = self._beginning(start, stop)
            if not data:
                break
            parts.append(data)
            start += len(data)
        return b"".join(parts)

    def _beginning(self, start: int, stop: int) -> bytes:
        """As much from `start` on as can be read, else zeros for one page; nothing at the end of the file."""
        page_end = min(stop, start - start % _SECTOR + _SECTOR)
        while True:
            try:
                return self._read(start, stop - start)
            except MediaError as error:
                if start < error.offset < stop:
                    stop = error.offset
                elif stop > page_end:
                    stop = page_end
                else:
                    self._note(start, stop, "the device fails")
                    return bytes(stop - start)

    def _note(self, start: int, end: int, reason: str) -> None:
        if any(low <= start and end <= high for low, high in self.bad):
            return
        _LOGGER.error(
            "%s, bytes %d to %d cannot be read: %s; what is stored there is lost",
            self.path,
            start,
            end,
            reason,
        )
        merged: list[tuple[int, int]] = []
        for low, high in sorted([*self.bad, (start, end)]):
            if merged and (low <= merged[-1][1] or len(merged) == _BAD_MAX):
                merged[-1] = merged[-1][0], max(high, merged[-1][1])
            else:
                merged.append((low, high))
        self.bad[:] = merged


class FileSystem(Protocol):
    """Paths are absolute strings. Every method raises the errors of `explain`."""

    def create(self, path: str) -> WritableFile:
        """A new empty file. Raises `Conflict` if the name is taken."""
        ...

    def allocate(self, path: str, size: int, *, reserve_only: bool = False) -> None:
        """A new file of `size` zero bytes which are written out and durable, so that writing them again in
        place neither needs room nor changes the file's metadata. Raises `Conflict` if the name is taken;
        after any other failure there is no such file.

        With `reserve_only` the room is taken and the bytes are zero, but they need not be written out: it
        costs nothing now, and a little with the first sync of each part that is written.
        """
        ...

    def open_log(self, path: str) -> LogFile:
        """An existing file, to be written in place within its size."""
        ...

    def open_append(self, path: str, size: int) -> WritableFile:
        """Continue an existing file at `size`; whatever is beyond is cut off first.

        Raises `Corrupt` if the file is shorter. The cut is durable after the handle's next `datasync`.
        """
        ...

    def map(self, path: str) -> memoryview:
        """A read-only view of the whole file as large as it is now, which outlives the name.

        Later writes through a `LogFile` are seen in it. It may hold a descriptor, so keep few of them. To
        look at what was cut off meanwhile, or cannot be read from the device, ends the process: nothing uses
        it unless a setting asks for it. `open_view` is what to use instead.
        """
        ...

    def open_view(self, path: str) -> FileView:
        """The file, open for reading piece by piece."""
        ...

    def truncate(self, path: str, size: int) -> None:
        """Cut the file to `size` bytes; durable on return."""
        ...

    def read(self, path: str, start: int | None = 0, length: int | None = None) -> bytes:
        """The file, or `length` bytes from `start`, or its last `length` bytes when `start` is None.

        A range that reaches past the end returns the bytes there are. All bytes come from one state of
        the file, even if the name is replaced meanwhile. Raises `MediaError` if the device cannot read it.
        """
        ...

    def read_into(
        self, path: str, start: int | None, length: int | None, allocate: Callable[[int], memoryview]
    ) -> memoryview:
        """As `read`, into memory from `allocate`, which is asked once for as many bytes as there are."""
        ...

    def stat(self, path: str) -> FileStat:
        """Size and age of a file or directory."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Give the file a new name in one step, replacing a file of that name."""
        ...

    def unlink(self, path: str) -> None:
        """Remove a file's name."""
        ...

    def protect(self, path: str) -> bool:
        """Let nobody write the file any more; False where the file system does not keep that.

        It guards against mistakes, so nothing depends on it, and it need not survive a power cut.
        """
        ...

    def make_dirs(self, path: str) -> None:
        """Make sure the directory exists; the ones made here are durable on return."""
        ...

    def remove_dir(self, path: str) -> None:
        """Remove an empty directory; durable after `sync_dir` of the one that holds it."""
        ...

    def sync_dir(self, path: str) -> None:
        """Return when every name in the directory is durable."""
        ...

    def free_bytes(self, path: str) -> int:
        """How much room this user still has on the device that holds `path`."""
        ...

    def list_files(self, path: str) -> list[tuple[str, FileStat]]:
        """Every file below the directory by its `/`-joined path relative to it, sorted; no directories.

        Empty when the directory does not exist. Files that vanish meanwhile are left out, links to
        directories are not followed.
        """
        ...

    def lock(
        self,
        path: str,
        *,
        shared: bool = False,
        wait: bool = True,
        wait_s: float | None = None,
        note: bytes = b"",
    ) -> AbstractContextManager[None]:
        """Hold the lock named by this file, which is created if need be and never removed.

        Excludes other threads and other processes, and ends with the process. With `wait=False` a held
        lock raises `LockHeld` at once, with `wait_s` after so many seconds. The error names the holder where
        it can be found. `note` is left in the file and ends with the holder's process id.
        """
        ...


def explain(error: OSError, path: str, doing: str) -> PenstockError:
    """The error to raise for a failed system call: what happened to which path, and what to do."""
    explained = _explanation(error, path, doing)
    explained.path = path
    return explained


def _explanation(error: OSError, path: str, doing: str) -> PenstockError:
    reason = os.strerror(error.errno) if error.errno is not None else str(error)
    text = f"cannot {doing} {path}: {reason}"
    if error.errno in _FULL:
        return StorageFull(f"{text}; free space on that device, then try again")
    if error.errno == errno.ENOENT:
        return NotFound(f"{text}; check the path")
    if error.errno in _DENIED:
        return PermissionDenied(f"{text}; give this user access to it or choose another directory")
    if error.errno == errno.EEXIST:
        return Conflict(f"{text}; somebody else made it first")
    if error.errno == errno.EXDEV:
        return Unsupported(f"{text}; keep the whole directory on one device")
    if error.errno in _SHAPE:
        return InvalidInput(
            f"{text}; a file cannot stand where a directory does, and names have a maximum length"
        )
    return Unavailable(f"{text}; check the device, then try again")


def stage(fs: FileSystem, path: str, buffers: Iterable[Buffer]) -> None:
    """Write a new file and make its bytes durable. On failure the file is removed again.

    The buffers are written as they come, so an iterable that builds them needs the memory of a few only.
    """
    file = fs.create(path)
    try:
        try:
            for group in _grouped(buffers):
                file.write(group)
            file.datasync()
        finally:
            file.close()
    except Exception:
        with contextlib.suppress(PenstockError):
            fs.unlink(path)
        raise


def _grouped(buffers: Iterable[Buffer]) -> Iterator[list[Buffer]]:
    """Small neighbours together, one call for many; large ones at once, while they are still in the cache."""
    group: list[Buffer] = []
    size = 0
    for buffer in buffers:
        group.append(buffer)
        size += memoryview(buffer).nbytes
        if size >= _WRITE_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def publish(fs: FileSystem, staged: str, target: str) -> None:
    """Move a staged file to its name, replacing what is there, and make the name durable.

    Raises `OutcomeUnknown` once the new name may be visible without being known to be durable; any other
    error means that `target` is untouched.
    """
    try:
        fs.rename(staged, target)
    except StorageFull:
        raise
    except Unavailable as error:
        raise OutcomeUnknown(f"cannot tell whether {target} was replaced: {error}") from error
    try:
        fs.sync_dir(os.path.dirname(target))
    except PenstockError as error:
        raise OutcomeUnknown(f"{target} was replaced but a power cut could still undo it: {error}") from error


class _OsFile:
    """A file being written through its descriptor."""

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
    """A file written in place. The calls are kept short: each one is on the way of an acknowledgement."""

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
    """An open file that is closed when nobody needs it any more, as a map of it would be."""

    __slots__ = ("fd", "path")

    def __init__(self, fd: int, path: str) -> None:
        self.fd = fd
        self.path = path

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.fd)

    def read(self, start: int, length: int) -> bytes:
        """So many bytes from `start` on, fewer at the end of the file."""
        try:
            data = os.pread(self.fd, length, start)
        except OSError:
            data = b""  # once more, with the error explained
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
    """The machine's own file system."""

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
                begin, wanted = _range(fd, start, length)
                memory = allocate(wanted)
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
    """One system call where it can be: what is too many for it is joined, what falls short is continued."""
    if len(buffers) > _IOV_MAX:
        buffers = [b"".join(buffers)]
    wanted = sum(map(len, buffers))
    if offset + wanted > size:
        raise InvalidInput(f"{wanted} bytes at {offset} reach past the end of a file of {size}")
    written = os.pwritev(fd, buffers, offset, flags)
    if written != wanted:
        rest = memoryview(b"".join(buffers))
        while written < len(rest):
            written += os.pwritev(fd, [rest[written:]], offset + written, flags)


def _is_reserved(fd: int, size: int) -> bool:
    """Take the room for so many bytes; False where the file system cannot."""
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
        # Piece by piece, so that somebody else's sync on the same device does not wait for all of it.
        os.fdatasync(fd)


def _cut_to(fd: int, path: str, size: int) -> None:
    there = _size(fd)
    if there < size:
        raise Corrupt(
            f"{path} has {there} bytes where at least {size} were written; keep it and restore a copy"
        )
    if there > size:
        os.ftruncate(fd, size)
    os.lseek(fd, size, os.SEEK_SET)


def _size(fd: int) -> int:
    info = os.fstat(fd)
    if stat_bits.S_ISDIR(info.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    return info.st_size


def _range(fd: int, start: int | None, length: int | None) -> tuple[int, int]:
    """Where a read begins and how many bytes there are for it now."""
    size = _size(fd)
    if start is None:
        start = max(0, size - (size if length is None else length))
    return start, max(0, size - start) if length is None else max(0, min(length, size - start))


def _pread(fd: int, path: str, wanted: int, start: int) -> bytes:
    return _tried(path, start, wanted, lambda: os.pread(fd, wanted, start))


def _preadv(fd: int, path: str, memory: memoryview, start: int) -> int:
    return _tried(path, start, len(memory), lambda: os.preadv(fd, [memory], start))


def _tried(path: str, start: int, wanted: int, read: Callable[[], _T]) -> _T:
    """What `read` returns. Raises `MediaError` if the device fails twice: one failure may pass."""
    for tries_left in reversed(range(_READ_TRIES)):
        try:
            return read()
        except OSError as error:
            if error.errno not in _MEDIA:
                raise
            if not tries_left:
                raise MediaError(path, start, wanted, os.strerror(error.errno)) from error
    raise AssertionError("unreachable")


def _fill(fd: int, path: str, start: int, memory: memoryview) -> int:
    """Read until the memory is full or the file ends; returns how far that was."""
    filled = 0
    while filled < len(memory):
        count = _preadv(fd, path, memory[filled:], start + filled)
        if count == 0:
            break
        filled += count
    return filled


def _read_range(fd: int, path: str, start: int | None, length: int | None) -> bytes:
    start, wanted = _range(fd, start, length)
    parts: list[bytes] = []
    while wanted > 0:
        part = _pread(fd, path, wanted, start)
        if not part:
            break
        parts.append(part)
        start += len(part)
        wanted -= len(part)
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
    made = True
    try:
        data_modes().new_directory(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None
        made = False
    try:
        # Also when somebody else made it a moment ago: they may not have synced it yet.
        _sync_dir(parent)
    except OSError:
        if made:
            # Left in place, the next call would take it for durable.
            with contextlib.suppress(OSError):
                os.rmdir(path)
        raise


def _sync_dir(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        # A file system that keeps its names in memory only, such as an automounter's, has nothing to sync.
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
