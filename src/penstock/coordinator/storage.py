"""What a database stores into: an ordered map of bytes with atomic batches, merges, snapshots and a sync.

`penstock.coordinator.slate` implements it over SlateDB, `penstock.testing.memory_storage` in memory, with
faults. Both keep the contract in `penstock.testing.storage_kit`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, TypeAlias

KEY_BYTES_MAX: Final = 65_535
"""Keys have 1 byte to this many. Who makes keys of what others say has to check it before taking a write."""


class KeyValue(NamedTuple):
    """One entry, as a scan yields it."""

    key: bytes
    value: bytes


@dataclass(frozen=True, slots=True)
class Put:
    """`key` holds `value`, whatever it held before. From `expire_at_ms` (Unix time) on it may be gone."""

    key: bytes
    value: bytes
    expire_at_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Merge:
    """`operand` is merged into what `key` holds, by the storage's merge operator."""

    key: bytes
    operand: bytes
    expire_at_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Delete:
    """`key` holds nothing. To delete a key that is not there is no error."""

    key: bytes


Operation: TypeAlias = Put | Merge | Delete

MergeOperator: TypeAlias = Callable[[bytes, Sequence[bytes]], bytes]
"""`(key, operands)`, at least two of them, oldest first; what was put before the merges counts as the oldest.

It must be associative, because operands are merged in groups: `f([f([a, b]), c]) == f([a, f([b, c])])`. A
single operand without a value before it is the value. It may be called from any thread, and must not raise.
"""


class StorageRead(Protocol):
    """One state of the storage, or for the storage itself the newest one.

    Everything is read as of the call.
    """

    async def get(self, key: bytes) -> bytes | None:
        """The value, with all merges, or None. Raises `Fenced`, `Unavailable`, `Corrupt`.

        A storage that has stopped for good raises `OutcomeUnknown`, whatever is asked of it: it has to be
        opened anew, and what was applied last may be stored or not.
        """
        ...

    def scan(
        self, prefix: bytes, *, start: bytes = b"", stop: bytes | None = None
    ) -> AsyncIterator[list[KeyValue]]:
        """Every entry whose key begins with `prefix`, in the order of the keys, in pages that are not empty.

        `start` and `stop` narrow it to the keys from `prefix + start` on and before `prefix + stop`. Raises
        as `get` does.
        """
        ...


class Storage(StorageRead, Protocol):
    """The one writer's handle. A newer writer fences it: then everything but `close` may raise `Fenced`."""

    async def apply(self, operations: Iterable[Operation]) -> None:
        """Apply all operations in order, or none.

        They may be made while they are taken: a generator spares memory, and the long pause that it takes to
        make, and to free, all of a large batch at once. Readers see it when this returns. No operations do
        nothing. A crash may undo it until `flush`
        has returned. Raises `InvalidInput` (nothing was applied), `OutcomeUnknown`, `Fenced`.
        """
        ...

    async def snapshot(self) -> StorageRead:
        """The state as of now, which later batches do not change. It is given up when nobody holds it."""
        ...

    async def flush(self) -> None:
        """Return when every batch applied before the call is persisted. Raises `Fenced`, `OutcomeUnknown`.

        A batch of a writer that was fenced meanwhile is not acknowledged.
        """
        ...

    async def close(self) -> None:
        """Give the storage back, fenced or not. May be called again. Close it before the process ends."""
        ...


async def pairs(pages: AsyncIterator[list[KeyValue]]) -> AsyncIterator[KeyValue]:
    """The entries of a scan one by one, for those who do not care for pages."""
    async for page in pages:
        for pair in page:
            yield pair
