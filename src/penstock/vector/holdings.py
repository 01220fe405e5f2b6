"""What the flusher knows about a collection: rows, lists and ids, as the last flush left the storage."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from pyroaring import BitMap64

from penstock.coordinator import Operation
from penstock.coordinator.position import Position
from penstock.vector.damage import Damage
from penstock.vector.filters import IndexedColumn
from penstock.vector.index import Index
from penstock.vector.keys import BLOCK_SIZE, CENTROID_LEVEL
from penstock.vector.model import Collection
from penstock.vector.partition import Partition
from penstock.vector.rows import Rows

__all__ = ["Holdings", "IdBlocks", "Tuning"]

_WASTE_MIN: Final = 1024
"""Rows that are not needed are not worth a copy of all others as long as they are fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """When a search compares everything, and how large posting lists get."""

    exact_max: int = 50_000
    split_at: int = 150
    merge_below: int = 50


class IdBlocks:
    """Ids that were never used before, in blocks; each is stored in the batch that uses it first."""

    def __init__(self, next_id: int) -> None:
        self._next = self._end = next_id
        self._changed = False

    def take(self, count: int = 1) -> int:
        """The first of `count` new ids, which follow each other."""
        first, self._next = self._next, self._next + count
        while self._next > self._end:
            self._end += BLOCK_SIZE
            self._changed = True
        return first

    def go_on_behind(self, last: int) -> None:
        """Begin with the block behind this id: the stored one does not tell where it ends."""
        self._next = self._end = (last // BLOCK_SIZE + 1) * BLOCK_SIZE
        self._changed = True

    @property
    def next_id(self) -> int:
        return self._next

    def take_block(self) -> tuple[int, int] | None:
        """Base and size of the newest block if it was begun since the last call."""
        changed, self._changed = self._changed, False
        return (self._end - BLOCK_SIZE, BLOCK_SIZE) if changed else None


@dataclass(slots=True, kw_only=True)
class Holdings:
    """Only the flusher changes it, and only from one thread at a time."""

    collection: Collection
    tuning: Tuning
    rows: Rows
    partition: Partition
    data_ids: IdBlocks
    centroid_ids: IdBlocks
    slot_of: dict[str, int] = field(default_factory=dict)
    """Where the vector of each external id is."""
    dead: BitMap64 = field(default_factory=BitMap64)
    """Ids that are gone but still stand in a posting list."""
    position: Position | None = None
    lost: dict[str, int | None] = field(default_factory=dict)
    """External ids whose vectors are damaged everywhere, and what they stand for if that is known."""
    damage: Damage | None = None
    """What the open found, if anything."""
    repairs: list[Operation] = field(default_factory=list)
    """What brings damaged records to what is held, besides the changes of the lists."""

    @classmethod
    def empty(
        cls, collection: Collection, tuning: Tuning, *, next_id: int = 0, next_centroid: int = CENTROID_LEVEL
    ) -> Holdings:
        centroid_ids = IdBlocks(next_centroid)
        partition = Partition(
            split_at=tuning.split_at, merge_below=tuning.merge_below, new_id=centroid_ids.take
        )
        return cls(
            collection=collection,
            tuning=tuning,
            rows=Rows(collection),
            partition=partition,
            data_ids=IdBlocks(next_id),
            centroid_ids=centroid_ids,
        )

    def index(self) -> Index:
        """A view of all this that stays as it is."""
        rows, lists = self.rows, self.partition.lists
        centroids = (
            self.partition.centroids()[1] if lists else np.empty((0, self.collection.dimensions), np.float32)
        )
        fields = self.collection.indexed
        return Index(
            collection=self.collection,
            exact_max=self.tuning.exact_max,
            count=rows.count,
            live=len(self.slot_of),
            matrix=rows.matrix,
            squares=rows.squares,
            ids=rows.ids,
            alive=rows.alive,
            names=rows.names,
            columns={
                name: IndexedColumn(column.codes, column.code_of, fields[name].type)
                for name, column in rows.columns.items()
            },
            centroids=centroids,
            lists=[one.slots for one in lists.values()],
            spreads=np.array([one.spread(rows) for one in lists.values()], np.float32),
        )

    def compact(self) -> None:
        """Give the memory of rows back that stand in no list, if they are most of all rows."""
        wasted = self.rows.wasted
        if wasted < _WASTE_MIN or 2 * wasted < self.rows.count:
            return
        self.rows, places = self.rows.compacted()
        self.partition.moved(places)
        self.slot_of = {name: int(places[slot]) for name, slot in self.slot_of.items()}
