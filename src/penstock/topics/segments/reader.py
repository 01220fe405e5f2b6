"""A segment that is open for reading, with its index in memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from penstock.errors import NotFound, PermissionDenied, Unavailable
from penstock.storage import Buffer, FileView
from penstock.topics.errors import Damaged
from penstock.topics.segments.format import (
    HAS_TAG,
    DeletedRows,
    IndexRows,
    Part,
    SegmentEntry,
    decode_deleted,
    read_index,
    segment_name,
)
from penstock.topics.segments.store import LocalSegmentStore, SegmentStore
from penstock.topics.segments.tags import TagTable, decode_tags, tags_of_frames

ViewKey: TypeAlias = tuple[str, int]
_VIEWS_MAX = 1024


class SegmentViews:
    """A cache of the most recently used open data files, at most `views_max`.

    An evicted view stays valid for its holders. Safe to share between threads.
    """

    def __init__(self, views_max: int = _VIEWS_MAX) -> None:
        self._views: OrderedDict[ViewKey, FileView] = OrderedDict()
        self._views_max = views_max
        self._mutex = threading.Lock()

    def __len__(self) -> int:
        return len(self._views)

    def get(self, key: ViewKey, size: int, opened: Callable[[], FileView]) -> FileView:
        """Return the view under this key if it has `size` bytes, else the result of `opened`."""
        with self._mutex:
            view = self._views.get(key)
            if view is not None and len(view) >= size:
                self._views.move_to_end(key)
                return view
        view = opened()
        with self._mutex:
            self._views[key] = view
            self._views.move_to_end(key)
            while len(self._views) > self._views_max:
                self._views.popitem(last=False)
        return view

    def forget(self, key: ViewKey) -> None:
        """Drop a file that was removed or replaced."""
        with self._mutex:
            self._views.pop(key, None)


class Segment:
    """The records of one segment, as described by the metadata `entry`.

    `rows` are the index entries, and `deleted` marks the rows that a `.del` file names. Both are in memory.
    """

    __slots__ = ("_check_cold", "_cold", "_hot", "_key", "_views", "deleted", "entry", "rows")

    def __init__(
        self,
        entry: SegmentEntry,
        rows: IndexRows,
        deleted: DeletedRows,
        *,
        hot: LocalSegmentStore,
        cold: SegmentStore | None,
        views: SegmentViews,
        key: ViewKey,
        check_cold: Callable[[], None] | None = None,
    ) -> None:
        """Open a segment.

        `check_cold` raises `Unavailable` if a missing file means that its whole tier is missing.
        """
        self.entry = entry
        self.rows = rows
        self.deleted = deleted
        self._hot = hot
        self._cold = cold
        self._views = views
        self._key = key
        self._check_cold = check_cold

    @property
    def first_seq(self) -> int:
        return self.entry.first_seq

    def data(self) -> FileView:
        """Return the open data file of a hot segment. Raise `Damaged`."""
        view = self._opened()
        if view is None:
            raise missing(self.entry, Part.DATA)
        return view

    def _opened(self) -> FileView | None:
        size = self.entry.data_bytes
        try:
            view = self._views.get(self._key, size, lambda: self._hot.opened(self.first_seq, Part.DATA))
        except NotFound:
            return None
        if len(view) < size:
            raise Damaged(
                f"the data of {segment_name(self.first_seq)} ends {size - len(view)} bytes too early",
                {"first_seq": self.first_seq, "last_seq": self.entry.end_seq - 1},
            )
        return view if len(view) == size else view.until(size)

    def read(self, start: int, stop: int) -> tuple[int, memoryview]:
        """Return the offset in the data file and the bytes of rows `start` to `stop - 1`.

        Blocks for a cold segment. Raises `Damaged`, or `Unavailable` if the cold tier does not respond.
        """
        rows = self.rows[start:stop]
        framed = np.flatnonzero(rows["length"])
        if not len(framed):
            return 0, memoryview(b"")
        base, last = int(rows[framed[0]]["offset"]), rows[framed[-1]]
        end = int(last["offset"]) + int(last["length"])
        return base, self.read_bytes(base, end)

    def read_bytes(self, start: int, end: int) -> memoryview:
        """Return bytes of the data file. Blocks for a cold segment, and raises as `read` does."""
        # Try the hot file first, whatever the entry says: the segment may move during the read.
        view = self._opened()
        if view is not None:
            return view[start:end]
        if self._cold is None:
            raise missing(self.entry, Part.DATA)
        try:
            return self._cold.read_range(self.first_seq, Part.DATA, start, end - start)
        except PermissionDenied as error:
            raise Unavailable(f"the cold tier cannot be read: {error}") from error
        except NotFound as error:
            if self._check_cold is not None:
                self._check_cold()
            raise missing(self.entry, Part.DATA) from error

    def tags(self) -> TagTable:
        """Return the tags of the records. Blocks; reads the records only if there is no tag table.

        A damaged table is not an error, because it can be derived from the records. Raises `Damaged` if they
        are unreadable too.
        """
        if not (self.rows["flags"] & HAS_TAG).any():
            return TagTable.of(self.first_seq, {})
        if self.entry.sealed:
            try:
                return decode_tags(self._hot.view(self.first_seq, Part.TAGS), self.first_seq, self.rows)
            except (Damaged, NotFound):
                pass
        base, data = self.read(0, len(self.rows))
        assert base == 0
        return tags_of_frames(data, self.rows, self.first_seq)


def load_index(store: SegmentStore, entry: SegmentEntry) -> bytes:
    """Return the checked index entries of a segment.

    Raise `Damaged`, or `NotFound` if there is no such file.
    """
    raw = store.read_range(entry.first_seq, Part.IDX, 0, entry.idx_bytes).tobytes()
    rows = read_index(raw, entry.first_seq, entry.idx_xxh3)
    if int(rows["length"].sum(dtype=np.uint64)) != entry.data_bytes:
        raise Damaged(
            f"the index of {segment_name(entry.first_seq)} does not lead to {entry.data_bytes} bytes of data",
            {"first_seq": entry.first_seq, "last_seq": entry.end_seq - 1},
        )
    return raw


def load_deleted(store: SegmentStore, entry: SegmentEntry) -> DeletedRows:
    """Return which records the `.del` file names. Raise `Damaged` if it names fewer than it must."""
    if entry.deleted == 0:
        # A newer file than the metadata may exist. The log has the same deletions.
        return np.zeros(entry.count, np.bool_)
    raw: Buffer
    try:
        raw = store.view(entry.first_seq, Part.DEL)
    except NotFound as error:
        raise missing(entry, Part.DEL) from error
    deleted = decode_deleted(raw, entry.first_seq, entry.count)
    if np.count_nonzero(deleted) < entry.deleted:
        raise Damaged(
            f"the .del file of {segment_name(entry.first_seq)} is too old: deleted records would come back",
            {"first_seq": entry.first_seq, "last_seq": entry.end_seq - 1},
        )
    return deleted


def missing(entry: SegmentEntry, part: Part) -> Damaged:
    """Return the error for a missing file."""
    return Damaged(
        f"{segment_name(entry.first_seq)}.{part} is missing; restore it from a backup",
        {"first_seq": entry.first_seq, "last_seq": entry.end_seq - 1},
    )
