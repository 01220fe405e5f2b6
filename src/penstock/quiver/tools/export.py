"""Export of segments as Parquet files, for tools that cannot open Arrow files.

Each segment becomes one file, `<slot>/core-<n>-seg-<number>.parquet`, which is created atomically. Existing
files are kept, so a repeated export continues an interrupted one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import NotFound, PenstockError
from penstock.quiver.model import SegmentInfo, slot_name
from penstock.quiver.segments.file import ArrowSink, SegmentReader, plain_type
from penstock.quiver.segments.source import SegmentSource
from penstock.quiver.tools.dataset import has_view, text_view
from penstock.storage import Buffer, FileSystem, publish

TimestampUnit: TypeAlias = Literal["ns", "us", "ms"]

_ROW_GROUP_ROWS: Final = 1_000_000
_TMP: Final = ".tmp"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """The result of an export. `gone` counts segments that were removed before they could be read."""

    files: int
    rows: int
    byte_count: int
    kept: int
    gone: int


def export_parquet(
    source: SegmentSource,
    infos: Iterable[SegmentInfo],
    target: str,
    *,
    fs: FileSystem,
    timestamps: TimestampUnit = "ns",
    view: bool = False,
    on_progress: Callable[[SegmentInfo], None] | None = None,
) -> ExportReport:
    """Write segments below the directory `target`. Raise `Corrupt` at a damaged segment.

    With `timestamps` other than "ns", times lose precision. With `view`, spans, logs and metrics are written
    as `penstock.otlp.view` shows them, which also reduces the precision of times.
    """
    files = rows = byte_count = kept = gone = 0
    for info in infos:
        if on_progress is not None:
            on_progress(info)
        path = _path(target, info)
        if _exists(fs, path):
            kept += 1
            continue
        try:
            reader = source.reader(info)
        except NotFound:
            gone += 1
            continue
        batches = _shown(reader, info.slot) if view and has_view(info.slot) else reader.batches()
        byte_count += _export_one(batches, path, fs, timestamps)
        files += 1
        rows += info.item_count
    return ExportReport(files=files, rows=rows, byte_count=byte_count, kept=kept, gone=gone)


def _path(target: str, info: SegmentInfo) -> str:
    name = f"core-{info.core_id}-seg-{info.seq:016d}.parquet"
    return os.path.join(target, slot_name(info.slot), name)


def _exists(fs: FileSystem, path: str) -> bool:
    try:
        fs.stat(path)
    except NotFound:
        return False
    return True


def _shown(reader: SegmentReader, slot: int) -> Iterator[pa.RecordBatch]:
    return (text_view(batch, slot) for batch in reader.batches())


def _export_one(
    batches: Iterator[pa.RecordBatch], path: str, fs: FileSystem, timestamps: TimestampUnit
) -> int:
    fs.make_dirs(os.path.dirname(path))
    staged = path + _TMP
    with contextlib.suppress(NotFound):
        fs.unlink(staged)
    file = fs.create(staged)
    try:
        size = _write_parquet(batches, file.write, timestamps)
        file.datasync()
    except Exception:
        with contextlib.suppress(PenstockError):
            fs.unlink(staged)
        raise
    finally:
        file.close()
    publish(fs, staged, path)
    return size


def _write_parquet(
    batches: Iterator[pa.RecordBatch], write: Callable[[Sequence[Buffer]], None], timestamps: TimestampUnit
) -> int:
    first = next(batches)
    schema = pa.schema([field.with_type(_parquet_type(field.type)) for field in first.schema])
    sink = ArrowSink(write)
    with (
        sink.stream() as stream,
        pq.ParquetWriter(
            stream,
            schema,
            compression="zstd",
            coerce_timestamps=None if timestamps == "ns" else timestamps,
            allow_truncated_timestamps=True,
        ) as writer,
    ):
        for table in _groups(itertools.chain([first], batches), schema):
            writer.write_table(table, row_group_size=_ROW_GROUP_ROWS)
    return sink.size


def _groups(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.Table]:
    """Yield bundles joined into tables of about one row group."""
    pending: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        pending.append(batch)
        rows += batch.num_rows
        if rows >= _ROW_GROUP_ROWS:
            yield pa.Table.from_batches(pending).cast(schema)
            pending, rows = [], 0
    if pending:
        yield pa.Table.from_batches(pending).cast(schema)


def _parquet_type(kind: pa.DataType) -> pa.DataType:
    """Return the type for Parquet, which has its own dictionaries but loses nested ones."""
    return kind if pa.types.is_dictionary(kind) else plain_type(kind)
