"""Conversion of a record batch to and from an Arrow IPC stream, and the fingerprint of its schema.

Two batches belong to the same stream if their fingerprints are equal. A fingerprint is a hash of a canonical
text of the schema without metadata: each field in order with its name, type and nullability, including nested
fields. Names are written as JSON strings, so that different names never produce the same text.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.ipc as ipc

from penstock.errors import Corrupt, InvalidInput
from penstock.quiver.wal.entry import SlotPart
from penstock.storage import Buffer

FINGERPRINT_BYTES: Final = 32
_DEPTH_MAX: Final = 64
_END_OF_STREAM: Final = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_SCHEMAS_MAX: Final = 64
_MARGIN_BYTES: Final = 64 * 1024
"""Space for the schema and for the padding between columns."""
_WRITING = ipc.IpcWriteOptions(use_threads=False)
_READING = ipc.IpcReadOptions(use_threads=False, ensure_alignment=ipc.Alignment.DataTypeSpecific)


@functools.lru_cache(maxsize=4096)
def fingerprint(schema: pa.Schema) -> bytes:
    """Return 32 bytes that are equal for schemas that differ only in metadata.

    Raise `InvalidInput` for a schema that is nested more than 64 levels deep.
    """
    return hashlib.blake2b(canonical_text(schema).encode(), digest_size=FINGERPRINT_BYTES).digest()


def canonical_text(schema: pa.Schema) -> str:
    """Return the text that is hashed. Equal schemas have the same text in every version of Arrow."""
    return _fields(schema, 0)


def _fields(fields: Iterable[pa.Field], depth: int) -> str:
    return ",".join(_field(field, depth) for field in fields)


def _field(field: pa.Field, depth: int) -> str:
    return f"{json.dumps(field.name)}:{_type(field.type, depth + 1)}{'?' if field.nullable else '!'}"


def _type(kind: pa.DataType, depth: int) -> str:
    if depth > _DEPTH_MAX:
        raise InvalidInput(f"a schema nested more than {_DEPTH_MAX} levels deep is not accepted")
    if isinstance(kind, pa.BaseExtensionType):
        return f"extension({json.dumps(str(kind))},{_type(kind.storage_type, depth + 1)})"
    if pa.types.is_dictionary(kind):
        inner = f"{_type(kind.index_type, depth + 1)},{_type(kind.value_type, depth + 1)}"
        return f"dictionary({inner},{'ordered' if kind.ordered else 'unordered'})"
    if pa.types.is_run_end_encoded(kind):
        return f"ree({_type(kind.run_end_type, depth + 1)},{_type(kind.value_type, depth + 1)})"
    if pa.types.is_map(kind):
        # The field names inside a map carry no meaning, and implementations disagree about them.
        order = "sorted" if kind.keys_sorted else "unsorted"
        value = f"{_type(kind.item_type, depth + 1)}{'?' if kind.item_field.nullable else '!'}"
        return f"map({_type(kind.key_type, depth + 1)},{value},{order})"
    if kind.num_fields:
        children = _fields((kind.field(place) for place in range(kind.num_fields)), depth)
        return f"{_head(kind)}({children})"
    return str(kind)


def _head(kind: pa.DataType) -> str:
    """Return the name of a nested type, without its children."""
    if pa.types.is_fixed_size_list(kind):
        return f"fixed_size_list[{kind.list_size}]"
    if pa.types.is_union(kind):
        return f"{kind.mode}_union[{','.join(map(str, kind.type_codes))}]"
    if pa.types.is_struct(kind):
        return "struct"
    return str(kind).partition("<")[0]


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """A known schema with the values derived from it."""

    schema: pa.Schema
    fingerprint: bytes
    message: memoryview
    has_dictionary: bool


class _Schemas:
    """A cache of recent schemas. Comparing two schemas costs far less than hashing one."""

    def __init__(self) -> None:
        self._known: tuple[_Known, ...] = ()

    def look_up(self, schema: pa.Schema) -> _Known:
        for known in self._known:
            # The comparison includes metadata: the message contains it, although the fingerprint does not.
            if known.schema.equals(schema, check_metadata=True):
                return known
        known = _Known(
            schema,
            fingerprint(schema),
            memoryview(schema.serialize()),
            _any_dictionary(field.type for field in schema),
        )
        self._known = (known, *self._known[: _SCHEMAS_MAX - 1])
        return known


_SCHEMAS = _Schemas()


def encode_part(slot: int, batch: pa.RecordBatch) -> SlotPart:
    """Return the entry part for `batch`. Its columns are copied once, into one contiguous buffer."""
    known = _SCHEMAS.look_up(batch.schema)
    payload = _with_dictionaries(batch) if known.has_dictionary else _plain(known, batch)
    return SlotPart(
        slot=slot,
        fingerprint=known.fingerprint,
        rows=batch.num_rows,
        payload=payload,
        byte_count=sum(map(len, payload)),
    )


def decode_batch(part: SlotPart) -> pa.RecordBatch:
    """Decode the batch of a part that was read back. Its columns are views of the log where possible.

    Raise `Corrupt` if the payload is not a single batch with the row count of the part.
    """
    (payload,) = part.payload
    try:
        with ipc.open_stream(pa.py_buffer(payload), options=_READING) as reader:
            batch = reader.read_next_batch()
    except (pa.ArrowException, StopIteration, OSError, ValueError) as error:
        raise Corrupt(f"the payload of slot {part.slot} is not an Arrow stream: {error}") from error
    if batch.num_rows != part.rows:
        raise Corrupt(f"the payload of slot {part.slot} has {batch.num_rows} rows, not {part.rows}")
    return batch


def _plain(known: _Known, batch: pa.RecordBatch) -> Sequence[Buffer]:
    # The messages of a stream are written one after another, so they need no common buffer.
    return [known.message, memoryview(batch.serialize()), _END_OF_STREAM]


def _with_dictionaries(batch: pa.RecordBatch) -> Sequence[Buffer]:
    """Write a stream into preallocated memory, because growing a buffer copies it."""
    room = pa.allocate_buffer(batch.nbytes + _MARGIN_BYTES)
    with contextlib.suppress(OSError), pa.FixedSizeBufferWriter(room) as sink:
        _write_stream(sink, batch)
        return [memoryview(room)[: sink.tell()]]
    growing = pa.BufferOutputStream()
    _write_stream(growing, batch)
    return [memoryview(growing.getvalue())]


def _write_stream(sink: pa.NativeFile, batch: pa.RecordBatch) -> None:
    with ipc.new_stream(sink, batch.schema, options=_WRITING) as writer:
        writer.write_batch(batch)


def _any_dictionary(types: Iterable[pa.DataType]) -> bool:
    for kind in types:
        if pa.types.is_dictionary(kind):
            return True
        storage = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
        if storage is not kind and _any_dictionary([storage]):
            return True
        if _any_dictionary(storage.field(place).type for place in range(storage.num_fields)):
            return True
    return False
