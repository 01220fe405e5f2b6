"""The file of a segment: a plain Arrow IPC file with one record batch per bundle.

Any Arrow implementation can open it. The metadata of each batch says which log entry it came from, when it
was accepted and how many rows it has.

An Arrow file permits one dictionary per field, but each batch comes with its own. Columns are unified in the
first of these ways that works:

1. unchanged, if they contain no dictionary;
2. with one dictionary for all batches;
3. the same with wider indices;
4. decoded to plain values.

Batch boundaries and values never change. Only the encoding may change, and with it the column type.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc
from xxhash import xxh3_64, xxh3_64_hexdigest

from penstock import __version__
from penstock.errors import Corrupt
from penstock.quiver.model import Pending, SegmentInfo, event_columns
from penstock.quiver.segments.metadata import schema_metadata, user_metadata
from penstock.storage import Buffer

if TYPE_CHECKING:
    from penstock.quiver.model import SealedSegment

_WIDER: Final = {
    pa.int8(): (pa.int16(), pa.int32()),
    pa.uint8(): (pa.int16(), pa.int32()),
    pa.int16(): (pa.int32(),),
    pa.uint16(): (pa.int32(),),
}
CREATED_BY: Final = f"penstock {__version__}"
_GROUP_BYTES: Final = 1024 * 1024
_WAL_SEQ: Final = b"quiver.wal_seq"
_INGEST: Final = b"quiver.ingest_ns"
_ITEMS: Final = b"quiver.items"
_ARROW_ERRORS: Final = (pa.ArrowException, OSError, ValueError, KeyError)


def unify(batches: Sequence[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """Return the batches with the schema of the first one and one dictionary per field.

    The schemas of the batches must be equal except for metadata.
    """
    first = batches[0].schema
    fields: list[pa.Field] = []
    columns: list[list[pa.Array]] = []
    for place, field in enumerate(first):
        chunks = [batch.column(place) for batch in batches]
        if has_dictionary(field.type) and len(chunks) > 1:
            chunks = _unified(chunks, field.type)
        fields.append(field.with_type(chunks[0].type) if chunks[0].type != field.type else field)
        columns.append(chunks)
    schema = pa.schema(fields, metadata=first.metadata)
    return [_batch(index, batch, columns, schema) for index, batch in enumerate(batches)]


def _batch(
    index: int, batch: pa.RecordBatch, columns: Sequence[Sequence[pa.Array]], schema: pa.Schema
) -> pa.RecordBatch:
    if not columns:
        return batch.replace_schema_metadata(schema.metadata)
    return pa.RecordBatch.from_arrays([column[index] for column in columns], schema=schema)


def has_dictionary(kind: pa.DataType) -> bool:
    """Return whether the type contains a dictionary at any depth."""
    if pa.types.is_dictionary(kind):
        return True
    if isinstance(kind, pa.BaseExtensionType):
        return has_dictionary(kind.storage_type)
    return any(has_dictionary(kind.field(place).type) for place in range(kind.num_fields))


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the type without dictionaries at any depth."""
    return _mapped(kind, None)


def _unified(chunks: list[pa.Array], kind: pa.DataType) -> list[pa.Array]:
    for wider in _candidates(kind):
        try:
            cast = chunks if wider == kind else [chunk.cast(wider) for chunk in chunks]
            return list(pa.chunked_array(cast, wider).unify_dictionaries().chunks)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            continue
    return [_decoded(chunk, plain_type(kind)) for chunk in chunks]


def _candidates(kind: pa.DataType) -> Iterator[pa.DataType]:
    yield kind
    for index in (pa.int16(), pa.int32()):
        wider = _mapped(kind, index)
        if wider != kind:
            yield wider


def _decoded(chunk: pa.Array, plain: pa.DataType) -> pa.Array:
    if pa.types.is_dictionary(chunk.type) and not has_dictionary(chunk.type.value_type):
        return chunk.dictionary_decode()
    try:
        return chunk.cast(plain)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        # Arrow cannot convert some types, such as dictionaries in unions. They are rare, so convert each
        # value.
        return pa.array(chunk.to_pylist(), plain)


def _mapped(kind: pa.DataType, index: pa.DataType | None) -> pa.DataType:
    """Return `kind` with dictionary indices widened to `index`, or without dictionaries if it is None."""
    if isinstance(kind, pa.BaseExtensionType):
        return _mapped(kind.storage_type, index) if has_dictionary(kind) else kind
    if pa.types.is_dictionary(kind):
        if index is None:
            return _mapped(kind.value_type, None)
        wider = index if index in _WIDER.get(kind.index_type, ()) else kind.index_type
        return pa.dictionary(wider, kind.value_type, kind.ordered)
    return _rebuilt(kind, index) if has_dictionary(kind) else kind


def _rebuilt(kind: pa.DataType, index: pa.DataType | None) -> pa.DataType:
    """Return a nested type with its children mapped."""
    children = [kind.field(place) for place in range(kind.num_fields)]
    if pa.types.is_map(kind):
        key, item = kind.key_field, kind.item_field
        return pa.map_(_mapped_field(key, index), _mapped_field(item, index), kind.keys_sorted)
    mapped = [_mapped_field(child, index) for child in children]
    if pa.types.is_struct(kind):
        return pa.struct(mapped)
    if pa.types.is_union(kind):
        return pa.union(mapped, kind.mode, kind.type_codes)
    if pa.types.is_run_end_encoded(kind):
        return pa.run_end_encoded(kind.run_end_type, mapped[1].type)
    return _list_of(kind, mapped[0])


def _list_of(kind: pa.DataType, child: pa.Field) -> pa.DataType:
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(child, kind.list_size)
    if pa.types.is_large_list(kind):
        return pa.large_list(child)
    if pa.types.is_list_view(kind):
        return pa.list_view(child)
    if pa.types.is_large_list_view(kind):
        return pa.large_list_view(child)
    return pa.list_(child)


def _mapped_field(field: pa.Field, index: pa.DataType | None) -> pa.Field:
    return field.with_type(_mapped(field.type, index))


class ArrowSink:
    """Forwards the bytes that Arrow writes into `stream`, and counts and hashes them.

    Arrow itself joins small pieces, because a file of many small batches has thousands of them.
    """

    closed = False

    def __init__(self, write: Callable[[Sequence[Buffer]], None]) -> None:
        self._write = write
        self._hash = xxh3_64()
        self.size = 0

    @contextmanager
    def stream(self) -> Iterator[pa.NativeFile]:
        """Yield the stream for Arrow. All bytes have been forwarded when the block ends."""
        with pa.BufferedOutputStream(pa.PythonFile(self, mode="w"), _GROUP_BYTES) as stream:
            yield stream

    @property
    def xxh3(self) -> str:
        """The XXH3-64 of all bytes, in hex."""
        return self._hash.hexdigest()

    def write(self, data: Buffer) -> int:
        view = memoryview(data).cast("B")
        self._hash.update(view)
        self._write([view])
        self.size += len(view)
        return len(view)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        """Do nothing: every piece is forwarded immediately."""

    def close(self) -> None:
        """Do nothing: the owner of `write` closes the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleMetadata:
    """The metadata of one record batch."""

    wal_seq: int
    ingest_ns: int
    items: int


def describe(sealed: SealedSegment, seq: int, *, core_id: int, created_by: str) -> SegmentInfo:
    """Return the metadata of a segment that is not written yet. Size and checksum are 0 and zeros."""
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
    """Return the column with the event time of a slot's rows, or None if the schema has none."""
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
    """Pass the bytes of the file to `write` in order. Return their number and their XXH3 in hex.

    Equal input produces equal bytes, so a failed write can be repeated over its remains.
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


def check_bytes(view: Buffer, info: SegmentInfo, path: str) -> None:
    """Raise `Corrupt` unless these are the bytes that were written."""
    size = memoryview(view).nbytes
    if size != info.file_size:
        raise Corrupt(f"{path} has {size} bytes where {info.file_size} were written")
    if xxh3_64_hexdigest(view) != info.xxh3:
        raise Corrupt(f"{path} does not match the checksum in its sidecar")


class SegmentReader:
    """A segment file that is read without copying. Batches stay valid after the reader and the file are gone.

    Safe to use from several threads. The constructor raises `Corrupt` for bytes that are not an Arrow file.
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
        """The schema of the batches, without the metadata that Quiver added."""
        return self._reader.schema.with_metadata(self._user_metadata)

    @property
    def metadata(self) -> Mapping[bytes, bytes] | None:
        """The metadata of the schema, as stored in the file."""
        metadata: Mapping[bytes, bytes] | None = self._metadata
        return metadata

    @property
    def bundle_count(self) -> int:
        return int(self._reader.num_record_batches)

    def batch(self, bundle: int) -> pa.RecordBatch:
        """Return one bundle. Raise `Corrupt`, or `IndexError` for a number beyond the last."""
        return self._read(bundle)[0].replace_schema_metadata(self._user_metadata)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield every bundle in order."""
        return (self.batch(bundle) for bundle in range(self.bundle_count))

    def bundle(self, bundle: int) -> BundleMetadata:
        """Return the metadata of one bundle."""
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
        """Check every value of a file whose checksum is not known. Raise `Corrupt`."""
        items = 0
        try:
            for bundle in range(self.bundle_count):
                batch, _ = self._read(bundle)
                batch.validate(full=True)
                items += batch.num_rows
        except _ARROW_ERRORS as error:
            raise self._corrupt(error) from error
        if (self.bundle_count, items) != (info.bundle_count, info.item_count):
            raise Corrupt(f"{self._path}: expected {info.bundle_count} bundles, found {self.bundle_count}")

    def _read(self, bundle: int) -> tuple[pa.RecordBatch, Mapping[bytes, bytes] | None]:
        if not 0 <= bundle < self.bundle_count:
            raise IndexError(f"{self._path} has {self.bundle_count} bundles, so there is no bundle {bundle}")
        try:
            with self._lock:
                found = self._reader.get_batch_with_custom_metadata(bundle)
        except _ARROW_ERRORS as error:
            raise self._corrupt(error) from error
        return found.batch, found.custom_metadata

    def _corrupt(self, error: Exception) -> Corrupt:
        return Corrupt(f"{self._path} is not a readable segment: {error}")
