"""Posting lists in memory. Every row is in the list of a nearby centroid.

Large lists are split, small ones are dissolved, and rows near a split move to the nearest list. Changes are
recorded, to be stored in one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from penstock.vector.model import Floats
from penstock.vector.rows import NO_LIST, Rows, Slots, distances, halves, nearest, squares

MERGES_MAX: Final = 64
"""Maximum number of merges of a record before it is rewritten. A start reads them all."""

_NEIGHBOURS: Final = 8
"""Number of lists around a split whose rows may be nearer to one of the two new centroids."""
_NONE: Final = np.empty(0, np.int64)


@dataclass(slots=True)
class PostingList:
    """A centroid and the slots of its rows, including dead ones. The array is replaced, never changed in
    place."""

    centroid: Floats
    slots: Slots
    merges: int = 0
    """Upper bound on the merges of the stored record since it was last rewritten."""
    removed: int = 0
    """Number of entries of the stored record that only mark a row as removed."""
    _radius: float | None = None

    def hold(self, slots: Slots) -> None:
        """Replace the rows of the list."""
        self.slots = slots
        self._radius = None

    def radius(self, rows: Rows) -> float:
        """Return the root mean square distance of the rows from the centroid."""
        if self._radius is None:
            apart = rows.matrix[self.slots] - self.centroid
            self._radius = float(np.sqrt(squares(apart).mean())) if len(apart) else 0.0
        return self._radius


@dataclass(slots=True)
class Changes:
    """Changes to store. Lists are identified by the ids of their centroids."""

    written: set[int] = field(default_factory=set)
    """Lists to rewrite."""
    removed: set[int] = field(default_factory=set)
    added: dict[int, list[Slots]] = field(default_factory=dict)
    left: dict[int, list[Slots]] = field(default_factory=dict)
    forgotten: list[Slots] = field(default_factory=list)
    """Dead rows that are no longer in any list."""

    @property
    def touched(self) -> set[int]:
        return (self.written | self.added.keys() | self.left.keys()) - self.removed


class InvertedLists:
    """All posting lists. Only the flusher changes them."""

    def __init__(self, *, split_at: int, merge_below: int, new_id: Callable[[], int]) -> None:
        self._split_at = split_at
        self._merge_below = merge_below
        self._new_id = new_id
        self.lists: dict[int, PostingList] = {}
        self._centroids: tuple[list[int], Floats] | None = None
        self.changes = Changes()

    def centroids(self) -> tuple[list[int], Floats]:
        """Return the ids of all centroids and, in the same order, their vectors."""
        if self._centroids is None:
            ids = list(self.lists)
            self._centroids = ids, np.stack([self.lists[one].centroid for one in ids])
        return self._centroids

    def take_changes(self) -> Changes:
        """Return the changes since the last call."""
        taken, self.changes = self.changes, Changes()
        return taken

    def place(self, rows: Rows, slots: Slots) -> None:
        """Add rows to the lists of their nearest centroids."""
        if not len(slots):
            return
        if not self.lists:
            self._make(rows, rows.matrix[slots].mean(axis=0), slots)
            return
        ids, centroids = self.centroids()
        self._add_all(rows, slots, np.array(ids, np.int64)[nearest(rows.matrix[slots], centroids)])

    def maintain(self, rows: Rows, lists_with_deletes: Iterable[int]) -> None:
        """Split or dissolve lists whose size changed, so that sizes stay within bounds."""
        touched = self.changes.touched | set(lists_with_deletes)
        self._cut_large(rows, touched)
        for one in sorted(touched | self.changes.touched):
            if one in self.lists:
                self._tidy(rows, one)
        self._cut_large(rows, self.changes.touched)

    def moved(self, places: Slots) -> None:
        """Update the slots after the rows were compacted: row i is now at `places[i]`."""
        for one in self.lists.values():
            one.slots = places[one.slots]

    def _tidy(self, rows: Rows, centroid_id: int) -> None:
        slots = self.lists[centroid_id].slots
        alive = rows.alive[slots]
        live = int(alive.sum())
        if live < self._merge_below and (len(self.lists) > 1 or not live):
            self._drop(rows, centroid_id)
            self.place(rows, slots[alive])
        elif live <= len(slots) // 2:
            self._rewrite(rows, centroid_id, slots[alive])

    def _cut_large(self, rows: Rows, touched: set[int]) -> None:
        waiting = sorted(touched)
        # Moved rows may make their new lists too large. The bound guarantees termination.
        cuts_left = 16 + 4 * rows.count // self._split_at
        while waiting and cuts_left:
            centroid_id = waiting.pop()
            if centroid_id in self.lists:
                touched = self._cut(rows, centroid_id)
                cuts_left -= bool(touched)
                waiting.extend(sorted(touched))

    def _cut(self, rows: Rows, centroid_id: int) -> set[int]:
        """Split a list in two if it is too large. Return the changed lists."""
        old = self.lists[centroid_id]
        if len(old.slots) < self._split_at:
            return set()
        slots = old.slots[rows.alive[old.slots]]
        if len(slots) < self._split_at:
            return set()
        second, centroids = halves(rows.matrix[slots], smallest=self._merge_below)
        if bool((centroids[0] == centroids[1]).all()):
            return set()  # all rows are equal, so a split would not help searches
        around = self._neighbours(centroid_id)
        self._drop(rows, centroid_id)
        new = [self._make(rows, centroids[half], slots[second == bool(half)]) for half in (0, 1)]
        self._move_near(rows, new, around)
        return {*new, *around}

    def _neighbours(self, centroid_id: int) -> list[int]:
        ids, centroids = self.centroids()
        if len(ids) == 1:
            return []
        apart = distances(self.lists[centroid_id].centroid[None, :], centroids)[0]
        count = min(_NEIGHBOURS + 1, len(ids))
        near = np.argpartition(apart, count - 1)[:count]
        return [ids[place] for place in near.tolist() if ids[place] != centroid_id]

    def _move_near(self, rows: Rows, new: list[int], around: list[int]) -> None:
        """Move rows of the new lists and their neighbours to the nearest of all these centroids."""
        if not around:
            return
        ids = [*new, *around]
        centroids = np.stack([self.lists[one].centroid for one in ids])
        slots = np.concatenate([self.lists[one].slots for one in ids])
        slots = slots[rows.alive[slots]]
        homes = np.array(ids, np.int64)[nearest(rows.matrix[slots], centroids)]
        moving = rows.home[slots] != homes
        if moving.any():
            self._leave_all(rows, slots[moving])
            self._add_all(rows, slots[moving], homes[moving])

    def _make(self, rows: Rows, centroid: Floats, slots: Slots) -> int:
        centroid_id = self._new_id()
        self.lists[centroid_id] = PostingList(np.asarray(centroid, np.float32), slots)
        self._centroids = None
        rows.home[slots] = centroid_id
        self.changes.written.add(centroid_id)
        return centroid_id

    def _drop(self, rows: Rows, centroid_id: int) -> None:
        slots = self.lists.pop(centroid_id).slots
        self._centroids = None
        rows.home[slots] = NO_LIST
        self._forget(slots[~rows.alive[slots]])
        for noted in (self.changes.added, self.changes.left):
            noted.pop(centroid_id, None)
        self.changes.written.discard(centroid_id)
        self.changes.removed.add(centroid_id)

    def _rewrite(self, rows: Rows, centroid_id: int, kept: Slots) -> None:
        one = self.lists[centroid_id]
        dead = one.slots[~rows.alive[one.slots]]
        rows.home[dead] = NO_LIST
        self._forget(dead)
        one.hold(kept)
        self.changes.added.pop(centroid_id, None)
        self.changes.left.pop(centroid_id, None)
        self.changes.written.add(centroid_id)

    def _forget(self, dead: Slots) -> None:
        if len(dead):
            self.changes.forgotten.append(dead)

    def _add_all(self, rows: Rows, slots: Slots, homes: Slots) -> None:
        rows.home[slots] = homes
        for centroid_id, part in _grouped(slots, homes):
            one = self.lists[centroid_id]
            one.hold(np.concatenate((one.slots, part)))
            if centroid_id not in self.changes.written:
                self.changes.added.setdefault(centroid_id, []).append(part)

    def _leave_all(self, rows: Rows, slots: Slots) -> None:
        for centroid_id, part in _grouped(slots, rows.home[slots]):
            one = self.lists[centroid_id]
            one.hold(one.slots[~np.isin(one.slots, part)])
            if centroid_id not in self.changes.written:
                self.changes.left.setdefault(centroid_id, []).append(part)
        rows.home[slots] = NO_LIST


def _grouped(slots: Slots, homes: Slots) -> Iterable[tuple[int, Slots]]:
    """Return the slots of each list."""
    order = np.argsort(homes, kind="stable")
    slots, homes = slots[order], homes[order]
    ids, starts = np.unique(homes, return_index=True)
    return zip(ids.tolist(), np.split(slots, starts[1:]), strict=True)
