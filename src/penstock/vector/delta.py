"""The writes since the last flush: the newest vector of each id, or that it is deleted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

from penstock.coordinator import Delta
from penstock.errors import InvalidInput
from penstock.vector.model import Collection, Vector, check_id

__all__ = ["ITEM_BYTES", "TOMBSTONE", "Entry", "VectorDelta", "Write"]

Entry: TypeAlias = Vector | None
TOMBSTONE: Final = None
"""What stands in a delta for a vector that is deleted."""
ITEM_BYTES: Final = 8192
"""A vector counts as one item, and as one more for each time it is this large: items bound memory, too."""


@dataclass(frozen=True, slots=True)
class Write:
    """Vectors and deletions in order, taken as a whole or not at all, and where their source stands then."""

    entries: tuple[tuple[str, Entry], ...]
    position: int | None = None

    @classmethod
    def upsert(cls, vectors: Iterable[Vector]) -> Write:
        return cls(tuple((vector.id, vector) for vector in vectors))

    @classmethod
    def delete(cls, ids: Iterable[str]) -> Write:
        return cls(tuple((external_id, TOMBSTONE) for external_id in ids))


class VectorDelta(Delta[Write, Collection]):
    """The last write to an id wins. The image is the collection, which says what is valid."""

    collection: Collection

    def init(self, image: Collection) -> None:
        self.collection = image
        self.entries: dict[str, Entry] = {}
        self.position: int | None = None
        self._size = 0

    def apply_one(self, write: Write) -> int:
        """How many entries were taken. Raises `InvalidInput` if one of them is wrong, and takes none then."""
        if write.position is not None and write.position < 0:
            raise InvalidInput(f"a position is a whole number of at least 0, not {write.position}")
        for external_id, entry in write.entries:
            if entry is TOMBSTONE:
                check_id(external_id)
            else:
                self.collection.check(entry)
        for external_id, entry in write.entries:
            self._size += _items(entry) - (
                _items(self.entries[external_id]) if external_id in self.entries else 0
            )
            self.entries[external_id] = entry
        if write.position is not None:
            self.position = write.position
        return len(write.entries)

    def estimate_size(self) -> int:
        return self._size

    def fork_image(self) -> Collection:
        return self.collection


def _items(entry: Entry) -> int:
    return 1 if entry is TOMBSTONE else 1 + entry.estimated_bytes // ITEM_BYTES
