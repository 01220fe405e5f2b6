"""Committed segments as one table for queries: a `pyarrow.dataset` over the segment files.

Segments that cannot match are skipped by their sidecars, before a file is opened. Schemas of one signal may
differ between segments. The table has the columns of all of them, with nulls where a segment has none, and
plain values where only some have dictionaries. A text view shows telemetry to tools with fewer types than
Arrow: attributes as text, ids in hexadecimal, and so on.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.fs as pafs

from penstock.errors import InvalidInput, Unsupported
from penstock.quiver.model import SegmentInfo, Signal, flat_slot, signal_of, slot_name
from penstock.quiver.segments.file import event_column, plain_type

Instant: TypeAlias = dt.datetime | int
"""A point in time: a datetime with a time zone, or nanoseconds since the Unix epoch."""

_MICROSECOND_NS: Final = 1000
_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_FLAT: Final = (50, 51, 52)
_RAW: Final = (60, 61, 62)


def to_ns(moment: Instant) -> int:
    """Return nanoseconds since the Unix epoch. Raise `InvalidInput` for a datetime without a time zone."""
    if isinstance(moment, int):
        return moment
    if moment.tzinfo is None:
        raise InvalidInput(f"{moment.isoformat()} has no time zone; add one")
    return (moment - _EPOCH) // dt.timedelta(microseconds=1) * _MICROSECOND_NS


def select(
    infos: Iterable[SegmentInfo],
    *,
    signal: Signal | None = None,
    slot: int | None = None,
    since: Instant | None = None,
    until: Instant | None = None,
) -> list[SegmentInfo]:
    """Return the segments that may hold matching rows. `since` is inclusive, `until` is exclusive.

    Times are event times, or ingestion times for a segment without event times.
    """
    low = None if since is None else to_ns(since)
    high = None if until is None else to_ns(until)
    wanted = flat_slot(signal) if signal is not None and slot is None else slot
    return [
        info
        for info in infos
        if (wanted is None or info.slot == wanted)
        and (low is None or _last_ns(info) >= low)
        and (high is None or _first_ns(info) < high)
    ]


def _first_ns(info: SegmentInfo) -> int:
    return info.ingest_ns_min if info.event_ns_min is None else info.event_ns_min


def _last_ns(info: SegmentInfo) -> int:
    return info.ingest_ns_max if info.event_ns_max is None else info.event_ns_max


def unified_schema(schemas: Sequence[pa.Schema]) -> pa.Schema:
    """Return the columns of all schemas, by name, without metadata.

    Raise `InvalidInput` if one column has types that cannot be unified.
    """
    plain = [schema.remove_metadata() for schema in schemas]
    try:
        return pa.unify_schemas(plain, promote_options="default")
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        pass
    try:
        return pa.unify_schemas([_plain_schema(schema) for schema in plain], promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise InvalidInput(f"the segments cannot be combined into one table: {error}") from error


def _plain_schema(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field.with_type(plain_type(field.type)) for field in schema])


def scan_segments(
    files: Sequence[tuple[SegmentInfo, str]],
    *,
    since: Instant | None = None,
    until: Instant | None = None,
) -> ds.Dataset:
    """Return one dataset over segment files of one slot, filtered by event time if the slot has one.

    Files are opened when the dataset is read, which fails if a segment was removed. Without files the result
    is an empty table without columns.
    """
    if not files:
        return ds.dataset(pa.table({}))
    paths = [path for _, path in files]
    schema = unified_schema([_schema_of(path) for path in paths])
    # Do not map files: a bad sector would kill the process.
    found = ds.dataset(paths, schema=schema, format="ipc", filesystem=pafs.LocalFileSystem(use_mmap=False))
    column = event_column(schema, files[0][0].slot)
    if column is None or (since is None and until is None):
        return found
    return found.filter(_between(schema.field(column), since, until))


def _schema_of(path: str) -> pa.Schema:
    with pa.OSFile(path) as file:
        return pa.ipc.open_file(file).schema


def _between(field: pa.Field, since: Instant | None, until: Instant | None) -> pc.Expression:
    terms = []
    if since is not None:
        terms.append(pc.field(field.name) >= _scalar(since, field.type))
    if until is not None:
        terms.append(pc.field(field.name) < _scalar(until, field.type))
    return terms[0] if len(terms) == 1 else terms[0] & terms[1]


def _scalar(moment: Instant, kind: pa.TimestampType) -> pa.Scalar:
    """Return the time in the unit of the column, rounded up, so that no earlier row is included."""
    ns_per_unit = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1000, "ns": 1}[kind.unit]
    return pa.scalar(-(-to_ns(moment) // ns_per_unit), pa.int64()).cast(kind)


def has_view(slot: int) -> bool:
    """Return whether a slot holds spans, logs or metrics as one wide table."""
    return slot in _FLAT


def text_view(batch: pa.RecordBatch, slot: int) -> pa.RecordBatch:
    """Return the batch as `penstock.otlp.view` shows it. Raise `Unsupported` for a slot without a view."""
    if not has_view(slot):
        raise Unsupported(f"view: {slot_name(slot)} has no view; spans, logs and metrics have one")
    from penstock.otlp import view

    return view(batch)


def known_schema(slot: int) -> pa.Schema | None:
    """Return the schema of a slot if it is known without reading a segment, otherwise None."""
    if slot in _RAW:
        return pa.schema([pa.field("data", pa.binary())])
    if not has_view(slot):
        return None
    from penstock.otlp import Signal, schema_of

    return schema_of(Signal(signal_of(slot).value))
