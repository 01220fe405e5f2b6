"""The writes since the last flush: the newest vector of each id, or a tombstone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

from penstock.coordinator import Delta, FedSource, Position
from penstock.errors import InvalidInput
from penstock.vector.model import Collection, Vector, check_id

Entry: TypeAlias = Vector | None
TOMBSTONE: Final = None
"""Marks a deleted vector in a delta."""
ITEM_BYTES: Final = 8192
"""Size unit of items. A vector counts as one item plus one for every 8 KiB, so that items also bound
memory."""


@dataclass(frozen=True, slots=True)
class Write:
    """An atomic write of vectors and deletions, in order, with the position of their source after it."""

    entries: tuple[tuple[str, Entry], ...]
    position: int | None = None
    source: str = ""
    """Name of the source that `position` refers to."""
    location: str = ""
    """Name of the batch at `position`, if it has one."""

    @property
    def items(self) -> int:
        """Size of the write, in the unit of a delta's size."""
        return sum(_items(entry) for _, entry in self.entries)

    @classmethod
    def upsert(cls, vectors: Iterable[Vector]) -> Write:
        return cls(tuple((vector.id, vector) for vector in vectors))

    @classmethod
    def delete(cls, ids: Iterable[str]) -> Write:
        return cls(tuple((external_id, TOMBSTONE) for external_id in ids))


class VectorDelta(Delta[Write, Collection]):
    """Delta of vectors. The last write to an id wins. The image is the collection, which validates
    vectors."""

    collection: Collection

    def __init__(self, source: FedSource | None = None) -> None:
        """Create an empty delta. `source` is the state of the feeding queue, shared by all deltas."""
        self._source = source or FedSource()
        self.entries: dict[str, Entry] = {}
        self.position: Position | None = None
        self._size = 0

    def init(self, image: Collection) -> None:
        self.collection = image

    def apply_one(self, write: Write) -> int:
        """Apply all entries and return their number.

        If one is invalid, apply none and raise `InvalidInput`.
        """
        position = None if write.position is None else Position(write.position, write.source, write.location)
        with self._source.taking(position):
            self._take(write)
        if position is not None:
            self.position = position
        return len(write.entries)

    def _take(self, write: Write) -> None:
        for external_id, entry in write.entries:
            if entry is TOMBSTONE:
                check_id(external_id)
            elif entry.id != external_id:
                raise InvalidInput(f"the vector {entry.id!r:.80} is written under the id {external_id!r:.80}")
            else:
                self.collection.check(entry)
        for external_id, entry in write.entries:
            self._size += _items(entry) - (
                _items(self.entries[external_id]) if external_id in self.entries else 0
            )
            self.entries[external_id] = entry

    def estimate_size(self) -> int:
        return self._size

    def fork_image(self) -> Collection:
        return self.collection


def _items(entry: Entry) -> int:
    return 1 if entry is TOMBSTONE else 1 + entry.estimated_bytes // ITEM_BYTES
