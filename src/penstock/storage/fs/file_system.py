"""The interface of the file system: the few calls that durable code needs, with errors that say what to do.

What is durable when:

- a file's bytes, once `datasync` on its handle has returned;
- a name (created, renamed or removed), once `sync_dir` on the directory that holds it has returned; until
  then a file that was renamed within its directory is found under its old name, its new one, or both;
- the bytes of one `write_durably_at`, once it has returned: those bytes alone, not what was written before.

A failed `datasync` or `sync_dir` is never repeated on the same handle: the kernel reports a lost page once
and then forgets it, so a second call would succeed over missing bytes. The caller gets the error and has to
write the file again.

`stage` and `publish` are the only way to replace a whole file: readers see the old bytes or the new ones,
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
"""The most unreadable ranges of a file that are kept apart; more of them are joined into one."""
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
        """Append every byte of `buffers`, in order. After a failure the file's tail is undefined."""
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
        """Write every byte of `buffers`, in order, from `offset` on.

        After a failure that range is undefined.
        """
        ...

    def write_durably_at(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Write as `write_at`, and return when these bytes are durable; earlier writes may still not be.

        After a failure that range is undefined, and what it holds may become durable or not.
        """
        ...

    def datasync(self) -> None:
        """Make every byte written so far durable. After a failure never call it again."""
        ...

    def close(self) -> None:
        """Release the handle, which makes nothing durable. May be called twice."""
        ...


class FileView:
    """A file with the size that it had when it was opened, read in pieces; it outlives the name.

    `view[start:stop]` is a copy of these bytes, read now, so later writes in place are seen. Within
    `len(view)` it always has the requested length: bytes that the device cannot read, or that were cut off
    meanwhile, are zeros, and are added to `bad`. So a reader has to verify a checksum.

    It holds a descriptor, so keep few of them. Safe to share between threads.
    """

    __slots__ = ("_read", "_size", "bad", "path")

    def __init__(self, path: str, size: int, read: Callable[[int, int], bytes]) -> None:
        """Create a view over `read`, which returns the bytes from an offset on and raises `MediaError`."""
        self.path = path
        self._size = size
        self._read = read
        self.bad: list[tuple[int, int]] = []
        """The first byte and the end of every range that could not be read so far, in order."""

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> memoryview:
        start, stop, _ = part.indices(self._size)
        return memoryview(self.read(start, stop))

    def read(self, start: int, stop: int) -> bytes:
        """Read the bytes `start` to `stop - 1`; those that cannot be read are zeros."""
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
        """Read as above, but raise `MediaError` unless every byte can be read."""
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
        """Read what can be read, with zeros for each unreadable page."""
        parts: list[bytes] = []
        while start < stop:
            data = self._beginning(start, stop)
            if not data:
                break
            parts.append(data)
            start += len(data)
        return b"".join(parts)

    def _beginning(self, start: int, stop: int) -> bytes:
        """Read as much from `start` on as possible, else zeros for one page; nothing at the end of the
        file."""
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
        """Create an empty file. Raises `Conflict` if the name is taken."""
        ...

    def allocate(self, path: str, size: int, *, reserve_only: bool = False) -> None:
        """Create a file of `size` zero bytes which are written and durable, so that overwriting them in place
        neither needs space nor changes the metadata of the file.

        Raises `Conflict` if the name is taken; after any other failure the file does not exist. With
        `reserve_only` the space is allocated and the bytes are zero, but they need not be written: that costs
        nothing now, and a little with the first sync of each part that is written.
        """
        ...

    def open_log(self, path: str) -> LogFile:
        """Open an existing file to write in place within its size."""
        ...

    def open_append(self, path: str, size: int) -> WritableFile:
        """Continue an existing file at `size`; later bytes are cut off first.

        Raises `Corrupt` if the file is shorter. The cut is durable after the handle's next `datasync`.
        """
        ...

    def map(self, path: str) -> memoryview:
        """Map the whole file read-only with its current size; the view outlives the name.

        Later writes through a `LogFile` are seen in it. It may hold a descriptor, so keep few of them.

        Reading a part that was cut off meanwhile, or that the device cannot read, ends the process: it is
        used only if a setting demands it. Use `open_view` otherwise.
        """
        ...

    def open_view(self, path: str) -> FileView:
        """Open the file for reading in pieces."""
        ...

    def truncate(self, path: str, size: int) -> None:
        """Cut the file to `size` bytes; durable on return."""
        ...

    def read(self, path: str, start: int | None = 0, length: int | None = None) -> bytes:
        """Read the file, or `length` bytes from `start`, or its last `length` bytes when `start` is None.

        A range beyond the end returns the existing bytes. All bytes come from one state of the file, even if
        the name is replaced meanwhile. Raises `MediaError` if the device cannot read it.
        """
        ...

    def read_into(
        self, path: str, start: int | None, length: int | None, allocate: Callable[[int], memoryview]
    ) -> memoryview:
        """Read as `read`, into memory from `allocate`, which is called once with the number of bytes."""
        ...

    def stat(self, path: str) -> FileStat:
        """Return size and age of a file or directory."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Rename the file atomically, replacing a file of that name."""
        ...

    def unlink(self, path: str) -> None:
        """Remove a file's name."""
        ...

    def protect(self, path: str) -> bool:
        """Make the file read-only; returns False if the file system does not support that.

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
        """Make every name in the directory durable."""
        ...

    def free_bytes(self, path: str) -> int:
        """Return the space that this user has left on the device of `path`."""
        ...

    def list_files(self, path: str) -> list[tuple[str, FileStat]]:
        """List every file below the directory by its `/`-joined relative path, sorted; no directories.

        Empty if the directory does not exist. Files that vanish meanwhile are left out, links to directories
        are not followed.
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
        lock raises `LockHeld` immediately, with `wait_s` after that many seconds. The error names the
        holder if it can be found. `note` is left in the file and ends with the holder's process id.
        """
        ...


def explain(error: OSError, path: str, doing: str) -> PenstockError:
    """Return the error to raise for a failed system call: the operation, the path, and what to do."""
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
    """Join small neighbours into one call; pass large buffers on immediately, while they are in the cache."""
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


def write_durably(fs: FileSystem, path: str, buffers: Sequence[Buffer], *, staging: str) -> None:
    """Replace the file at `path`; on return the new bytes survive a power cut.

    `staging` is an existing directory on the same device. Raises `OutcomeUnknown` if the new file is in
    place but may not be durable; after any other error the old file is untouched.
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
