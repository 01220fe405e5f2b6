"""A disk in memory that can lose power.

`FakeDisk` is a `FileSystem` that keeps what is visible apart from what is durable. Bytes become durable by
`datasync`, names by `sync_dir`. `crash` returns the disk as it may be found after a power cut: what was
durable, and of the rest nothing, everything, or whatever the given random generator picks, with torn file
tails. A fault plan makes one numbered call fail, fall short, or be the last before the power goes.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.fs import Buffer, FileStat, LockHeld, WritableFile, explain

__all__ = ["DiskFault", "FakeDisk", "PlannedFault", "PowerCut", "Survival"]


class PowerCut(BaseException):
    """The power is gone. Not an `Exception`: nothing in the program under test may handle it."""


class DiskFault(enum.Enum):
    """What happens at the chosen call."""

    CRASH_BEFORE = "the power goes before the call"
    CRASH_AFTER = "the power goes after the call"
    FAIL_ONCE = "the call fails"
    FAIL_ALWAYS = "this and every later call fails"
    NO_SPACE = "the device is full, from this call on"
    SHORT_WRITE = "half of the bytes are written, then the call fails"


class Survival(enum.Enum):
    """What becomes of changes that were not yet durable when the power went."""

    NOTHING = "all of them are gone"
    EVERYTHING = "all of them made it"
    RANDOM = "each on its own, and file tails may be torn"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFault:
    """`kind` at the call with this number, counted from 0."""

    call: int
    kind: DiskFault


@dataclass(slots=True, eq=False)
class _File:
    visible: bytearray = field(default_factory=bytearray)
    durable_bytes: int = 0
    modified_ms: int = 0


@dataclass(slots=True, eq=False)
class _Dir:
    visible: dict[str, _Node] = field(default_factory=dict)
    durable: dict[str, _Node] = field(default_factory=dict)


_Node: TypeAlias = _File | _Dir
_GROWING = frozenset({"create", "write", "mkdir", "rename", "datasync", "sync_dir"})


class FakeDisk:
    """A `FileSystem` with a power switch. For one thread: a lock that would have to wait is an error.

    `calls` lists every call so far by name, so that a sweep knows how many there are to fail.
    """

    def __init__(self, *, plan: PlannedFault | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        self._root = _Dir()
        self.plan = plan
        self._clock = clock
        self._off = False
        self._locked: dict[str, int] = {}
        self.calls: list[str] = []

    def crash(self, survival: Survival = Survival.NOTHING, rng: random.Random | None = None) -> FakeDisk:
        """The disk as found after a power cut now; this one does not work any more."""
        self._off = True
        after = FakeDisk(clock=self._clock)
        after._root = _dir_after(self._root, survival, rng or random.Random(0), {})
        return after

    def create(self, path: str) -> WritableFile:
        with self._call("create", path):
            parent, name = self._parent(path)
            if name in parent.visible:
                raise OSError(errno.EEXIST, path)
            file = _File(modified_ms=self._clock.now_ms())
            parent.visible[name] = file
        return _FakeFile(self, path, file)

    def read(self, path: str, start: int | None = 0, length: int | None = None) -> bytes:
        with self._call("read", path):
            data = bytes(self._file(path).visible)
            if start is None:
                return data[max(0, len(data) - (len(data) if length is None else length)) :]
            return data[start:] if length is None else data[start : start + length]

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

    def make_dirs(self, path: str) -> None:
        """Each directory and each sync on the way is a call of its own, as it is on a real disk."""
        parts = [part for part in path.split("/") if part]
        for depth in range(1, len(parts) + 1):
            made, parent = "/" + "/".join(parts[:depth]), "/" + "/".join(parts[: depth - 1])
            if not self._exists_dir(made):
                with self._call("mkdir", made):
                    self._dir(parent).visible[parts[depth - 1]] = _Dir()
                self.sync_dir(parent)

    def sync_dir(self, path: str) -> None:
        with self._call("sync_dir", path):
            directory = self._dir(path)
            directory.durable = dict(directory.visible)

    def list_files(self, path: str) -> list[tuple[str, FileStat]]:
        with self._call("list", path):
            try:
                directory = self._dir(path)
            except OSError:
                return []
            return sorted(_files_below(directory, ""), key=lambda found: found[0])

    @contextlib.contextmanager
    def lock(
        self, path: str, *, shared: bool = False, wait: bool = True, note: bytes = b""
    ) -> Iterator[None]:
        with self._call("lock", path):
            parent, name = self._parent(path)
            file = parent.visible.setdefault(name, _File())
            held = self._locked.get(path, 0)
            if held < 0 or (held > 0 and not shared):
                if wait:
                    raise AssertionError(f"deadlock: {path} is already held")
                raise LockHeld(f"{path} is held by somebody else; wait until they are done")
            if note and isinstance(file, _File):
                file.visible[:] = note
            self._locked[path] = held + 1 if shared else -1
        try:
            yield
        finally:
            self._locked[path] = self._locked[path] - 1 if shared else 0

    @contextlib.contextmanager
    def _call(self, name: str, path: str) -> Iterator[None]:
        """One numbered call: the planned fault strikes before, instead of, or after the body."""
        if self._off:
            raise PowerCut
        number, plan = len(self.calls), self.plan
        self.calls.append(name)
        crash_after = False
        if plan is not None and number >= plan.call:
            crash_after = number == plan.call and plan.kind is DiskFault.CRASH_AFTER
            self._strike(plan, number, name, path)
        try:
            yield
        except OSError as error:
            raise explain(error, path, name) from error
        if crash_after:
            self._off = True
            raise PowerCut

    def _strike(self, plan: PlannedFault, number: int, name: str, path: str) -> None:
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
            file.visible += data[: len(data) // 2] if short else data
            file.modified_ms = self._clock.now_ms()
            if short:
                raise OSError(errno.EIO, path)

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
    """A handle. After a failed datasync the next one lies, as the kernel's does."""

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
                    self._file.durable_bytes = len(self._file.visible)
        except Exception:
            self._poisoned = True
            raise

    def close(self) -> None:
        """Nothing becomes durable by closing."""


def _files_below(directory: _Dir, prefix: str) -> Iterator[tuple[str, FileStat]]:
    for name, node in directory.visible.items():
        if isinstance(node, _Dir):
            yield from _files_below(node, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", FileStat(size=len(node.visible), modified_ms=node.modified_ms)


def _dir_after(before: _Dir, survival: Survival, rng: random.Random, done: dict[int, _Node]) -> _Dir:
    kept: dict[str, _Node] = {}
    for name in sorted(before.durable.keys() | before.visible.keys()):
        old, new = before.durable.get(name), before.visible.get(name)
        node = new if old is new or _survives(survival, rng) else old
        if node is not None:
            kept[name] = _node_after(node, survival, rng, done)
    return _Dir(visible=dict(kept), durable=dict(kept))


def _node_after(node: _Node, survival: Survival, rng: random.Random, done: dict[int, _Node]) -> _Node:
    # Two names may lead to one file: a rename whose old name was not yet durably gone.
    if id(node) not in done:
        done[id(node)] = (
            _dir_after(node, survival, rng, done)
            if isinstance(node, _Dir)
            else _file_after(node, survival, rng)
        )
    return done[id(node)]


def _file_after(before: _File, survival: Survival, rng: random.Random) -> _File:
    data = bytes(before.visible)
    if survival is Survival.NOTHING:
        data = data[: before.durable_bytes]
    elif survival is Survival.RANDOM and len(data) > before.durable_bytes:
        cut = rng.randint(before.durable_bytes, len(data))
        # A torn tail: the length made it, some of the bytes did not.
        data = data[:cut] + bytes(rng.choice((0, len(data) - cut)))
    return _File(visible=bytearray(data), durable_bytes=len(data), modified_ms=before.modified_ms)


def _survives(survival: Survival, rng: random.Random) -> bool:
    return survival is Survival.EVERYTHING or (survival is Survival.RANDOM and rng.random() < 0.5)
