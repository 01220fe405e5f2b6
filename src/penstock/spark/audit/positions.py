"""The comparison of records by position, which finds duplicate and missing records in a table.

A position is (shard, sequence, index). Tables are compared in windows of micro-batches, so memory does not
grow with the table.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from penstock.blocking import loop_thread
from penstock.clock import SYSTEM_CLOCK
from penstock.errors import NotFound, Unavailable, Unsupported
from penstock.findings import Severity
from penstock.ids import SYSTEM_RNG
from penstock.objects import ByteRange, ObjectStore, open_store
from penstock.retry import RetryPolicy, retry
from penstock.spark.audit.ledger_reader import AuditFinding, Facts, Span, spans_between, spans_text
from penstock.spark.pipeline.ledger import BatchLine
from penstock.spark.tables.spec import TableSpec

if TYPE_CHECKING:
    from pyiceberg.table import Table as CatalogTable

SHOWN: Final = 20
"""The most positions that a finding lists. The others are only counted."""
WINDOW_RECORDS: Final = 2_000_000

Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The positions of records, as columns of equal length."""

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
        """Return the positions within a run of consecutive lines."""
        keep = np.zeros(len(self.index), np.bool_)
        for shard, end in lines[-1].end.items():
            start = lines[0].start.get(shard, 0)
            keep |= (
                (self.shard == shard) & (self.sequence >= start) & (self.sequence < end) & (self.index >= 0)
            )
        return self.take(keep)


def windows(lines: Iterable[BatchLine], records: int = WINDOW_RECORDS) -> Iterator[list[BatchLine]]:
    """Yield runs of consecutive lines with up to `records` records, or one longer line."""
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
) -> list[AuditFinding]:
    """Compare the records of one window in a sink and in the dead letters with the ledger.

    The sink must be one to one: every row has the position of one record.
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


def _duplicates(name: str, lines: Sequence[BatchLine], extra: Places) -> AuditFinding:
    shown = [_place(int(s), int(q), int(i)) for s, q, i in zip(*_first(extra), strict=True)]
    return AuditFinding(
        severity=Severity.PROBLEM,
        subject=f"sink {name}",
        text=f"{len(extra.index)} rows too many in micro-batches {lines[0].batch} to {lines[-1].batch}, dead "
        f"letters included: {', '.join(dict.fromkeys(shown))}{_more(len(extra.index))}",
        advice="something else wrote them, or a second pipeline has the same queue and table",
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


def _compare_line(
    name: str, line: BatchLine, by_shard: dict[int, Places], facts: Facts
) -> Iterator[AuditFinding]:
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
        yield AuditFinding(
            severity=Severity.PROBLEM,
            subject=f"sink {name}",
            text=f"micro-batch {line.batch} ({spans_text(spans)}) has {count - expected} records more than "
            "the ledger says were delivered and dead-lettered",
            advice="something else wrote them, or the ledger was replaced",
            spans=spans,
        )
        return
    yield _missing(name, line, spans, found, expected - count, facts)


def _missing(
    name: str, line: BatchLine, spans: tuple[Span, ...], found: Places, lost: int, facts: Facts
) -> AuditFinding:
    places: list[tuple[int, int, int]] = []
    if line.dropped(name) == 0 and not line.skipped:
        places = list(_absent(spans, found, facts))
    if places:
        shown = ", ".join(_place(*place) for place in places[:SHOWN])
        which = f"{shown}{_more(lost)}" if len(places) >= min(lost, SHOWN) else f"{shown} and others"
    else:
        which = "they cannot be distinguished from records that were dropped on purpose"
    return AuditFinding(
        severity=Severity.PROBLEM,
        subject=f"sink {name}",
        text=f"micro-batch {line.batch} ({spans_text(spans)}) lacks {lost} records: {which}",
        advice="rows were deleted, overwritten or lost after delivery; the table's history shows how",
        spans=spans,
    )


def _absent(spans: Iterable[Span], found: Places, facts: Facts) -> Iterator[tuple[int, int, int]]:
    """Yield missing positions, at most `SHOWN` of each sequence.

    If the batch is deleted, derive its length from its highest existing record.
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


_POLICY = RetryPolicy(deadline_s=60.0)


class PositionScan(Protocol):
    """A table as it was when the scan was opened."""

    @property
    def columns(self) -> frozenset[str]:
        """The names of the table's columns."""
        ...

    def read(self, columns: list[str], sequence: str, low: int, high: int) -> Iterator[pa.RecordBatch]:
        """Yield `columns` of the rows whose column `sequence` is `low` to `high`, in arbitrary order."""
        ...


def open_scan(spec: TableSpec) -> PositionScan | None:
    """Open a scan of a table, or return None if the table does not exist.

    Raise `Unsupported` if only Spark can read it.
    """
    if spec.kind == "delta":
        return _open_delta(spec)
    return _open_iceberg(spec) if spec.kind == "iceberg" else _open_parquet(spec)


class _DatasetScan:
    def __init__(self, dataset: ds.Dataset) -> None:
        self._dataset = dataset
        self.columns = frozenset(dataset.schema.names)

    def read(self, columns: list[str], sequence: str, low: int, high: int) -> Iterator[pa.RecordBatch]:
        wanted = (ds.field(sequence) >= low) & (ds.field(sequence) <= high)
        yield from self._dataset.scanner(columns=columns, filter=wanted).to_batches()


def _open_delta(spec: TableSpec) -> PositionScan | None:
    from deltalake.exceptions import DeltaProtocolError

    from penstock.spark.tables.delta import load_delta

    table = load_delta(spec)
    try:
        return None if table is None else _DatasetScan(table.to_pyarrow_dataset())
    except DeltaProtocolError as error:
        raise Unsupported(f"{spec.where} has features that cannot be read without Spark") from error


class _IcebergScan:
    def __init__(self, table: CatalogTable) -> None:
        self._table = table
        self.columns = frozenset(field.name for field in table.schema().fields)

    def read(self, columns: list[str], sequence: str, low: int, high: int) -> Iterator[pa.RecordBatch]:
        wanted = f"{sequence} >= {low} and {sequence} <= {high}"
        yield from self._table.scan(wanted, tuple(columns)).to_arrow_batch_reader()


def _open_iceberg(spec: TableSpec) -> PositionScan | None:
    from penstock.spark.tables.iceberg import load_iceberg

    table = load_iceberg(spec)
    return None if table is None else _IcebergScan(table)


def _open_parquet(spec: TableSpec) -> PositionScan | None:
    store = open_store(spec.store)
    listed = loop_thread().run(store.list(""))
    paths = [info for info in listed if info.key.endswith(".parquet") and not _is_hidden(info.key)]
    if not paths:
        loop_thread().run(store.close())
        return None
    return _FolderScan(store, {info.key: info.size for info in paths})


def _is_hidden(key: str) -> bool:
    return any(part.startswith(("_", ".")) and "=" not in part for part in key.split("/"))


class _FolderScan:
    """A scan of a Parquet folder. It reads footers once, and only the requested row groups and columns."""

    def __init__(self, store: ObjectStore, sizes: dict[str, int]) -> None:
        self._store = store
        self._sizes = sizes
        self._footers: dict[str, pq.FileMetaData] = {}
        self.columns = frozenset(self._open(min(sizes)).schema_arrow.names)

    def _open(self, key: str) -> pq.ParquetFile:
        source = pa.PythonFile(_StoredFile(self._store, key, self._sizes[key]), mode="r")
        file = pq.ParquetFile(source, metadata=self._footers.get(key))
        self._footers[key] = file.metadata
        return file

    def read(self, columns: list[str], sequence: str, low: int, high: int) -> Iterator[pa.RecordBatch]:
        wanted = (ds.field(sequence) >= low) & (ds.field(sequence) <= high)
        for key in self._sizes:
            known = self._footers.get(key)
            groups = None if known is None else _groups(known, sequence, low, high)
            if groups == []:
                continue
            file = self._open(key)
            groups = _groups(file.metadata, sequence, low, high)
            for batch in file.iter_batches(row_groups=groups, columns=columns) if groups else ():
                yield batch.filter(wanted)


def _groups(footer: pq.FileMetaData, sequence: str, low: int, high: int) -> list[int]:
    """Return the row groups that may have rows with a `sequence` from `low` to `high`."""
    found = []
    for group in range(footer.num_row_groups):
        row_group = footer.row_group(group)
        columns = [row_group.column(place) for place in range(row_group.num_columns)]
        stats = next((column.statistics for column in columns if column.path_in_schema == sequence), None)
        if stats is None or not stats.has_min_max or (stats.max >= low and stats.min <= high):
            found.append(group)
    return found


class _StoredFile(io.RawIOBase):
    """An object in a store as a file that can be read in parts."""

    def __init__(self, store: ObjectStore, key: str, size: int) -> None:
        self._store = store
        self._key = key
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        length = min(self._size - self._at if size < 0 else size, self._size - self._at)
        if length <= 0:
            return b""
        wanted = ByteRange(start=self._at, length=length)

        async def fetch() -> bytes:
            blob = await retry(
                lambda: self._store.get(self._key, wanted), _POLICY, clock=SYSTEM_CLOCK, rng=SYSTEM_RNG
            )
            return bytes(blob.data)

        try:
            data = loop_thread().run(fetch())
        except NotFound as error:
            raise Unavailable(f"{self._key} was removed while it was being read; try again") from error
        self._at += len(data)
        return data
