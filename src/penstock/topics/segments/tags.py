"""The tags of records, so that a delete by tag reads no record.

For records that are only in the log, the newest tags are in a map. When the map is full, it is frozen into
arrays, so that even one tag per record costs bytes and not objects. Removed records may still be in there;
the index knows which are live. Each segment has a table in a separate, derived file. Without it, or if it is
damaged, `tags_of_frames` derives the same table from the records.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.storage import Buffer
from penstock.topics.errors import Damaged
from penstock.topics.model import Predicate
from penstock.topics.segments.format import (
    HAS_TAG,
    IndexRows,
    close_sidecar,
    open_sidecar,
    sidecar_damaged,
    verify,
)

Seqs: TypeAlias = npt.NDArray[np.uint64]

TAGS_IN_MAP_MAX: Final = 4096
_BEYOND: Final = b"\xff"
"""A byte above every byte of UTF-8: `prefix + _BEYOND` sorts after everything that starts with `prefix`."""


class SegmentTags(Protocol):
    """The tags of one segment."""

    def seqs(self, tag: str) -> Seqs: ...

    def with_prefix(self, prefix: str) -> Iterator[tuple[str, Seqs]]: ...


class _FrozenTags(Sequence[bytes]):
    """Sorted tags in one buffer, and the sequence numbers of each."""

    __slots__ = ("_ends", "_seq_ends", "_seqs", "_text", "last_seq")

    def __init__(self, seqs_by_tag: dict[bytes, array[int]]) -> None:
        tags = sorted(seqs_by_tag)
        self._text = b"".join(tags)
        self._ends = np.cumsum([len(tag) for tag in tags], dtype=np.uint32)
        self._seq_ends = np.cumsum([len(seqs_by_tag[tag]) for tag in tags], dtype=np.uint32)
        joined = array("Q")
        for tag in tags:
            joined.extend(seqs_by_tag[tag])
        self._seqs: Seqs = np.frombuffer(joined, np.uint64)
        self.last_seq = int(self._seqs.max())

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, place: int) -> bytes:  # type: ignore[override]
        return self._text[int(self._ends[place - 1]) if place else 0 : int(self._ends[place])]

    @property
    def records(self) -> int:
        return len(self._seqs)

    def items(self) -> Iterator[tuple[bytes, Seqs]]:
        start = 0
        for place, end in enumerate(self._seq_ends.tolist()):
            yield self[place], self._seqs[start:end]
            start = end

    def between(self, low: bytes, high: bytes) -> Seqs:
        """Return the sequence numbers of all tags from `low` to below `high`. Those of one tag ascend."""
        first, last = bisect_left(self, low), bisect_left(self, high)
        if first >= last:
            return np.zeros(0, np.uint64)
        return self._seqs[int(self._seq_ends[first - 1]) if first else 0 : int(self._seq_ends[last - 1])]


class LogTags:
    """The tags of a topic's records from `first_seq` on."""

    __slots__ = ("_frozen", "_map", "_sorted", "_stored_count", "first_seq")

    def __init__(self, first_seq: int = 1) -> None:
        self.first_seq = first_seq
        self._stored_count = 0
        self._frozen: list[_FrozenTags] = []
        self._map: dict[bytes, array[int]] = {}
        self._sorted: list[bytes] | None = None

    def append(self, first_seq: int, tags: Iterable[tuple[int, bytes]]) -> None:
        """Add the tags of a write that starts at `first_seq`, by the position of their record in it."""
        seqs_by_tag = self._map
        for place, tag in tags:
            seqs = seqs_by_tag.get(tag)
            if seqs is None:
                if len(seqs_by_tag) >= TAGS_IN_MAP_MAX:
                    self._freeze()
                    seqs_by_tag = self._map
                seqs = seqs_by_tag[tag] = array("Q")
                self._sorted = None
            seqs.append(first_seq + place)
            self._stored_count += 1

    def _freeze(self) -> None:
        self._frozen.append(_FrozenTags(self._map))
        self._map = {}
        self._sorted = None

    def forget_below(self, first_seq: int) -> None:
        """Drop the tags of records below `first_seq`, which are in segments or gone."""
        if first_seq <= self.first_seq:
            return
        self.first_seq = first_seq
        self._frozen = [table for table in self._frozen if table.last_seq >= first_seq]
        kept: dict[bytes, array[int]] = {}
        for tag, seqs in self._map.items():
            if seqs[-1] >= first_seq:
                kept[tag] = seqs[bisect_left(seqs, first_seq) :]
        self._map = kept
        self._sorted = None
        self._stored_count = sum(map(len, kept.values())) + sum(table.records for table in self._frozen)

    def __len__(self) -> int:
        """Return how many sequence numbers are stored, including those of removed records."""
        return self._stored_count

    def keep(self, are_live: Callable[[Seqs], npt.NDArray[np.bool_]]) -> None:
        """Drop removed records. `are_live` returns which of ascending sequence numbers are live."""
        seqs_by_tag: dict[bytes, array[int]] = {}
        for tag, seqs in chain(*(table.items() for table in self._frozen), self._map_items()):
            alive = seqs[are_live(seqs)]
            if len(alive):
                seqs_by_tag.setdefault(tag, array("Q")).frombytes(alive.tobytes())
        self._stored_count = sum(map(len, seqs_by_tag.values()))
        self._frozen, self._map, self._sorted = [], seqs_by_tag, None
        if len(seqs_by_tag) > TAGS_IN_MAP_MAX:
            self._freeze()

    def _map_items(self) -> Iterator[tuple[bytes, Seqs]]:
        for tag, seqs in self._map.items():
            yield tag, np.array(seqs, np.uint64)

    def find(self, predicate: Predicate, segments: Iterable[SegmentTags] = ()) -> Seqs:
        """Return the matching sequence numbers of the log and of these segments, ascending and distinct."""
        low = predicate.value.encode("utf-8", "surrogatepass")
        high = low + (_BEYOND if predicate.is_prefix else b"\0")
        parts = [table.between(low, high) for table in self._frozen]
        parts += self._from_map(low, high, predicate.is_prefix)
        found = np.unique(np.concatenate(parts)) if parts else np.zeros(0, np.uint64)
        found = found[found >= np.uint64(self.first_seq)]
        stored = [part for segment in segments for part in _from_segment(segment, predicate)]
        return np.unique(np.concatenate((*stored, found))) if stored else found

    def _from_map(self, low: bytes, high: bytes, is_prefix: bool) -> list[Seqs]:
        if not is_prefix:
            seqs = self._map.get(low)
            return [] if seqs is None else [np.array(seqs, np.uint64)]
        if self._sorted is None:
            self._sorted = sorted(self._map)
        tags = self._sorted[bisect_left(self._sorted, low) : bisect_left(self._sorted, high)]
        return [np.array(self._map[tag], np.uint64) for tag in tags]


def _from_segment(segment: SegmentTags, predicate: Predicate) -> list[Seqs]:
    if predicate.is_prefix:
        return [seqs for _, seqs in segment.with_prefix(predicate.value)]
    return [segment.seqs(predicate.value)]


_MAGIC: Final = b"PTT1"
_SIZES = struct.Struct("<II")


class TagTable:
    """Sorted tags, and the ascending sequence numbers of each tag's records."""

    __slots__ = ("_rows", "_starts", "_tags", "first_seq")

    def __init__(
        self,
        first_seq: int,
        tags: Sequence[str],
        counts: npt.NDArray[np.uint32],
        rows: npt.NDArray[np.uint32],
    ) -> None:
        self.first_seq = first_seq
        self._tags = tags
        self._starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)))
        self._rows = rows

    @classmethod
    def of(cls, first_seq: int, rows_by_tag: Mapping[str, Sequence[int]]) -> TagTable:
        """Build the table from row numbers by tag, each ascending."""
        tags = sorted(rows_by_tag)
        counts = np.array([len(rows_by_tag[tag]) for tag in tags], np.uint32)
        rows = [row for tag in tags for row in rows_by_tag[tag]]
        return cls(first_seq, tags, counts, np.array(rows, np.uint32))

    def __len__(self) -> int:
        return len(self._tags)

    @property
    def records(self) -> int:
        """Return how many records have a tag."""
        return len(self._rows)

    @property
    def tags(self) -> Sequence[str]:
        return self._tags

    def seqs(self, tag: str) -> Seqs:
        """Return the records with this tag, possibly none."""
        place = bisect_left(self._tags, tag)
        if place == len(self._tags) or self._tags[place] != tag:
            return np.empty(0, np.uint64)
        return self._seqs_at(place)

    def with_prefix(self, prefix: str) -> Iterator[tuple[str, Seqs]]:
        """Yield the tags that start with `prefix`, in order, with their records."""
        for place in range(bisect_left(self._tags, prefix), len(self._tags)):
            if not self._tags[place].startswith(prefix):
                return
            yield self._tags[place], self._seqs_at(place)

    def _seqs_at(self, place: int) -> Seqs:
        rows = self._rows[self._starts[place] : self._starts[place + 1]]
        return rows.astype(np.uint64) + np.uint64(self.first_seq)

    def encoded(self, count: int) -> bytes:
        """Encode the `.tags` file of a segment of `count` records."""
        names = [tag.encode() for tag in self._tags]
        body = b"".join(
            (
                _SIZES.pack(len(names), len(self._rows)),
                np.diff(self._starts).astype("<u4").tobytes(),
                np.array([len(name) for name in names], "<u2").tobytes(),
                self._rows.astype("<u4").tobytes(),
                *names,
            )
        )
        return close_sidecar(_MAGIC, self.first_seq, count, body)


def decode_tags(raw: Buffer, first_seq: int, rows: IndexRows) -> TagTable:
    """Decode a `.tags` file. Raise `Damaged` unless it covers exactly the tagged records of `rows`."""
    count, body = open_sidecar(raw, _MAGIC, first_seq)
    table = _parsed(body, first_seq)
    tagged = np.flatnonzero(rows["flags"] & HAS_TAG)
    if count != len(rows) or not np.array_equal(np.sort(table._rows), tagged):
        raise sidecar_damaged(first_seq, "its tags do not match the records")
    return table


def _parsed(body: memoryview, first_seq: int) -> TagTable:
    try:
        tag_count, row_count = _SIZES.unpack_from(body)
        counts_at = _SIZES.size
        lengths_at = counts_at + 4 * tag_count
        rows_at = lengths_at + 2 * tag_count
        names_at = rows_at + 4 * row_count
        counts = np.frombuffer(body[counts_at:lengths_at], "<u4", tag_count)
        lengths = np.frombuffer(body[lengths_at:rows_at], "<u2", tag_count)
        rows = np.frombuffer(body[rows_at:names_at], "<u4", row_count)
        names = _names(body[names_at:].tobytes(), lengths)
    except (struct.error, ValueError) as error:
        raise sidecar_damaged(first_seq, f"its tag table is truncated: {error}") from error
    if int(counts.sum(dtype=np.uint64)) != row_count or names != sorted(set(names)):
        raise sidecar_damaged(first_seq, "its tag table is inconsistent")
    return TagTable(first_seq, names, counts, rows)


def _names(text: bytes, lengths: npt.NDArray[np.uint16]) -> list[str]:
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    if len(text) != (ends[-1] if ends else 0):
        raise ValueError("the names do not match their lengths")
    return [text[end - length : end].decode() for end, length in zip(ends, lengths.tolist(), strict=True)]


def tags_of_frames(data: Buffer, rows: IndexRows, first_seq: int) -> TagTable:
    """Derive the table from the records. Raise `Damaged` if a tagged record cannot be read."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for place in np.flatnonzero(rows["flags"] & HAS_TAG).tolist():
        seq = first_seq + place
        try:
            found[str(verify(data, rows[place], seq).tag, "utf-8")].append(place)
        except UnicodeDecodeError as error:
            raise Damaged(f"the tag of record {seq} is not text: {error}", {"first_seq": seq}) from error
    return TagTable.of(first_seq, found)
