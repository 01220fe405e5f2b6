"""The storage of a database: an ordered map of bytes with atomic batches, merges, snapshots and a sync.

`penstock.coordinator.slate` implements it over SlateDB, `penstock.testing.memory_storage` in memory, with
faults. Both keep the contract in `penstock.testing.storage_kit`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, TypeAlias

KEY_BYTES_MAX: Final = 65_535
"""Keys have 1 byte to this many. Check keys made of user input before accepting a write."""


class KeyValue(NamedTuple):
    """One entry, as a scan yields it."""

    key: bytes
    value: bytes


@dataclass(frozen=True, slots=True)
class Put:
    """Store `value` under `key`. From `expire_at_ms` (Unix time) on it may be gone."""

    key: bytes
    value: bytes
    expire_at_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Merge:
    """Merge `operand` into the value of `key`, by the storage's merge operator."""

    key: bytes
    operand: bytes
    expire_at_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete `key`. A missing key is no error."""

    key: bytes


Operation: TypeAlias = Put | Merge | Delete

MergeOperator: TypeAlias = Callable[[bytes, Sequence[bytes]], bytes]
"""`(key, operands)`, at least two of them, oldest first; a value put before the merges counts as the oldest.

It must be associative, because operands are merged in groups: `f([f([a, b]), c]) == f([a, f([b, c])])`. A
single operand without a value before it is the value. It may be called from any thread, and must not raise.
"""


class StorageRead(Protocol):
    """One state of the storage; for the storage itself, the newest one.

    Each call reads the state at its start.
    """

    async def get(self, key: bytes) -> bytes | None:
        """Return the value with all merges applied, or None. Raises `Fenced`, `Unavailable`, `Corrupt`.

        A storage that has stopped for good raises `OutcomeUnknown` from every call: open it again. The last
        applied batches may be stored or not.
        """
        ...

    def scan(
        self, prefix: bytes, *, start: bytes = b"", stop: bytes | None = None
    ) -> AsyncIterator[list[KeyValue]]:
        """Yield every entry whose key begins with `prefix`, in key order, in non-empty pages.

        `start` and `stop` narrow it to the keys from `prefix + start` on and before `prefix + stop`. Raises
        as `get` does.
        """
        ...


class Storage(StorageRead, Protocol):
    """The single writer's handle.

    After a newer writer fences it, every call but `close` may raise `Fenced`.
    """

    async def apply(self, operations: Iterable[Operation]) -> None:
        """Apply all operations in order, or none.

        Pass a generator for a large batch: it saves memory and the pause of making and freeing all operations
        together. Readers see the batch when this returns; an empty batch does nothing. A crash may undo the
        batch until `flush` has returned. Raises `InvalidInput` (nothing was applied), `OutcomeUnknown`,
        `Fenced`.
        """
        ...

    async def snapshot(self) -> StorageRead:
        """Return the current state, which later batches do not change.

        It is released with its last reference.
        """
        ...

    async def flush(self) -> None:
        """Return when every batch applied before the call is persisted. Raises `Fenced`, `OutcomeUnknown`.

        Does not return for a batch of a writer that was fenced meanwhile.
        """
        ...

    async def close(self) -> None:
        """Release the storage, fenced or not. May be called again. Call it before the process ends."""
        ...


async def pairs(pages: AsyncIterator[list[KeyValue]]) -> AsyncIterator[KeyValue]:
    """Yield the entries of a scan one by one."""
    async for page in pages:
        for pair in page:
            yield pair
