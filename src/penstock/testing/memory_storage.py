"""A storage in memory with simulated crashes and faults. It implements `coordinator.storage`.

    disk = MemoryDisk(merge=add)
    storage = disk.open()
    storage.fail_at(3, StorageFault.LOST)       # the third call is applied, but raises
    ...
    again = disk.open()                         # the state after a crash

Flushed batches survive a crash. The test decides how many unflushed batches survive too.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.coordinator import KEY_BYTES_MAX, KeyValue, Merge, MergeOperator, Operation, Put
from penstock.errors import Fenced, InvalidInput, OutcomeUnknown, Unavailable

__all__ = ["MemoryDisk", "MemorySnapshot", "MemoryStorage", "StorageFault"]

_PAGE = 100


class StorageFault(StrEnum):
    """The fault of a call."""

    FAILED = "failed"
    """Not applied, with an error that does not show it."""
    LOST = "lost"
    """Applied, but the response is lost."""


class _Entry(NamedTuple):
    value: bytes
    expire_at_ms: int | None


class MemoryDisk:
    """The data that outlives its writers. Unflushed batches are lost when the next writer opens it."""

    def __init__(self, *, merge: MergeOperator | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        self.merge = merge
        self.clock = clock
        self.persisted: dict[bytes, _Entry] = {}
        self.unflushed: list[tuple[Operation, ...]] = []
        self.owner = 0

    def open(self, *, kept: int = 0) -> MemoryStorage:
        """Take over the disk, and fence its previous writer.

        The first `kept` unflushed batches survive too.
        """
        for batch in self.unflushed[:kept]:
            self.persisted = self.after(self.persisted, batch)
        self.unflushed = []
        self.owner += 1
        return MemoryStorage(self, self.owner)

    def after(self, entries: dict[bytes, _Entry], batch: Sequence[Operation]) -> dict[bytes, _Entry]:
        """Return `entries` with `batch` applied, as a new mapping."""
        changed = dict(entries)
        for operation in batch:
            if isinstance(operation, Put):
                changed[operation.key] = _Entry(operation.value, operation.expire_at_ms)
            elif isinstance(operation, Merge):
                changed[operation.key] = self._merged(changed.get(operation.key), operation)
            else:
                changed.pop(operation.key, None)
        return changed

    def _merged(self, entry: _Entry | None, merge: Merge) -> _Entry:
        if self.merge is None:
            raise InvalidInput("a merge needs a storage with a merge operator")
        if entry is None or self.expired(entry):
            return _Entry(merge.operand, merge.expire_at_ms)
        return _Entry(self.merge(merge.key, (entry.value, merge.operand)), merge.expire_at_ms)

    def expired(self, entry: _Entry) -> bool:
        return entry.expire_at_ms is not None and entry.expire_at_ms <= self.clock.now_ms()


class MemorySnapshot:
    """A snapshot: the entries of one instant."""

    def __init__(self, disk: MemoryDisk, entries: dict[bytes, _Entry]) -> None:
        self._disk = disk
        self._entries = entries
        self._sorted: list[bytes] | None = None

    async def get(self, key: bytes) -> bytes | None:
        entry = self._entries.get(key)
        return None if entry is None or self._disk.expired(entry) else entry.value

    async def scan(
        self, prefix: bytes, *, start: bytes = b"", stop: bytes | None = None
    ) -> AsyncIterator[list[KeyValue]]:
        page: list[KeyValue] = []
        for pair in self._within(prefix, prefix + start, None if stop is None else prefix + stop):
            page.append(pair)
            if len(page) == _PAGE:
                yield page
                page = []
        if page:
            yield page

    def _within(self, prefix: bytes, start: bytes, stop: bytes | None) -> Iterator[KeyValue]:
        if self._sorted is None:
            self._sorted = sorted(self._entries)
        for key in self._sorted[bisect_left(self._sorted, start) :]:
            if not key.startswith(prefix) or (stop is not None and key >= stop):
                return
            entry = self._entries[key]
            if not self._disk.expired(entry):
                yield KeyValue(key, entry.value)


class MemoryStorage:
    """A writer's handle on a `MemoryDisk`. Calls of `apply`, `snapshot` and `flush` are numbered from 1."""

    def __init__(self, disk: MemoryDisk, token: int) -> None:
        self._disk = disk
        self._token = token
        self.seen = MemorySnapshot(disk, disk.persisted)
        """The newest state, without a numbered call."""
        self._entries = disk.persisted
        self._faults: dict[int, tuple[StorageFault, Exception | None]] = {}
        self._error: Exception | None = None
        self._gates: dict[str, asyncio.Event] = {}
        self.calls: list[str] = []
        self.closed = False

    def fail_at(self, call: int, fault: StorageFault, error: Exception | None = None) -> None:
        """Fail the call with this number, with `error` or else `OutcomeUnknown`."""
        self._faults[call] = fault, error

    def gate(self, call: str) -> asyncio.Event:
        """Hold every `apply`, `snapshot` or `flush` at its start until the returned event is set."""
        return self._gates.setdefault(call, asyncio.Event())

    async def get(self, key: bytes) -> bytes | None:
        self._check()
        return await self.seen.get(key)

    def scan(
        self, prefix: bytes, *, start: bytes = b"", stop: bytes | None = None
    ) -> AsyncIterator[list[KeyValue]]:
        self._check()
        return self.seen.scan(prefix, start=start, stop=stop)

    async def apply(self, operations: Iterable[Operation]) -> None:
        operations = tuple(operations)
        if not operations:
            return
        _check_keys(operations)
        fault = await self._begin("apply")
        changed = self._disk.after(self._entries, operations)
        if fault is not StorageFault.FAILED:
            self._entries = changed
            self.seen = MemorySnapshot(self._disk, changed)
            self._disk.unflushed.append(operations)
        self._end(fault)

    async def snapshot(self) -> MemorySnapshot:
        self._end(await self._begin("snapshot"))
        return self.seen

    async def flush(self) -> None:
        upto = self._entries, len(self._disk.unflushed)
        fault = await self._begin("flush")
        if fault is not StorageFault.FAILED:
            self._disk.persisted = upto[0]
            del self._disk.unflushed[: upto[1]]
        self._end(fault)

    async def close(self) -> None:
        self.closed = True

    async def _begin(self, call: str) -> StorageFault | None:
        self.calls.append(call)
        number = len(self.calls)
        gate = self._gates.get(call)
        await (asyncio.sleep(0) if gate is None else gate.wait())
        self._check()
        fault, self._error = self._faults.get(number, (None, None))
        return fault

    def _end(self, fault: StorageFault | None) -> None:
        if fault is not None:
            raise self._error or OutcomeUnknown(f"call {len(self.calls)} {fault.value}")

    def _check(self) -> None:
        if self._disk.owner != self._token:
            raise Fenced("a newer writer has opened the storage")
        if self.closed:
            raise Unavailable("the storage is closed")


def _check_keys(operations: Sequence[Operation]) -> None:
    for operation in operations:
        if not 0 < len(operation.key) <= KEY_BYTES_MAX:
            raise InvalidInput(f"a key has 1 to {KEY_BYTES_MAX} bytes, not {len(operation.key)}")
