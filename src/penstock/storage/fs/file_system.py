"""The interface of the file system: the calls that durable code needs. Its errors say what to do.

Durability:

- The bytes of a file are durable after `datasync` on its handle has returned.
- A name (created, renamed or removed) is durable after `sync_dir` on its directory has returned. Until then a
  file that was renamed within its directory is found under its old name, its new name, or both.
- `write_durably_at` makes only its own bytes durable, not earlier writes.

A failed `datasync` or `sync_dir` is never repeated on the same handle. The kernel reports a lost page only
once, so a second call would succeed although bytes are missing. The caller gets the error and has to write
the file again.

`stage` and `publish` are the only way to replace a whole file. Readers see the old bytes or the new ones,
never a mixture, even after a failure.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from penstock.errors import (
    Conflict,
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

Buffer: TypeAlias = bytes | bytearray | memoryview

_LOGGER = logging.getLogger(__name__)
_WRITE_BYTES = 256 * 1024
_SECTOR = 4096
"""A kernel reads whole pages, so one bad sector makes a page unreadable."""
_BAD_MAX = 1024
"""Limit of the unreadable ranges that are recorded separately for a file. Further ones are joined."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_SHAPE = frozenset({errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.ENAMETOOLONG, errno.ELOOP})


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStat:
    """The result of `stat`."""

    size: int
    modified_ms: int
    is_dir: bool = False


class WritableFile(Protocol):
    """A new file, written from its start to its end by one owner."""

    def write(self, buffers: Sequence[Buffer]) -> None:
        """Append every byte of `buffers`, in order. After a failure the end of the file is undefined."""
        ...

    def datasync(self) -> None:
        """Make every byte written so far durable. After a failure never call it again."""
        ...

    def close(self) -> None:
        """Release the handle, which makes nothing durable. May be called twice."""
        ...


class LogFile(Protocol):
    """A file of fixed size, written in place by one owner. Buffers are bytes or views of bytes."""

    @property
    def size(self) -> int:
        """The size of the file; a write never goes past it."""
        ...

    def write_at(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Write every byte of `buffers`, in order, at `offset`. After a failure that range is undefined."""
        ...

    def write_durably_at(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Write as `write_at`. These bytes are durable on return, but earlier writes may not be.

        After a failure that range is undefined, and its content may become durable or not.
        """
        ...

    def datasync(self) -> None:
        """Make every byte written so far durable. After a failure never call it again."""
        ...

    def close(self) -> None:
        """Release the handle, which makes nothing durable. May be called twice."""
        ...


class FileView:
    """An open file that is read in pieces, with the size that it had when it was opened.

    It stays readable after its name is removed. Each `view[start:stop]` reads the bytes again and returns a
    copy, so it includes later writes in place. Within `len(view)` it always has the requested length. Bytes
    that the device cannot read, or that were cut off after the file was opened, are zeros and are added to
    `bad`. A reader therefore has to verify a checksum.

    A view holds a descriptor, so keep few of them. Threads may share a view.
    """

    __slots__ = ("_read", "_size", "bad", "path")

    def __init__(self, path: str, size: int, read: Callable[[int, int], bytes]) -> None:
        """Create a view over `read(offset, length)`, which may raise `MediaError`."""
        self.path = path
        self._size = size
        self._read = read
        self.bad: list[tuple[int, int]] = []
        """The start and end of every range that could not be read so far, in order."""

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> memoryview:
        start, stop, _ = part.indices(self._size)
        return memoryview(self.read(start, stop))

    def read(self, start: int, stop: int) -> bytes:
        """Read the bytes `start` to `stop - 1`. Unreadable bytes are zeros."""
        length = stop - start
        if length <= 0:
            return b""
        try:
            data = self._read(start, length)
        except MediaError:
            data = self._around(start, stop)
        if len(data) < length:
            end = start + len(data)
            self._record_bad(end, stop, "the file was truncated while it was in use")
            data += bytes(length - len(data))
        return data

    def read_exactly(self, start: int, stop: int) -> bytes:
        """Read the bytes `start` to `stop - 1`. Raise `MediaError` if one of them is unreadable."""
        data = self.read(start, stop)
        for low, high in self.bad:
            if low < stop and start < high:
                raise MediaError(self.path, max(low, start), min(high, stop) - max(low, start), "it is lost")
        return data

    def until(self, size: int) -> FileView:
        """Return a view of the first `size` bytes."""
        part = FileView(self.path, min(size, self._size), self._read)
        part.bad = self.bad
        return part

    def _around(self, start: int, stop: int) -> bytes:
        """Read a range, with zeros for each unreadable page."""
        parts: list[bytes] = []
        while start < stop:
            data = self._beginning(start, stop)
            if not data:
                break
            parts.append(data)
            start += len(data)
        return b"".join(parts)

    def _beginning(self, start: int, stop: int) -> bytes:
        """Read as many bytes from `start` as possible.

        Return zeros for one page if `start` is unreadable, and nothing at the end of the file.
        """
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
                    self._record_bad(start, stop, "the device fails")
                    return bytes(stop - start)

    def _record_bad(self, start: int, end: int, reason: str) -> None:
        if any(low <= start and end <= high for low, high in self.bad):
            return
        _LOGGER.error(
            "%s, bytes %d to %d cannot be read: %s; their content is lost",
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
        """Create an empty file. Raise `Conflict` if the name is taken."""
        ...

    def allocate(self, path: str, size: int, *, reserve_only: bool = False) -> None:
        """Create a file of `size` zero bytes that are written and durable.

        Overwriting them in place neither needs space nor changes the metadata of the file. Raise `Conflict`
        if the name is taken. After any other failure the file does not exist.

        With `reserve_only` the space is allocated and reads as zeros, but the zeros need not be written. That
        costs nothing now, and a little with the first sync of each part that is written later.
        """
        ...

    def open_log(self, path: str) -> LogFile:
        """Open an existing file to write in place within its size."""
        ...

    def open_append(self, path: str, size: int) -> WritableFile:
        """Open an existing file to append at `size`, after cutting off all later bytes.

        Raise `Corrupt` if the file is shorter. The cut is durable after the handle's next `datasync`.
        """
        ...

    def map(self, path: str) -> memoryview:
        """Map the whole file read-only with its current size. The view stays valid after the name is removed.

        The view shows later writes through a `LogFile`. It may hold a descriptor, so keep few of them.

        Reading a part that was cut off, or that the device cannot read, ends the process. A mapping is
        therefore used only if a setting requires it. Use `open_view` otherwise.
        """
        ...

    def open_view(self, path: str) -> FileView:
        """Open the file for reading in pieces."""
        ...

    def truncate(self, path: str, size: int) -> None:
        """Durably cut the file to `size` bytes."""
        ...

    def read(self, path: str, start: int | None = 0, length: int | None = None) -> bytes:
        """Read the file, or `length` bytes from `start`, or its last `length` bytes if `start` is None.

        A range beyond the end returns the existing bytes. All bytes come from one file, even if the name is
        replaced during the read. Raise `MediaError` if the device cannot read it.
        """
        ...

    def read_into(
        self, path: str, start: int | None, length: int | None, allocate: Callable[[int], memoryview]
    ) -> memoryview:
        """Read like `read`, into memory from `allocate`, which is called once with the number of bytes."""
        ...

    def stat(self, path: str) -> FileStat:
        """Return size and modification time of a file or directory."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Rename the file atomically, replacing a file of that name."""
        ...

    def unlink(self, path: str) -> None:
        """Remove a file's name."""
        ...

    def protect(self, path: str) -> bool:
        """Make the file read-only. Return False if the file system does not support that.

        This only guards against mistakes. It need not survive a power failure.
        """
        ...

    def make_dirs(self, path: str) -> None:
        """Create the directory and its parents if they do not exist. They are durable on return."""
        ...

    def remove_dir(self, path: str) -> None:
        """Remove an empty directory. This is durable after `sync_dir` of its parent."""
        ...

    def sync_dir(self, path: str) -> None:
        """Make every name in the directory durable."""
        ...

    def free_bytes(self, path: str) -> int:
        """Return the space that is left for this user on the device of `path`."""
        ...

    def list_files(self, path: str) -> list[tuple[str, FileStat]]:
        """Return the `/`-joined relative paths of all files below the directory, sorted, without directories.

        The list is empty if the directory does not exist. Files that vanish during the call are skipped.
        Links to directories are not followed.
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
        """Hold the lock of this file, which is created if needed and never removed.

        The lock excludes other threads and processes, and ends with the process. If the lock is held, raise
        `LockHeld` immediately with `wait=False`, or after `wait_s` seconds. The error names the holder if
        possible. `note` is written to the file and ends with the holder's process id.
        """
        ...


def explain(error: OSError, path: str, doing: str) -> PenstockError:
    """Return the error for a failed system call. It names the operation, the path, and the remedy."""
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
        return Conflict(f"{text}; another process created it first")
    if error.errno == errno.EXDEV:
        return Unsupported(f"{text}; keep the whole directory on one device")
    if error.errno in _SHAPE:
        return InvalidInput(
            f"{text}; a file cannot have the path of a directory, and names have a maximum length"
        )
    return Unavailable(f"{text}; check the device, then try again")


def stage(fs: FileSystem, path: str, buffers: Iterable[Buffer]) -> None:
    """Write a new file and make its bytes durable. Remove the file after a failure.

    Buffers are written as they are produced, so an iterable that builds them keeps only a few in memory.
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
    """Group small buffers for one call. Yield a large buffer immediately, while it is in the cache."""
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
    """Move a staged file to `target`, replacing any file there, and make the name durable.

    Raise `OutcomeUnknown` if the new name may be visible but is not known to be durable. After any other
    error `target` is untouched.
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
        raise OutcomeUnknown(
            f"{target} was replaced, but a power failure could still undo it: {error}"
        ) from error


def write_durably(fs: FileSystem, path: str, buffers: Sequence[Buffer], *, staging: str) -> None:
    """Replace the file at `path`. On return the new bytes survive a power failure.

    `staging` is an existing directory on the same device. Raise `OutcomeUnknown` if the new file may be in
    place but not durable. After any other error the old file is untouched.
    """
    staged = os.path.join(staging, f"{os.path.basename(path)}.{uuid.uuid4().hex}")
    stage(fs, staged, buffers)
    try:
        publish(fs, staged, path)
    except OutcomeUnknown:
        raise
    except PenstockError:
        with contextlib.suppress(PenstockError):
            fs.unlink(staged)
        raise
