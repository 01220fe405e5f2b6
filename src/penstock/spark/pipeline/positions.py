"""Every record by its place: which are in a table twice, and which are not there.

Pure arithmetic on columns: a record is (shard, sequence, index). A table is compared a window of
micro-batches at a time, so memory does not grow with the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.buffer import Severity
from penstock.spark.pipeline.books import Facts, Finding, Span, spans_between, spans_text
from penstock.spark.pipeline.ledger import BatchLine

__all__ = ["SHOWN", "WINDOW_RECORDS", "Places", "compare_places", "windows"]

SHOWN: Final = 20
"""How many places a finding names; the others are counted."""
WINDOW_RECORDS: Final = 2_000_000

Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Columns of places, as many as there are rows."""

    shard: Ints
    sequence: Ints
    index: Ints

    @classmethod
    def gather(cls, parts: Iterable[Places]) -> Places:
        held = list(parts)
        empty = np.empty(0, np.int64)
        return cls(
            shard=np.concatenate([empty, *(part.shard for part in held)]),
            sequence=np.concatenate([empty, *(part.sequence for part in held)]),
            index=np.concatenate([empty, *(part.index for part in held)]),
        )

    def sorted(self) -> Places:
        return self.take(np.lexsort((self.index, self.sequence, self.shard)))

    def take(self, which: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> Places:
        return Places(shard=self.shard[which], sequence=self.sequence[which], index=self.index[which])

    def within(self, lines: Sequence[BatchLine]) -> Places:
        """The places between the first and the last of consecutive lines, whose shards all have a range."""
        keep = np.zeros(len(self.index), np.bool_)
        for shard, end in lines[-1].end.items():
            start = lines[0].start.get(shard, 0)
            keep |= (
                (self.shard == shard) & (self.sequence >= start) & (self.sequence < end) & (self.index >= 0)
            )
        return self.take(keep)


def windows(lines: Iterable[BatchLine], records: int = WINDOW_RECORDS) -> Iterator[list[BatchLine]]:
    """Runs of lines that follow each other, of about so many records."""
    window: list[BatchLine] = []
    for line in lines:
        full = sum(other.read for other in window) + line.read > records
        if window and (full or line.batch != window[-1].batch + 1 or line.start != window[-1].end):
            yield window
            window = []
        window.append(line)
    if window:
        yield window


def compare_places(
    name: str, lines: Sequence[BatchLine], delivered: Places, letters: Places, facts: Facts
) -> list[Finding]:
    """What a sink and the dead letters hold of one window, record by record, against the ledger.

    The sink is one to one: every row has the place of one record.
    """
    held = Places.gather([delivered, letters]).within(lines).sorted()
    same = np.zeros(len(held.index), np.bool_)
    same[1:] = (
        (held.shard[1:] == held.shard[:-1])
        & (held.sequence[1:] == held.sequence[:-1])
        & (held.index[1:] == held.index[:-1])
    )
    findings = []
    if same.any():
        findings.append(_duplicates(name, lines, held.take(same)))
    distinct = held.take(~same)
    by_shard = {shard: distinct.take(distinct.shard == shard) for shard in lines[-1].end}
    for line in lines:
        findings += _compare_line(name, line, by_shard, facts)
    return findings


def _duplicates(name: str, lines: Sequence[BatchLine], extra: Places) -> Finding:
    shown = [_place(int(s), int(q), int(i)) for s, q, i in zip(*_first(extra), strict=True)]
    return Finding(
        severity=Severity.PROBLEM,
        subject=f"sink {name}",
        text=f"{len(extra.index)} rows too many in micro-batches {lines[0].batch} to {lines[-1].batch}, dead "
        f"letters included: {', '.join(dict.fromkeys(shown))}{_more(len(extra.index))}",
        advice="somebody wrote them by another way, or a second pipeline has the same queue and table",
        spans=_touched(extra),
    )


def _first(places: Places) -> tuple[Ints, Ints, Ints]:
    return places.shard[:SHOWN], places.sequence[:SHOWN], places.index[:SHOWN]


def _place(shard: int, sequence: int, index: int) -> str:
    return f"({sequence}, {index})" if shard == 0 else f"({sequence}, {index}) of shard {shard}"


def _more(total: int) -> str:
    return f" and {total - SHOWN} more" if total > SHOWN else ""


def _touched(places: Places) -> tuple[Span, ...]:
    pairs = np.unique(np.stack([places.shard, places.sequence]), axis=1)[:, :SHOWN].T
    return tuple(Span(shard=int(shard), first=int(sequence), last=int(sequence)) for shard, sequence in pairs)


def _compare_line(name: str, line: BatchLine, by_shard: dict[int, Places], facts: Facts) -> Iterator[Finding]:
    expected = line.rows[name] + line.dead
    parts = []
    for shard, end in line.end.items():
        places = by_shard[shard]
        low, high = np.searchsorted(places.sequence, [line.start.get(shard, 0), end])
        parts.append(places.take(np.arange(low, high)))
    found = Places.gather(parts)
    count = len(found.index)
    if count == expected:
        return
    spans = spans_between(line.start, line.end)
    if count > expected:
        yield Finding(
            severity=Severity.PROBLEM,
            subject=f"sink {name}",
            text=f"micro-batch {line.batch} ({spans_text(spans)}) has {count - expected} records more than "
            "the ledger says were delivered and dead-lettered",
            advice="somebody wrote them by another way, or the ledger was replaced",
            spans=spans,
        )
        return
    yield _missing(name, line, spans, found, expected - count, facts)


def _missing(
    name: str, line: BatchLine, spans: tuple[Span, ...], found: Places, lost: int, facts: Facts
) -> Finding:
    places: list[tuple[int, int, int]] = []
    if line.dropped(name) == 0 and not line.skipped:
        places = list(_absent(spans, found, facts))
    if places:
        shown = ", ".join(_place(*place) for place in places[:SHOWN])
        which = f"{shown}{_more(lost)}" if len(places) >= min(lost, SHOWN) else f"{shown} and others"
    else:
        which = "which ones cannot be told from those that were left out on purpose"
    return Finding(
        severity=Severity.PROBLEM,
        subject=f"sink {name}",
        text=f"micro-batch {line.batch} ({spans_text(spans)}) lacks {lost} records: {which}",
        advice="rows were deleted, overwritten or lost after delivery; the table's history tells how",
        spans=spans,
    )


def _absent(spans: Iterable[Span], found: Places, facts: Facts) -> Iterator[tuple[int, int, int]]:
    """Places that are not there, `SHOWN` of each sequence at most.

    Where the batch is collected, its length is taken from its highest record that is there.
    """
    for span in spans:
        counts = facts.queue[span.shard].counts if span.shard in facts.queue else {}
        mine = found.take(found.shard == span.shard)
        for sequence in range(span.first, span.last + 1):
            low, high = np.searchsorted(mine.sequence, [sequence, sequence + 1])
            there = mine.index[low:high]
            length = counts.get(sequence, int(there.max()) + 1 if len(there) else 0)
            for index in np.setdiff1d(np.arange(length), there)[:SHOWN]:
                yield span.shard, sequence, int(index)
