"""A segment as bytes: a plain Arrow IPC file with one record batch per bundle.

Any Arrow implementation opens it. Each batch says in its own metadata which log entry it came from, when it
was accepted and how many rows it has.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import Corrupt
from penstock.quiver.arrow_sink import ArrowSink
from penstock.quiver.dictionaries import unify
from penstock.quiver.model import Pending, SegmentInfo
from penstock.quiver.open_segment import SealedSegment
from penstock.quiver.segment_meta import schema_metadata, user_metadata
from penstock.quiver.slots import event_columns
from penstock.storage import Buffer

__all__ = ["BundleMetadata", "SegmentReader", "describe", "event_column", "write_segment"]

_WAL_SEQ: Final = b"quiver.wal_seq"
_INGEST: Final = b"quiver.ingest_ns"
_ITEMS: Final = b"quiver.items"
_ARROW_ERRORS: Final = (pa.ArrowException, OSError, ValueError, KeyError)


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleMetadata:
    """What one record batch says of itself."""

    wal_seq: int
    ingest_ns: int
    items: int


def describe(sealed: SealedSegment, seq: int, *, core_id: int, created_by: str) -> SegmentInfo:
    """The facts of a segment before it is written: size and checksum are still missing (0 and zeros)."""
    parts = sealed.parts
    event_min, event_max = _event_range(sealed)
    return SegmentInfo(
        seq=seq,
        signal=sealed.signal,
        slot=sealed.key.slot,
        schema_hash=sealed.key.fingerprint.hex(),
        bundle_count=len(parts),
        item_count=sum(part.batch.num_rows for part in parts),
        ingest_ns_min=min(part.ingest_ns for part in parts),
        ingest_ns_max=max(part.ingest_ns for part in parts),
        event_ns_min=event_min,
        event_ns_max=event_max,
        wal_start=sealed.wal_start,
        wal_end=max(part.wal_end for part in parts),
        wal_seq_min=min(part.wal_seq for part in parts),
        wal_seq_max=max(part.wal_seq for part in parts),
        core_id=core_id,
        file_size=0,
        xxh3="0" * 16,
        created_by=created_by,
    )


def event_column(schema: pa.Schema, slot: int) -> str | None:
    """The column with the event time of a slot's rows, if the schema has one."""
    for name in event_columns(slot):
        place = schema.get_field_index(name)
        if place >= 0 and pa.types.is_timestamp(schema.field(place).type):
            return name
    return None


def _event_range(sealed: SealedSegment) -> tuple[int | None, int | None]:
    name = event_column(sealed.parts[0].batch.schema, sealed.key.slot)
    if name is None:
        return None, None
    times = pa.chunked_array([part.batch.column(name) for part in sealed.parts])
    low_high = pc.min_max(times.cast(pa.timestamp("ns"), safe=False))
    low, high = low_high["min"].value, low_high["max"].value
    return low, high


def write_segment(
    sealed: SealedSegment, info: SegmentInfo, write: Callable[[Sequence[Buffer]], None]
) -> tuple[int, str]:
    """Hand the file's bytes to `write`, in order, and return their number and XXH3 in hex.

    Equal input makes equal bytes, so that a write that failed can be repeated over what it left.
    """
    batches = unify([part.batch for part in sealed.parts])
    schema = batches[0].schema
    metadata = (user_metadata(schema.metadata) or {}) | schema_metadata(info)
    sink = ArrowSink(write)
    with sink.stream() as stream, pa.ipc.new_file(stream, schema.with_metadata(metadata)) as writer:
        for part, batch in zip(sealed.parts, batches, strict=True):
            writer.write_batch(batch, custom_metadata=_bundle_metadata(part))
    return sink.size, sink.xxh3


def _bundle_metadata(part: Pending) -> dict[bytes, bytes]:
    return {
        _WAL_SEQ: str(part.wal_seq).encode(),
        _INGEST: str(part.ingest_ns).encode(),
        _ITEMS: str(part.batch.num_rows).encode(),
    }


class SegmentReader:
    """One segment's bytes, read without copying. Batches stay valid after the reader and the file are gone.

    Safe to use from several threads. Opening raises `Corrupt` for bytes that are no Arrow file.
    """

    def __init__(self, view: Buffer, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        try:
            self._reader = pa.ipc.open_file(pa.py_buffer(view))
            self._metadata = self._reader.schema.metadata
        except _ARROW_ERRORS as error:
            raise self._corrupt(error) from error
        self._user_metadata = user_metadata(self._metadata)

    @property
    def schema(self) -> pa.Schema:
        """The schema of the batches, with Quiver's own metadata left out."""
        return self._reader.schema.with_metadata(self._user_metadata)

    @property
    def metadata(self) -> Mapping[bytes, bytes] | None:
        """The metadata of the schema as it is in the file."""
        metadata: Mapping[bytes, bytes] | None = self._metadata
        return metadata

    @property
    def bundle_count(self) -> int:
        return int(self._reader.num_record_batches)

    def batch(self, bundle: int) -> pa.RecordBatch:
        """One bundle. Raises `Corrupt`, and `IndexError` for a number that the segment does not have."""
        return self._read(bundle)[0].replace_schema_metadata(self._user_metadata)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Every bundle in order."""
        return (self.batch(bundle) for bundle in range(self.bundle_count))

    def bundle(self, bundle: int) -> BundleMetadata:
        """What one bundle says of itself."""
        metadata = self._read(bundle)[1] or {}
        try:
            return BundleMetadata(
                wal_seq=int(metadata[_WAL_SEQ]),
                ingest_ns=int(metadata[_INGEST]),
                items=int(metadata[_ITEMS]),
            )
        except (KeyError, ValueError) as error:
            raise self._corrupt(error) from error

    def validate(self, info: SegmentInfo) -> None:
        """Look at every value, for a file whose checksum is not known. Raises `Corrupt`."""
        items = 0
        try:
            for bundle in range(self.bundle_count):
                batch, _ = self._read(bundle)
                batch.validate(full=True)
                items += batch.num_rows
        except _ARROW_ERRORS as error:
            raise self._corrupt(error) from error
        if (self.bundle_count, items) != (info.bundle_count, info.item_count):
            raise Corrupt(f"{self._path}: it has {self.bundle_count} bundles where {info.bundle_count} were")

    def _read(self, bundle: int) -> tuple[pa.RecordBatch, Mapping[bytes, bytes] | None]:
        if not 0 <= bundle < self.bundle_count:
            raise IndexError(f"{self._path} has {self.bundle_count} bundles, not one with number {bundle}")
        try:
            with self._lock:
                found = self._reader.get_batch_with_custom_metadata(bundle)
        except _ARROW_ERRORS as error:
            raise self._corrupt(error) from error
        return found.batch, found.custom_metadata

    def _corrupt(self, error: Exception) -> Corrupt:
        return Corrupt(f"{self._path} is not a readable segment: {error}")
