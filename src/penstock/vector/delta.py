"""The writes since the last flush: the newest vector of each id, or that it is deleted."""

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
"""A vector counts as one item, and as one more for each time it is this large: items bound memory, too."""


@dataclass(frozen=True, slots=True)
class Write:
    """Vectors and deletions in order, applied all or none, and the position of their source after them."""

    entries: tuple[tuple[str, Entry], ...]
    position: int | None = None
    source: str = ""
    """The name of what counts the positions."""
    location: str = ""
    """The name of the batch at `position`, if it has one."""

    @property
    def items(self) -> int:
        """The size of the write, in the unit of a delta's size."""
        return sum(_items(entry) for _, entry in self.entries)

    @classmethod
    def upsert(cls, vectors: Iterable[Vector]) -> Write:
        return cls(tuple((vector.id, vector) for vector in vectors))

    @classmethod
    def delete(cls, ids: Iterable[str]) -> Write:
        return cls(tuple((external_id, TOMBSTONE) for external_id in ids))


class VectorDelta(Delta[Write, Collection]):
    """The last write to an id wins. The image is the collection, which says what is valid."""

    collection: Collection

    def __init__(self, source: FedSource | None = None) -> None:
        """`source` is what all deltas of a collection know of the queue that feeds it."""
        self._source = source or FedSource()
        self.entries: dict[str, Entry] = {}
        self.position: Position | None = None
        self._size = 0

    def init(self, image: Collection) -> None:
        self.collection = image

    def apply_one(self, write: Write) -> int:
        """Apply all entries and return their number.

        Raises `InvalidInput`, and applies none, if one is wrong.
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
