"""Flusher of deltas. A batch has vectors, ids, posting lists, metadata index, deletions and position."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from pyroaring import BitMap64

from penstock.coordinator import Delete, Flusher, Merge, Operation, Position, Put, Storage, StorageRead
from penstock.errors import OutcomeUnknown
from penstock.objects import Workers
from penstock.vector.codec import (
    encode_block,
    encode_centroid,
    encode_id,
    encode_ids,
    encode_metadata,
    encode_posting,
    encode_vector,
    normal,
)
from penstock.vector.delta import TOMBSTONE, VectorDelta
from penstock.vector.index import Index, IndexState
from penstock.vector.inverted_lists import MERGES_MAX, Changes
from penstock.vector.keys import (
    RecordType,
    centroid_key,
    data_key,
    dictionary_key,
    metadata_key,
    posting_key,
    record_prefix,
)
from penstock.vector.model import FieldType, Vector
from penstock.vector.rows import NO_LIST, Column, Slots, comparable

_INLINE_MAX: Final = 64
"""Maximum number of entries planned on the loop. More are planned in a thread, so that searches continue."""
_STALE_MAX: Final = 64
_REWRITES_MIN: Final = 8
_REWRITES_SHARE: Final = 16
"""Minimum number, and divisor for the share, of changed lists that a flush rewrites to limit merges."""
_NONE: Final = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state after a flush, for readers: the records, the comparable vectors, and the source's
    position."""

    records: StorageRead
    index: Index
    position: Position | None


class VectorFlusher(Flusher[VectorDelta, Snapshot]):
    """Flusher that stores deltas and keeps the sizes of posting lists within bounds.

    It changes its state before the storage has confirmed the batch, so it refuses to continue after a
    failure.
    """

    def __init__(self, storage: Storage, state: IndexState) -> None:
        self._storage = storage
        self._state = state
        self._is_poisoned = False
        self._deletion_merges = MERGES_MAX  # the number of merges before this start is unknown
        # A dedicated thread: writers wait for flushes, which must not queue after many searches.
        self._thread = Workers("vector-flush", 1)

    async def snapshot(self) -> Snapshot:
        """Return a snapshot of the stored state."""
        return await self._snapshot(await self._thread.run(self._state.index))

    async def _snapshot(self, index: Index) -> Snapshot:
        return Snapshot(await self._storage.snapshot(), index, self._state.position)

    async def flush(self, delta: VectorDelta) -> Snapshot:
        """See `Flusher.flush`."""
        if self._is_poisoned:
            raise OutcomeUnknown("an earlier flush failed: open the collection again")
        self._is_poisoned = True
        if len(delta.entries) <= _INLINE_MAX:
            operations, index = self._prepare(delta)
        else:
            operations, index = await self._thread.run(self._prepare, delta)
        await self._storage.apply(operations)
        self._is_poisoned = False
        return await self._snapshot(index)

    async def sync(self) -> None:
        await self._storage.flush()

    def close(self) -> None:
        """Stop the thread."""
        self._thread.close()

    def _prepare(self, delta: VectorDelta) -> tuple[list[Operation], Index]:
        """Return the operations of a delta, and the index that readers see once they are stored."""
        return self._plan(delta), self._state.index()

    def _plan(self, delta: VectorDelta) -> list[Operation]:
        """Apply the delta to the state in memory, and return the same changes as storage operations."""
        held = self._state
        vectors = [entry for entry in delta.entries.values() if entry is not TOMBSTONE]
        old = [held.slot_of[name] for name in delta.entries if name in held.slot_of]
        gone = np.array(old, np.int64) if old else _NONE
        operations, held.repairs = held.repairs, []
        operations += self._deletions_of_records(delta, gone)
        new = self._take(vectors)
        operations += self._records(vectors, new)
        lists_with_deletes = set(held.rows.home[gone].tolist())
        if len(gone):
            held.rows.die(gone)
        held.partition.place(held.rows, new)
        held.partition.maintain(held.rows, lists_with_deletes)
        changes = held.partition.take_changes()
        operations += self._lists(changes)
        operations += self._metadata(new, gone)
        operations += self._deletions(gone, changes)
        operations += self._blocks()
        if delta.position is not None:
            held.position = delta.position
            operations.append(Put(record_prefix(RecordType.POSITION), delta.position.encode()))
        held.compact()
        return operations

    def _take(self, vectors: list[Vector]) -> Slots:
        """Assign ids and rows to vectors, and return their slots."""
        held = self._state
        if not vectors:
            return _NONE
        first = held.data_ids.take(len(vectors))
        ids = np.arange(first, first + len(vectors), dtype=np.uint64)
        rows = comparable(np.stack([vector.vector for vector in vectors]), held.collection.metric)
        slots = held.rows.append(ids, rows, [vector.id for vector in vectors])
        held.rows.describe(slots, (vector.attributes for vector in vectors))
        held.slot_of.update(zip((vector.id for vector in vectors), slots.tolist(), strict=True))
        return slots

    def _records(self, vectors: list[Vector], slots: Slots) -> Iterator[Operation]:
        kinds = {one.name: one.type for one in self._state.collection.fields}
        for vector, internal_id in zip(vectors, self._state.rows.ids[slots].tolist(), strict=True):
            yield Put(dictionary_key(vector.id), encode_id(internal_id))
            yield Put(data_key(internal_id), encode_vector(_normalised(vector, kinds)))

    def _deletions_of_records(self, delta: VectorDelta, gone: Slots) -> list[Operation]:
        operations: list[Operation] = [Delete(data_key(one)) for one in self._state.rows.ids[gone].tolist()]
        for name, entry in delta.entries.items():
            was_lost, lost_id = name in self._state.lost, self._state.lost.pop(name, None)
            if lost_id is not None:
                operations.append(Delete(data_key(lost_id)))
            if entry is TOMBSTONE and (self._state.slot_of.pop(name, None) is not None or was_lost):
                operations.append(Delete(dictionary_key(name)))
        return operations

    def _lists(self, changes: Changes) -> Iterator[Operation]:
        rows, lists = self._state.rows, self._state.partition.lists
        for centroid_id in changes.removed:
            yield Delete(posting_key(centroid_id))
            yield Delete(centroid_key(centroid_id))
        overdue = self._overdue(changes)
        for centroid_id in sorted(changes.touched):
            one = lists[centroid_id]
            if centroid_id in changes.written or centroid_id in overdue:
                one.merges = one.removed = 0
                yield Put(centroid_key(centroid_id), encode_centroid(one.centroid))
                yield Put(
                    posting_key(centroid_id), encode_posting(rows.ids[one.slots], rows.matrix[one.slots])
                )
            else:
                # A row may move more than once while lists are maintained. Only its final list matters.
                added = _joined(changes.added.get(centroid_id, ()))
                left = _joined(changes.left.get(centroid_id, ()))
                added = added[rows.home[added] == centroid_id]
                left = left[rows.home[left] != centroid_id]
                if len(added) or len(left):
                    one.merges += 1
                    one.removed += len(left)
                    operand = encode_posting(rows.ids[added], rows.matrix[added], rows.ids[left])
                    yield Merge(posting_key(centroid_id), operand)

    def _overdue(self, changes: Changes) -> set[int]:
        """Return the worst of the changed lists whose records have too many merges or removed rows."""
        lists = self._state.partition.lists
        due = [
            one
            for one in changes.touched
            if lists[one].merges >= MERGES_MAX or lists[one].removed > len(lists[one].slots) + _STALE_MAX
        ]
        due.sort(key=lambda one: (lists[one].merges + lists[one].removed, one), reverse=True)
        return set(due[: max(_REWRITES_MIN, len(changes.touched) // _REWRITES_SHARE)])

    def _metadata(self, new: Slots, gone: Slots) -> Iterator[Operation]:
        ids = self._state.rows.ids
        for name, column in self._state.rows.columns.items():
            included, excluded = (_by_code(column, slots) for slots in (new, gone))
            rewrites_left = _REWRITES_MIN
            for code in sorted(included.keys() | excluded.keys()):
                key = metadata_key(name, column.values[code])
                overdue = rewrites_left > 0 and column.merges[code] >= MERGES_MAX
                if not column.live[code]:
                    column.stale[code] = column.merges[code] = 0
                    yield Delete(key)
                elif overdue or column.stale[code] > column.live[code] + _STALE_MAX:
                    rewrites_left -= overdue
                    column.stale[code] = column.merges[code] = 0
                    yield Put(key, encode_metadata(ids[self._having(column, code)].tolist()))
                else:
                    column.merges[code] += 1
                    more, less = included.get(code, _NONE), excluded.get(code, _NONE)
                    yield Merge(key, encode_metadata(ids[more].tolist(), ids[less].tolist()))

    def _having(self, column: Column, code: int) -> Slots:
        """Return the live rows with this value."""
        count = self._state.rows.count
        return np.flatnonzero((column.codes[:count] == code) & self._state.rows.alive[:count])

    def _deletions(self, gone: Slots, changes: Changes) -> Iterator[Operation]:
        """Store the dead ids that are still in a list. Drop them once no list contains them."""
        held = self._state
        newly = held.rows.ids[gone[held.rows.home[gone] != NO_LIST]].tolist()
        forgotten = BitMap64(held.rows.ids[_joined(changes.forgotten)].tolist())
        was_noted = held.dead.intersect(forgotten)
        held.dead = (held.dead | BitMap64(newly)) - forgotten
        key = record_prefix(RecordType.DELETIONS)
        if was_noted or (newly and self._deletion_merges >= MERGES_MAX):
            self._deletion_merges = 0
            yield Put(key, encode_ids(held.dead))
        elif newly:
            self._deletion_merges += 1
            yield Merge(key, encode_ids(newly))

    def _blocks(self) -> Iterator[Operation]:
        for kind, blocks in (
            (RecordType.BLOCK, self._state.data_ids),
            (RecordType.CENTROID_BLOCK, self._state.centroid_ids),
        ):
            block = blocks.take_block()
            if block is not None:
                yield Put(record_prefix(kind), encode_block(*block))


def _normalised(vector: Vector, kinds: dict[str, FieldType]) -> Vector:
    """Return the vector with every attribute in the form that its field stores."""
    if FieldType.FLOAT64 not in kinds.values():
        return vector
    attributes = {name: normal(value, kinds.get(name)) for name, value in vector.attributes.items()}
    return Vector(vector.id, vector.vector, attributes)


def _joined(parts: Iterable[Slots]) -> Slots:
    collected = list(parts)
    return np.unique(np.concatenate(collected)) if collected else _NONE


def _by_code(column: Column, slots: Slots) -> dict[int, Slots]:
    """Return the slots of each value, by code."""
    codes = column.codes[slots]
    order = np.argsort(codes, kind="stable")
    found, starts = np.unique(codes[order], return_index=True)
    parts = np.split(slots[order], starts[1:]) if len(found) else []
    return {int(code): part for code, part in zip(found.tolist(), parts, strict=True) if code >= 0}
