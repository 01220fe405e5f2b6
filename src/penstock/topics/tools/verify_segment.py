"""The files of one segment against their checksums, wherever each of them is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np

from penstock.errors import NotFound
from penstock.topics.data_directory import segment_path
from penstock.topics.errors import Damaged
from penstock.topics.segment import HOLE, LOST, IndexRows, Part, SegmentEntry, damaged_rows, read_index
from penstock.topics.segment_deleted import decode_deleted
from penstock.topics.segment_store import LocalSegmentStore, SegmentStore
from penstock.topics.segment_tags import decode_tags
from penstock.topics.snapshot import TopicEntry
from penstock.topics.tools.verify_report import Finding, Severity, VerifyReport
from penstock.topics.wording import counted

__all__ = ["SegmentCheck"]

_Bad: TypeAlias = list[tuple[int, Damaged]]


class SegmentCheck:
    """One segment, as far as the metadata says that its files count.

    `hot` has everything but perhaps the data; those are read from `data`, or not at all if that is None.
    """

    def __init__(
        self,
        report: VerifyReport,
        topic: TopicEntry,
        entry: SegmentEntry,
        *,
        hot: SegmentStore,
        data: SegmentStore | None,
    ) -> None:
        self._report = report
        self._topic = topic
        self._entry = entry
        self._hot = hot
        self._data = data

    def run(self) -> None:
        """Add what is wrong to the report."""
        entry = self._entry
        index = self._read(self._hot, Part.IDX, entry.idx_bytes)
        data = self._read_data()
        if index is None:
            return
        try:
            rows = read_index(index, entry.first_seq, entry.idx_xxh3)
        except Damaged as error:
            self._damaged(Part.IDX, str(error), 0, entry.idx_bytes)
            return
        if data is not None:
            self._check_records(data, rows)
        self._check_deleted()
        if entry.sealed:  # the tags of a segment that still grows may be ahead of the snapshot
            self._check_tags(rows)

    def _read_data(self) -> memoryview | None:
        if self._data is not None:
            return self._read(self._data, Part.DATA, self._entry.data_bytes)
        records = counted(self._entry.count, "record")
        text = f"{records} of {self._topic.name} not checked: they are in the cold tier; give --cold"
        path = segment_path(self._topic, self._entry, Part.DATA)
        self._report.findings.append(Finding(severity=Severity.NOTE, path=path, text=text))
        return None

    def _check_records(self, data: memoryview, rows: IndexRows) -> None:
        first_seq = self._entry.first_seq
        self._report.stored_records += int(np.count_nonzero(rows["length"]))
        for bad in _neighbours(damaged_rows(data, rows, first_seq), rows, first_seq):
            (low, error), (high, _) = bad[0], bad[-1]
            text = str(error) if len(bad) == 1 else f"{len(bad):,} records cannot be read; the first: {error}"
            start, end = _span(rows[low - first_seq], rows[high - first_seq])
            self._damaged(Part.DATA, text, start, end, (low, high))

    def _check_deleted(self) -> None:
        raw = self._whole(Part.DEL)
        wanted = self._entry.deleted
        if raw is None:
            if wanted:
                told = counted(wanted, "deleted record")
                self._damaged(Part.DEL, f"the file is missing; it told of {told}")
            return
        try:
            known = int(decode_deleted(raw, self._entry.first_seq, self._entry.count).sum())
        except Damaged as error:
            self._damaged(Part.DEL, str(error), 0, len(raw))
            return
        if known < wanted:
            text = f"it tells of {counted(known, 'deleted record')} instead of {wanted:,}"
            self._damaged(Part.DEL, text, 0, len(raw))

    def _check_tags(self, rows: IndexRows) -> None:
        raw = self._whole(Part.TAGS)
        if raw is not None:
            try:
                decode_tags(raw, self._entry.first_seq, rows)
            except Damaged as error:
                self._damaged(Part.TAGS, f"{error}; it can be made again from the records", 0, len(raw))

    def _read(self, store: SegmentStore, part: Part, size: int) -> memoryview | None:
        try:
            content = self._around_bad(store, part, size)
            if content is None:
                content = store.read_range(self._entry.first_seq, part, 0, size)
        except NotFound:
            where = "" if store is self._hot else " in the cold tier"
            self._damaged(part, f"the file is missing{where}")
            return None
        except Damaged as error:
            self._damaged(part, str(error))
            return None
        self._report.count(size)
        return content

    def _around_bad(self, store: SegmentStore, part: Part, size: int | None) -> memoryview | None:
        """What a device can read of a file, with zeros for the rest, which is reported.

        None if the file is not on a device of this machine, or is too short.
        """
        if not isinstance(store, LocalSegmentStore):
            return None
        view = store.opened(self._entry.first_seq, part)
        if size is not None and len(view) < size:
            return None
        content = view[:size]
        for start, end in view.bad:
            # Which records are lost with it is told for each of them.
            self._report.findings.append(
                Finding(
                    severity=Severity.PROBLEM,
                    path=segment_path(self._topic, self._entry, part),
                    text="the device cannot read this part; keep the file, and check the device",
                    start=start,
                    end=end,
                )
            )
        return content

    def _whole(self, part: Part) -> memoryview | None:
        try:
            content = self._around_bad(self._hot, part, None)
            if content is None:
                content = self._hot.view(self._entry.first_seq, part)
        except NotFound:
            return None
        self._report.count(len(content))
        return content

    def _damaged(
        self,
        part: Part,
        text: str,
        start: int | None = None,
        end: int | None = None,
        seqs: tuple[int, int] | None = None,
    ) -> None:
        first, last = (self._entry.first_seq, self._entry.end_seq - 1) if seqs is None else seqs
        self._report.findings.append(
            Finding(
                severity=Severity.PROBLEM,
                path=segment_path(self._topic, self._entry, part),
                text=text,
                start=start,
                end=end,
                topic=self._topic.name,
                first_seq=first,
                last_seq=last,
            )
        )


def _neighbours(bad: _Bad, rows: IndexRows, first_seq: int) -> Iterator[_Bad]:
    """Damaged records that follow each other, holes aside; those that have no bytes apart from the others."""
    places = np.cumsum((rows["flags"] & HOLE) == 0)
    lost = (rows["flags"] & LOST) != 0
    group: _Bad = []
    for seq, error in bad:
        if group:
            here, before = seq - first_seq, group[-1][0] - first_seq
            if places[here] != places[before] + 1 or lost[here] != lost[before]:
                yield group
                group = []
        group.append((seq, error))
    if group:
        yield group


def _span(low: np.void, high: np.void) -> tuple[int | None, int | None]:
    """The bytes from one record to another; none if they never had any."""
    if not low["length"]:
        return None, None
    return int(low["offset"]), int(high["offset"]) + int(high["length"])
