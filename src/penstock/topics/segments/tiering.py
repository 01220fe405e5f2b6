"""Tiering: hot storage for new segments, cold storage for old ones.

Only data files move. The index, tags and deletions of a cold segment are copied with it, so that the cold
tier is self-contained, but they also stay hot. So a start reads no cold file, a delete writes none, and the
hot tier shows everything that must be removed from the cold tier.

A segment moves so that one complete copy is valid at every moment:

1. copy its files to the cold tier, durable but not yet referenced;
2. the caller records durably that the segment is cold;
3. remove the hot data file.

An interrupted step is repeated. While both copies exist, the hot one is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
import numpy as np

from penstock.errors import InvalidInput, NotFound, PenstockError
from penstock.topics.errors import Damaged
from penstock.topics.segments.build import BuiltRows
from penstock.topics.segments.format import (
    DeletedRows,
    Part,
    SegmentEntry,
    checksum,
    encode_deleted,
    read_index,
)
from penstock.topics.segments.reader import Segment, SegmentViews, ViewKey, load_deleted, load_index, missing
from penstock.topics.segments.store import (
    LocalSegmentRoot,
    LocalSegmentStore,
    SegmentRoot,
    SegmentStore,
    Stored,
)
from penstock.topics.segments.tags import TagTable


def choose(
    segments: Sequence[SegmentEntry], *, retain_segments: int, retain_bytes: int = 0
) -> list[SegmentEntry]:
    """Return which of a topic's segments should move, oldest first.

    The newest `retain_segments` sealed ones stay, if they fit into `retain_bytes` (0 means no limit).
    """
    sealed = sorted((entry for entry in segments if entry.sealed), key=lambda entry: entry.first_seq)
    moving: list[SegmentEntry] = []
    kept_bytes = 0
    for age, entry in enumerate(reversed(sealed)):
        kept_bytes += entry.data_bytes
        if age >= retain_segments or 0 < retain_bytes < kept_bytes:
            moving.append(entry)
    return [entry for entry in reversed(moving) if not entry.cold]


class TopicTier:
    """The segments of one topic.

    Every call blocks. The caller stores the returned entries in its metadata.
    """

    def __init__(
        self,
        hot: LocalSegmentStore,
        cold: SegmentStore | None = None,
        views: SegmentViews | None = None,
        check_cold: Callable[[], None] | None = None,
    ) -> None:
        self._hot = hot
        self._cold = cold
        self._views = SegmentViews() if views is None else views
        self._check_cold = check_cold

    def start(self, built: BuiltRows, created_ms: int) -> SegmentEntry:
        """Write a new segment of these rows, durable on return. Unreferenced files are replaced."""
        self._views.forget(self._key(built.first_seq))
        self._hot.put(built.first_seq, built.data, built.idx)
        return SegmentEntry(
            first_seq=built.first_seq,
            count=built.count,
            data_bytes=built.data_bytes,
            sealed=False,
            cold=False,
            created_ms=created_ms,
            idx_xxh3=checksum(built.idx),
        )

    def append(self, entry: SegmentEntry, built: BuiltRows) -> SegmentEntry:
        """Append rows that were built for the segment's `data_bytes`, durable on return.

        After an error, `entry` still describes the segment. Raises `Damaged` if its files do not match; then
        seal it as it is and start another.
        """
        if entry.sealed or built.first_seq != entry.end_seq:
            raise InvalidInput(f"records from {built.first_seq} on do not continue {entry}")
        idx = self._hot_index(entry) + built.idx
        read_index(idx, entry.first_seq)
        self._views.forget(self._key(entry.first_seq))
        self._hot.append(entry.first_seq, entry.data_bytes, entry.idx_bytes, built.data, built.idx)
        return msgspec.structs.replace(
            entry,
            count=entry.count + built.count,
            data_bytes=entry.data_bytes + built.data_bytes,
            idx_xxh3=checksum(idx),
        )

    def seal(self, entry: SegmentEntry) -> SegmentEntry:
        """Seal a segment, so that it never grows again, and store its tag table."""
        table = self._tag_table(self.load(entry))
        if table:
            self._hot.replace(entry.first_seq, Part.TAGS, table.encoded(entry.count))
        return msgspec.structs.replace(entry, sealed=True)

    def _tag_table(self, segment: Segment) -> TagTable | None:
        try:
            return segment.tags()
        except Damaged:
            return None  # a search by tag reports it; the segment must still be sealed

    def forget_views(self, entries: Iterable[SegmentEntry]) -> None:
        """Close views of segments that another process wrote, because the files may have been replaced."""
        for entry in entries:
            self._views.forget(self._key(entry.first_seq))

    def write_deleted(self, entry: SegmentEntry, deleted: DeletedRows) -> SegmentEntry:
        """Store which records of a segment are deleted, all and not only the new ones. Durable on return.

        Call this only with deletions that are durable in the log, because it cannot be undone.
        """
        count = int(np.count_nonzero(deleted))
        if len(deleted) != entry.count or count < entry.deleted:
            raise InvalidInput(f"{count} of {len(deleted)} records cannot be all deleted records of {entry}")
        self._hot.replace(entry.first_seq, Part.DEL, encode_deleted(entry.first_seq, deleted))
        return msgspec.structs.replace(entry, deleted=count)

    def load(self, entry: SegmentEntry) -> Segment:
        """Open the segment for reading. Raise `Damaged` if its index or its deletions are not valid."""
        store = self._sidecars(entry)
        rows = read_index(self._index(store, entry), entry.first_seq)
        return Segment(
            entry,
            rows,
            load_deleted(store, entry),
            hot=self._hot,
            cold=self._cold,
            views=self._views,
            key=self._key(entry.first_seq),
            check_cold=self._check_cold,
        )

    def as_it_is_now(self, entry: SegmentEntry) -> SegmentEntry | None:
        """Update an entry of an older snapshot: the segment may have moved, or be gone (None).

        For a start whose newest snapshot cannot be read. That snapshot may no longer have needed the segment.
        """
        if self._hot.exists(entry.first_seq, Part.DATA):
            return entry
        if self._cold is not None and self._cold.exists(entry.first_seq, Part.DATA):
            return msgspec.structs.replace(entry, cold=True, sealed=True)
        return entry if self._hot.exists(entry.first_seq, Part.IDX) else None

    def resolve(self, entry: SegmentEntry) -> SegmentStore:
        """Return the tier to read the data of a segment from, preferring the hot tier."""
        if self._hot.exists(entry.first_seq, Part.DATA):
            return self._hot
        if not entry.cold or self._cold is None:
            raise missing(entry, Part.DATA)
        return self._cold

    def relocate(self, entry: SegmentEntry) -> SegmentEntry:
        """Copy a sealed segment to the cold tier, durable on return.

        Store the returned entry durably, then call `drop_hot`. May be repeated.
        Raises `Damaged` if the index does not match the entry.
        """
        cold = self._cold_store()
        if not entry.sealed:
            raise InvalidInput(f"only a sealed segment can move: {entry}")
        idx = self._hot_index(entry)
        try:
            data = self._hot.view(entry.first_seq, Part.DATA)[: entry.data_bytes]
        except NotFound as error:
            raise missing(entry, Part.DATA) from error
        for part in (Part.TAGS, Part.DEL):
            if self._hot.exists(entry.first_seq, part):
                cold.replace(entry.first_seq, part, self._hot.view(entry.first_seq, part))
        cold.put(entry.first_seq, [data], idx)
        return msgspec.structs.replace(entry, cold=True)

    def drop_hot(self, entry: SegmentEntry) -> None:
        """Remove the hot data of a segment that is durably recorded as cold, if it exists.

        Raises `Damaged` and removes nothing if the cold copy is incomplete.
        """
        if not entry.cold:
            raise InvalidInput(f"a segment that is not cold would be lost: {entry}")
        if not self._hot.exists(entry.first_seq, Part.DATA):
            return
        for part, size in ((Part.DATA, entry.data_bytes), (Part.IDX, entry.idx_bytes)):
            try:
                found = self._cold_store().size(entry.first_seq, part)
            except NotFound as error:
                raise missing(entry, part) from error
            if found != size:
                raise Damaged(f"the cold copy of {entry} has {found} bytes of .{part}, not {size}")
        self._hot.delete(entry.first_seq, (Part.DATA,))
        self._views.forget(self._key(entry.first_seq))

    def delete(self, first_seq: int) -> None:
        """Remove the files of a segment that no durable metadata names, if they exist."""
        # The hot files are removed last: after a crash they show that there is still something to remove.
        if self._cold is not None:
            self._cold.delete(first_seq)
        self._hot.delete(first_seq)
        self._views.forget(self._key(first_seq))

    def _key(self, first_seq: int) -> ViewKey:
        return self._hot.directory, first_seq

    def _cold_store(self) -> SegmentStore:
        if self._cold is None:
            raise InvalidInput("there is no cold tier; set cold_dir")
        return self._cold

    def _sidecars(self, entry: SegmentEntry) -> SegmentStore:
        if entry.cold and self._cold is not None and not self._hot.exists(entry.first_seq, Part.IDX):
            return self._cold
        return self._hot

    def _hot_index(self, entry: SegmentEntry) -> bytes:
        return self._index(self._hot, entry)

    def _index(self, store: SegmentStore, entry: SegmentEntry) -> bytes:
        try:
            return load_index(store, entry)
        except NotFound as error:
            raise missing(entry, Part.IDX) from error


@dataclass(slots=True)
class Tidied:
    """The unreferenced files that were removed, and those that could not be removed."""

    removed: int = 0
    failed: list[PenstockError] = field(default_factory=list)


class Tiers:
    """The segments of all topics."""

    def __init__(
        self,
        hot: LocalSegmentRoot,
        cold: SegmentRoot | None = None,
        check_cold: Callable[[], None] | None = None,
    ) -> None:
        """Open the tiers. `check_cold` raises `Unavailable` if the whole cold tier is missing."""
        self._hot = hot
        self._cold = cold
        self._views = SegmentViews()
        self._check_cold = check_cold

    @property
    def has_cold(self) -> bool:
        return self._cold is not None

    def check_cold(self) -> None:
        """Raise `Unavailable` if the whole cold tier is missing."""
        if self._check_cold is not None:
            self._check_cold()

    def topic(self, topic_id: int) -> TopicTier:
        cold = None if self._cold is None else self._cold.topic(topic_id)
        return TopicTier(self._hot.topic(topic_id), cold, self._views, self._check_cold)

    def remove_topic(self, topic_id: int) -> None:
        """Remove every segment of a deleted topic, if there are any."""
        # The hot files are removed last: after a crash they show that there is still something to remove.
        self.remove_cold(topic_id)
        self.remove_hot(topic_id)

    def remove_cold(self, topic_id: int) -> None:
        """Remove the cold files, as the first half of `remove_topic`."""
        if self._cold is not None:
            self._cold.remove_topic(topic_id)

    def remove_hot(self, topic_id: int) -> None:
        """Remove the hot files, as the second half of `remove_topic`."""
        self._hot.remove_topic(topic_id)

    def stored(self) -> Stored:
        """List all segments of the hot tier in one walk."""
        return self._hot.scan()

    def tidy(self, known: Mapping[int, Sequence[SegmentEntry]], stored: Stored) -> Tidied:
        """Remove all files in `stored` except the segments in `known`, by topic id, as left by a crash.

        A removal that fails does not prevent the others.
        """
        done = Tidied()
        for path in stored.strays:
            self._attempt(done, partial(self._hot.remove_stray, path))
        for topic_id, segments in stored.topics.items():
            if topic_id in known:
                self._tidy_topic(done, self.topic(topic_id), segments, known[topic_id])
            else:
                self._attempt(done, partial(self.remove_topic, topic_id))
        return done

    def _tidy_topic(
        self,
        done: Tidied,
        tier: TopicTier,
        segments: Mapping[int, set[Part]],
        entries: Sequence[SegmentEntry],
    ) -> None:
        by_seq = {entry.first_seq: entry for entry in entries}
        for first_seq, parts in segments.items():
            entry = by_seq.get(first_seq)
            if entry is None:
                self._attempt(done, partial(tier.delete, first_seq))
            elif entry.cold and Part.DATA in parts:
                self._attempt(done, partial(tier.drop_hot, entry))

    def _attempt(self, done: Tidied, remove: Callable[[], None]) -> None:
        try:
            remove()
            done.removed += 1
        except PenstockError as error:
            done.failed.append(error)

    def close(self) -> None:
        """Release the resources of the cold tier."""
        if self._cold is not None:
            self._cold.close()
