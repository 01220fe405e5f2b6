"""The storage of a database: an ordered map of bytes with atomic batches, merges, snapshots and a sync.

`penstock.coordinator.slate` implements it over SlateDB. `penstock.testing.memory_storage` implements it in
memory, with injected faults. Both satisfy the contract in `penstock.testing.storage_kit`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, TypeAlias

KEY_BYTES_MAX: Final = 65_535
"""Maximum length of a key; the minimum is 1 byte. Check keys built from user input before accepting a
write."""


class KeyValue(NamedTuple):
    """One entry, as a scan yields it."""

    key: bytes
    value: bytes


@dataclass(frozen=True, slots=True)
class Put:
    """Store `value` under `key`. It may disappear at any time from `expire_at_ms` (Unix time)."""

    key: bytes
    value: bytes
    expire_at_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Merge:
    """Merge `operand` into the value of `key` with the storage's merge operator."""

    key: bytes
    operand: bytes
    expire_at_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete `key`. A missing key is not an error."""

    key: bytes


Operation: TypeAlias = Put | Merge | Delete

MergeOperator: TypeAlias = Callable[[bytes, Sequence[bytes]], bytes]
"""Function of a key and at least two operands, oldest first. A value put before the merges is the oldest one.

It must be associative, because operands are merged in groups: `f([f([a, b]), c]) == f([a, f([b, c])])`. A
single operand without a previous value becomes the value. The function may be called from any thread and must
not raise.
"""


class StorageRead(Protocol):
    """Reads of one state of the storage. The storage itself reads its newest state.

    Each call reads the state at its start.
    """

    async def get(self, key: bytes) -> bytes | None:
        """Return the value with all merges applied, or None. Raises `Fenced`, `Unavailable`, `Corrupt`.

        A storage that has stopped permanently raises `OutcomeUnknown` from every call: open it again. The
        last applied batches may or may not be stored.
        """
        ...

    def scan(
        self, prefix: bytes, *, start: bytes = b"", stop: bytes | None = None
    ) -> AsyncIterator[list[KeyValue]]:
        """Yield every entry whose key begins with `prefix`, in key order, in non-empty pages.

        `start` and `stop` limit the scan to keys from `prefix + start` up to, but not including, `prefix +
        stop`. Raises the same errors as `get`.
        """
        ...


class Storage(StorageRead, Protocol):
    """The single writer's handle.

    After a newer writer fences it, every call but `close` may raise `Fenced`.
    """

    async def apply(self, operations: Iterable[Operation]) -> None:
        """Apply all operations in order, or none of them.

        For a large batch, pass a generator: it saves memory and the pause of creating and freeing all
        operations together. Readers see the batch when this returns. An empty batch does nothing. Until
        `flush` has returned, a crash may undo the batch. Raises `InvalidInput` (nothing was applied),
        `OutcomeUnknown`, `Fenced`.
        """
        ...

    async def snapshot(self) -> StorageRead:
        """Return the current state, which later batches do not change.

        It is released with its last reference.
        """
        ...

    async def flush(self) -> None:
        """Return when every batch applied before the call is persisted. Raises `Fenced`, `OutcomeUnknown`.

        Never returns normally for a batch of a writer that has since been fenced.
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
