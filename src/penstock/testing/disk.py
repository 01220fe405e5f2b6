"""A disk in memory that can lose power.

`FakeDisk` is a `FileSystem` that separates visible from durable data. Bytes become durable by `datasync`,
names by `sync_dir`. `crash` returns a possible state of the disk after a power failure: the durable data, and
nothing, everything, or a random part of the rest. The random part includes torn tails of files, and torn
sectors of files that were written in place. A fault plan makes one numbered call fail, write only a part of
its data, or be the last one before the power fails.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import Corrupt, InvalidInput, MediaError, PenstockError
from penstock.storage import Buffer, FileStat, FileView, LockHeld, LogFile, WritableFile, explain

__all__ = ["DiskFault", "FakeDisk", "PlannedFault", "PowerCut", "Survival"]


class PowerCut(BaseException):
    """The power has failed. This is not an `Exception`, because the program under test must not handle it."""


class DiskFault(enum.Enum):
    """The fault at the chosen call."""

    CRASH_BEFORE = "the power goes before the call"
    CRASH_AFTER = "the power goes after the call"
    FAIL_ONCE = "the call fails"
    FAIL_ALWAYS = "this and every later call fails"
    NO_SPACE = "the device is full, from this call on"
    SHORT_WRITE = "half of the bytes are written, then the call fails"


class Survival(enum.Enum):
    """Which changes that are not durable survive a power failure."""

    NOTHING = "all of them are gone"
    EVERYTHING = "all of them made it"
    RANDOM = "each on its own, and file tails may be torn"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFault:
    """A fault of `kind` at the call with this number, counted from 0."""

    call: int
    kind: DiskFault


@dataclass(slots=True, eq=False)
class _File:
    """The visible and durable bytes of a file.

    `kept` visible bytes at the start are durable. `pending` are writes in place that are not durable yet.
    `lost` are those that a failed sync has dropped.
    """

    visible: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    kept: int = 0
    pending: list[tuple[int, bytes]] = field(default_factory=list)
    lost: list[tuple[int, bytes]] = field(default_factory=list)
    modified_ms: int = 0

    def cut(self, size: int) -> None:
        # A new array: if the old one is mapped, its size cannot change.
        self.visible = self.visible[:size]
        self.kept = min(self.kept, size)
        self.pending = _without(self.pending, size, sys.maxsize)
        self.lost = _without(self.lost, size, sys.maxsize)

    def grow(self, data: bytes) -> None:
        try:
            self.visible += data
        except BufferError:
            self.visible = self.visible + data

    def sync(self) -> None:
        if len(self.durable) != len(self.visible) or self.kept != len(self.visible):
            self.durable[self.kept :] = self.visible[self.kept :]
            self.kept = len(self.visible)
        for start, data in self.pending:
            self.durable[start : start + len(data)] = data
        self.pending.clear()

    def overwrite(self, offset: int, data: bytes, *, durably: bool = False) -> None:
        self.visible[offset : offset + len(data)] = data
        if durably:
            self.pending = _without(self.pending, offset, offset + len(data))
            self.lost = _without(self.lost, offset, offset + len(data))
            self.durable[offset : offset + len(data)] = data
        else:
            self.pending.append((offset, data))

    def forget(self) -> None:
        """Drop the pending writes after a failed sync, as a kernel does. No later sync writes them."""
        self.lost += self.pending
        self.pending.clear()


@dataclass(slots=True, eq=False)
class _Dir:
    visible: dict[str, _Node] = field(default_factory=dict)
    durable: dict[str, _Node] = field(default_factory=dict)


_Node: TypeAlias = _File | _Dir
_GROWING = frozenset(
    {"create", "allocate", "write", "write_at", "write_durably_at", "mkdir", "rename", "datasync", "sync_dir"}
)
_SECTOR = 512


class FakeDisk:
    """A `FileSystem` whose power can fail. It is for one thread: a lock that would have to wait is an error.

    `calls` lists the names of all calls so far. A sweep takes its length from it. `free` is the result of
    `free_bytes`.
    """

    def __init__(self, *, plan: PlannedFault | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        self._root = _Dir()
        self.plan = plan
        self._clock = clock
        self._off = False
        self._locked: dict[str, int] = {}
        self.calls: list[str] = []
        self.free = 1 << 40
        self._bad: list[tuple[_File, int, int]] = []

    def crash(self, survival: Survival = Survival.NOTHING, rng: random.Random | None = None) -> FakeDisk:
        """Return the disk as found after a power failure at this moment. This object fails afterwards."""
        self._off = True
        after = FakeDisk(clock=self._clock)
        after._root = _dir_after(self._root, survival, rng or random.Random(0), {})
        return after

    def spoil(self, path: str, start: int, end: int) -> None:
        """Make these bytes of the file unreadable under any of its names.

        Reading them raises `MediaError`. Mapping the file raises `AssertionError`, because reading a real
        mapping would end the process.
        """
        self._bad.append((self._file(path), start, end))
        self._bad.sort(key=lambda bad: bad[1])

    def create(self, path: str) -> WritableFile:
        with self._call("create", path):
            parent, name = self._parent(path)
            if name in parent.visible:
                raise OSError(errno.EEXIST, path)
            file = _File(modified_ms=self._clock.now_ms())
            parent.visible[name] = file
        return _FakeFile(self, path, file)

    def allocate(self, path: str, size: int, *, reserve_only: bool = False) -> None:
        with self._call("allocate", path):
            parent, name = self._parent(path)
            if name in parent.visible:
                raise OSError(errno.EEXIST, path)
            file = _File(visible=bytearray(size), modified_ms=self._clock.now_ms())
            file.sync()
            parent.visible[name] = file

    def open_log(self, path: str) -> LogFile:
        with self._call("open_log", path):
            file = self._file(path)
        return _FakeLogFile(self, path, file)

    def open_append(self, path: str, size: int) -> WritableFile:
        with self._call("open_append", path):
            file = self._file(path)
            if len(file.visible) < size:
                raise Corrupt(f"{path} has {len(file.visible)} bytes where at least {size} were written")
            file.cut(size)
        return _FakeFile(self, path, file)

    def map(self, path: str) -> memoryview:
        """Return the bytes without a copy. While a view exists, only writes in place can change the file."""
        with self._call("map", path):
            file = self._file(path)
            if any(bad is file for bad, _, _ in self._bad):
                raise AssertionError(f"SIGBUS: {path} has a bad sector and was mapped")
            return memoryview(file.visible).toreadonly()

    def open_view(self, path: str) -> FileView:
        """Open a view. Reads from it are not numbered calls, so only bad sectors make them fail."""
        with self._call("open_view", path):
            file = self._file(path)
        return FileView(
            path, len(file.visible), lambda start, length: self._range(file, path, start, start + length)
        )

    def truncate(self, path: str, size: int) -> None:
        with self._call("truncate", path):
            file = self._file(path)
            file.cut(size)
            file.sync()

    def read(self, path: str, start: int | None = 0, length: int | None = None) -> bytes:
        with self._call("read", path):
            file = self._file(path)
            size = len(file.visible)
            if start is None:
                start = max(0, size - (size if length is None else length))
            return self._range(file, path, start, size if length is None else start + length)

    def _range(self, file: _File, path: str, start: int, end: int) -> bytes:
        end = min(end, len(file.visible))
        for bad, low, high in self._bad:
            if bad is file and max(start, low) < min(end, high):
                raise MediaError(path, max(start, low), end - max(start, low), os.strerror(errno.EIO))
        return bytes(memoryview(file.visible)[start:end])

    def read_into(
        self, path: str, start: int | None, length: int | None, allocate: Callable[[int], memoryview]
    ) -> memoryview:
        data = self.read(path, start, length)
        memory = allocate(len(data))
        memory[:] = data
        return memory

    def stat(self, path: str) -> FileStat:
        with self._call("stat", path):
            node = self._node(path)
            if isinstance(node, _Dir):
                return FileStat(size=0, modified_ms=0, is_dir=True)
            return FileStat(size=len(node.visible), modified_ms=node.modified_ms)

    def rename(self, source: str, target: str) -> None:
        with self._call("rename", target):
            old_parent, old_name = self._parent(source)
            new_parent, new_name = self._parent(target)
            if old_name not in old_parent.visible:
                raise OSError(errno.ENOENT, source)
            if isinstance(new_parent.visible.get(new_name), _Dir):
                raise OSError(errno.EISDIR, target)
            new_parent.visible[new_name] = old_parent.visible.pop(old_name)

    def unlink(self, path: str) -> None:
        with self._call("unlink", path):
            parent, name = self._parent(path)
            self._file(path)
            del parent.visible[name]

    def protect(self, path: str) -> bool:
        with self._call("protect", path):
            self._file(path)
            return True

    def make_dirs(self, path: str) -> None:
        """Create directories. Each directory and each sync is a numbered call, as on a real disk."""
        parts = [part for part in path.split("/") if part]
        for depth in range(1, len(parts) + 1):
            created, parent = "/" + "/".join(parts[:depth]), "/" + "/".join(parts[: depth - 1])
            if not self._exists_dir(created):
                with self._call("mkdir", created):
                    self._dir(parent).visible[parts[depth - 1]] = _Dir()
                try:
                    self.sync_dir(parent)
                except PenstockError:
                    del self._dir(parent).visible[parts[depth - 1]]
                    raise

    def remove_dir(self, path: str) -> None:
        with self._call("remove_dir", path):
            parent, name = self._parent(path)
            if self._dir(path).visible:
                raise OSError(errno.ENOTEMPTY, path)
            del parent.visible[name]

    def sync_dir(self, path: str) -> None:
        with self._call("sync_dir", path):
            directory = self._dir(path)
            directory.durable = dict(directory.visible)

    def free_bytes(self, path: str) -> int:
        with self._call("free_bytes", path):
            self._node(path)
            return self.free

    def list_files(self, path: str) -> list[tuple[str, FileStat]]:
        with self._call("list", path):
            try:
                directory = self._dir(path)
            except OSError:
                return []
            return sorted(_files_below(directory, ""), key=lambda found: found[0])

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
        with self._call("lock", path):
            parent, name = self._parent(path)
            file = parent.visible.setdefault(name, _File())
            held = self._locked.get(path, 0)
            if held < 0 or (held > 0 and not shared):
                if wait and wait_s is None:
                    raise AssertionError(f"deadlock: {path} is already held")
                raise LockHeld(f"{path} is held by another writer; wait until it is done")
            if note and isinstance(file, _File):
                file.visible[:] = note
            self._locked[path] = held + 1 if shared else -1
        try:
            yield
        finally:
            self._locked[path] = self._locked[path] - 1 if shared else 0

    @contextlib.contextmanager
    def _call(self, name: str, path: str) -> Iterator[None]:
        """Run a numbered call, and inject the planned fault before, instead of, or after the body."""
        if self._off:
            raise PowerCut
        number, plan = len(self.calls), self.plan
        self.calls.append(name)
        crash_after = False
        if plan is not None and number >= plan.call:
            crash_after = number == plan.call and plan.kind is DiskFault.CRASH_AFTER
            self._inject(plan, number, name, path)
        try:
            yield
        except OSError as error:
            raise explain(error, path, name) from error
        if crash_after:
            self._off = True
            raise PowerCut

    def _inject(self, plan: PlannedFault, number: int, name: str, path: str) -> None:
        if plan.kind is DiskFault.CRASH_BEFORE and number == plan.call:
            self._off = True
            raise PowerCut
        if plan.kind is DiskFault.NO_SPACE and name in _GROWING:
            raise explain(OSError(errno.ENOSPC, path), path, name)
        failing = plan.kind is DiskFault.FAIL_ALWAYS or (
            plan.kind is DiskFault.FAIL_ONCE and number == plan.call
        )
        if failing:
            raise explain(OSError(errno.EIO, path), path, name)

    def _write(self, path: str, file: _File, data: bytes) -> None:
        plan, number = self.plan, len(self.calls)
        short = plan is not None and plan.kind is DiskFault.SHORT_WRITE and plan.call == number
        with self._call("write", path):
            file.grow(data[: len(data) // 2] if short else data)
            file.modified_ms = self._clock.now_ms()
            if short:
                raise OSError(errno.EIO, path)

    def _write_at(self, name: str, path: str, file: _File, offset: int, data: bytes) -> None:
        """Write in place. A failed or interrupted write may have changed the file."""
        if offset + len(data) > len(file.visible):
            raise InvalidInput(f"{len(data)} bytes at {offset} reach past the end of {path}")
        plan, number = self.plan, len(self.calls)
        fault = plan.kind if plan is not None and number == plan.call and not self._off else None
        if fault is DiskFault.SHORT_WRITE:
            file.overwrite(offset, data[: len(data) // 2])
        elif fault in (DiskFault.CRASH_BEFORE, DiskFault.FAIL_ONCE, DiskFault.FAIL_ALWAYS):
            file.overwrite(offset, data)
        try:
            with self._call(name, path):
                if fault is DiskFault.SHORT_WRITE:
                    raise OSError(errno.EIO, path)
                file.overwrite(offset, data, durably=name == "write_durably_at")
                file.modified_ms = self._clock.now_ms()
        except Exception:
            if name == "write_durably_at":
                file.forget()
            raise

    def _parent(self, path: str) -> tuple[_Dir, str]:
        return self._dir(os.path.dirname(path)), os.path.basename(path)

    def _node(self, path: str) -> _Node:
        node: _Node = self._root
        for part in path.split("/"):
            if not part:
                continue
            if isinstance(node, _File):
                raise OSError(errno.ENOTDIR, path)
            if part not in node.visible:
                raise OSError(errno.ENOENT, path)
            node = node.visible[part]
        return node

    def _dir(self, path: str) -> _Dir:
        node = self._node(path)
        if isinstance(node, _File):
            raise OSError(errno.ENOTDIR, path)
        return node

    def _file(self, path: str) -> _File:
        node = self._node(path)
        if isinstance(node, _Dir):
            raise OSError(errno.EISDIR, path)
        return node

    def _exists_dir(self, path: str) -> bool:
        try:
            self._dir(path)
        except OSError as error:
            if error.errno == errno.ENOTDIR:
                raise explain(error, path, "mkdir") from error
            return False
        return True


class _FakeFile:
    """A handle. After a failed datasync the next one wrongly succeeds, as with a real kernel."""

    def __init__(self, disk: FakeDisk, path: str, file: _File) -> None:
        self._disk = disk
        self._path = path
        self._file = file
        self._poisoned = False

    def write(self, buffers: Sequence[Buffer]) -> None:
        self._disk._write(self._path, self._file, b"".join(buffers))

    def datasync(self) -> None:
        try:
            with self._disk._call("datasync", self._path):
                if not self._poisoned:
                    self._file.sync()
        except Exception:
            self._poisoned = True
            raise

    def close(self) -> None:
        """Close the handle, which makes nothing durable."""


class _FakeLogFile:
    """A handle for writing in place. Data of a failed datasync is not written by a later one."""

    def __init__(self, disk: FakeDisk, path: str, file: _File) -> None:
        self._disk = disk
        self._path = path
        self._file = file
        self.size = len(file.visible)

    def write_at(self, offset: int, buffers: Sequence[Buffer]) -> None:
        self._disk._write_at("write_at", self._path, self._file, offset, b"".join(buffers))

    def write_durably_at(self, offset: int, buffers: Sequence[Buffer]) -> None:
        self._disk._write_at("write_durably_at", self._path, self._file, offset, b"".join(buffers))

    def datasync(self) -> None:
        try:
            with self._disk._call("datasync", self._path):
                self._file.sync()
        except Exception:
            self._file.forget()
            raise

    def close(self) -> None:
        """Close the handle, which makes nothing durable."""


def _without(writes: list[tuple[int, bytes]], start: int, end: int) -> list[tuple[int, bytes]]:
    """Return the parts of the writes that are outside a range."""
    parts: list[tuple[int, bytes]] = []
    for offset, data in writes:
        parts.append((offset, data[: max(0, start - offset)]))
        parts.append((max(offset, end), data[max(0, end - offset) :]))
    return [(offset, data) for offset, data in parts if data]


def _files_below(directory: _Dir, prefix: str) -> Iterator[tuple[str, FileStat]]:
    for name, node in directory.visible.items():
        if isinstance(node, _Dir):
            yield from _files_below(node, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", FileStat(size=len(node.visible), modified_ms=node.modified_ms)


def _dir_after(before: _Dir, survival: Survival, rng: random.Random, done: dict[int, _Node]) -> _Dir:
    found: dict[str, _Node] = {}
    for name in sorted(before.durable.keys() | before.visible.keys()):
        old, new = before.durable.get(name), before.visible.get(name)
        node = new if old is new or _survives(survival, rng) else old
        if node is not None:
            found[name] = node
    _restore_moved(before, found)
    kept = {name: _node_after(node, survival, rng, done) for name, node in found.items()}
    return _Dir(visible=dict(kept), durable=dict(kept))


def _restore_moved(before: _Dir, found: dict[str, _Node]) -> None:
    """Undo incomplete renames: if the new name did not become durable, the old one still exists."""
    kept = {id(node) for node in found.values()}
    moved = {id(node) for node in before.visible.values()} - kept
    for name, node in before.durable.items():
        if id(node) in moved and name not in found:
            found[name] = node


def _node_after(node: _Node, survival: Survival, rng: random.Random, done: dict[int, _Node]) -> _Node:
    # Two names may refer to one file: a rename whose old name was not durably removed.
    if id(node) not in done:
        done[id(node)] = (
            _dir_after(node, survival, rng, done)
            if isinstance(node, _Dir)
            else _file_after(node, survival, rng)
        )
    return done[id(node)]


def _file_after(before: _File, survival: Survival, rng: random.Random) -> _File:
    if survival is Survival.NOTHING:
        data = before.durable[:]
    elif survival is Survival.EVERYTHING:
        data = before.visible[:]
    elif len(before.durable) != len(before.visible) or before.kept != len(before.visible):
        data = _torn_tail(before, rng)
    else:
        data = _torn_sectors(before, rng)
    return _File(visible=data, durable=data[:], kept=len(data), modified_ms=before.modified_ms)


def _torn_tail(before: _File, rng: random.Random) -> bytearray:
    """Return a possible state of a file after appends and cuts. The cut, length and bytes may be missing."""
    if before.kept < len(before.durable) and not _survives(Survival.RANDOM, rng):
        return before.durable[:]
    size = len(before.visible)
    cut = rng.randint(before.kept, size)
    return before.visible[:cut] + bytes(rng.choice((0, size - cut)))


def _torn_sectors(before: _File, rng: random.Random) -> bytearray:
    """Return a possible state of a file after writes in place: all, none, or some sectors of each write."""
    data = before.durable[:]
    for offset, new in (*before.lost, *before.pending):
        share = rng.choice((0.0, 0.5, 1.0))
        for start in range(offset - offset % _SECTOR, offset + len(new), _SECTOR):
            low, high = max(start, offset), min(start + _SECTOR, offset + len(new))
            if rng.random() < share:
                data[low:high] = new[low - offset : high - offset]
    return data


def _survives(survival: Survival, rng: random.Random) -> bool:
    return survival is Survival.EVERYTHING or (survival is Survival.RANDOM and rng.random() < 0.5)
