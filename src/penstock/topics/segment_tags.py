"""Which records of a segment carry which tag, so that a delete by tag reads no record.

The file is derived: without it, or with a damaged one, `tags_of_frames` gives the same from the records.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.storage import Buffer
from penstock.topics.errors import Damaged
from penstock.topics.segment import HAS_TAG, IndexRows, verify
from penstock.topics.segment_sidecar import close_sidecar, open_sidecar, sidecar_damaged

__all__ = ["Seqs", "TagTable", "decode_tags", "tags_of_frames"]

Seqs: TypeAlias = npt.NDArray[np.uint64]

_MAGIC: Final = b"PTT1"
_SIZES = struct.Struct("<II")


class TagTable:
    """Tags in order, and for each the ascending sequence numbers of its records."""

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
        """The table for these row numbers by tag, each ascending."""
        tags = sorted(rows_by_tag)
        counts = np.array([len(rows_by_tag[tag]) for tag in tags], np.uint32)
        rows = [row for tag in tags for row in rows_by_tag[tag]]
        return cls(first_seq, tags, counts, np.array(rows, np.uint32))

    def __len__(self) -> int:
        return len(self._tags)

    @property
    def records(self) -> int:
        """How many records have a tag."""
        return len(self._rows)

    @property
    def tags(self) -> Sequence[str]:
        return self._tags

    def seqs(self, tag: str) -> Seqs:
        """The records with this tag; none if there are none."""
        place = bisect_left(self._tags, tag)
        if place == len(self._tags) or self._tags[place] != tag:
            return np.empty(0, np.uint64)
        return self._seqs_at(place)

    def with_prefix(self, prefix: str) -> Iterator[tuple[str, Seqs]]:
        """The tags that start with `prefix`, in order, and their records."""
        for place in range(bisect_left(self._tags, prefix), len(self._tags)):
            if not self._tags[place].startswith(prefix):
                return
            yield self._tags[place], self._seqs_at(place)

    def _seqs_at(self, place: int) -> Seqs:
        rows = self._rows[self._starts[place] : self._starts[place + 1]]
        return rows.astype(np.uint64) + np.uint64(self.first_seq)

    def encoded(self, count: int) -> bytes:
        """The `.tags` file of a segment of `count` records."""
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
    """The table in a `.tags` file. Raises `Damaged` unless it speaks for exactly the tagged among `rows`."""
    count, body = open_sidecar(raw, _MAGIC, first_seq)
    table = _parsed(body, first_seq)
    tagged = np.flatnonzero(rows["flags"] & HAS_TAG)
    if count != len(rows) or not np.array_equal(np.sort(table._rows), tagged):
        raise sidecar_damaged(first_seq, "its tags are not those of the records")
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
        raise sidecar_damaged(first_seq, f"its table of tags is cut short: {error}") from error
    if int(counts.sum(dtype=np.uint64)) != row_count or names != sorted(set(names)):
        raise sidecar_damaged(first_seq, "its table of tags contradicts itself")
    return TagTable(first_seq, names, counts, rows)


def _names(text: bytes, lengths: npt.NDArray[np.uint16]) -> list[str]:
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    if len(text) != (ends[-1] if ends else 0):
        raise ValueError("the names do not fill their room")
    return [text[end - length : end].decode() for end, length in zip(ends, lengths.tolist(), strict=True)]


def tags_of_frames(data: Buffer, rows: IndexRows, first_seq: int) -> TagTable:
    """The table, from the records themselves. Raises `Damaged` when one with a tag cannot be read."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for place in np.flatnonzero(rows["flags"] & HAS_TAG).tolist():
        seq = first_seq + place
        try:
            found[str(verify(data, rows[place], seq).tag, "utf-8")].append(place)
        except UnicodeDecodeError as error:
            raise Damaged(f"the tag of record {seq} is no text: {error}", {"first_seq": seq}) from error
    return TagTable.of(first_seq, found)
