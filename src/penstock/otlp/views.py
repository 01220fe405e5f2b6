"""Views of batches for engines with fewer types than Arrow: Spark, DuckDB, Parquet readers.

| batch | view |
|---|---|
| `attributes` and other typed maps | `attributes_text`, `map<string, string>`, with lists and maps as JSON |
| ids, `fixed_size_binary` | hexadecimal text, or `binary` on request |
| times in nanoseconds | times in microseconds, truncated, not rounded |
| unsigned numbers | `int64`; a number that does not fit becomes the largest `int64` |
| dictionaries | their values |

A view cannot be converted back to OTLP. `duration_ns` keeps the nanoseconds that times lose.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.otlp.columns import offsets_of, text_of
from penstock.otlp.schema import ANY_VALUE, ATTRIBUTES, Signal, schema_of

TEXT_MAP: Final = pa.map_(pa.string(), pa.string())
_TIME: Final = pa.timestamp("us", tz="UTC")
_DUPLICATES: Final = frozenset({"body_any"})
"""The columns that a view leaves out. `body` has the text of `body_any`."""
_INT64_MAX: Final = 2**63 - 1
_DIGITS: Final = np.array([f"{byte:02x}".encode() for byte in range(256)], "S2")


def view(batch: pa.RecordBatch, *, hex_ids: bool = True) -> pa.RecordBatch:
    """Convert a batch with the columns of a signal as described in the table above."""
    fields, columns = [], []
    for field, column in zip(batch.schema, batch.columns, strict=True):
        if field.name in _DUPLICATES:
            continue
        columns.append(_plain(column, hex_ids))
        fields.append(_field(field, hex_ids))
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


@cache
def view_schema(signal: Signal, *, hex_ids: bool = True) -> pa.Schema:
    """Return the columns of the view of `signal`."""
    return pa.schema([_field(field, hex_ids) for field in schema_of(signal) if field.name not in _DUPLICATES])


def _field(field: pa.Field, hex_ids: bool) -> pa.Field:
    name = f"{field.name}_text" if field.type in (ATTRIBUTES, ANY_VALUE) else field.name
    return pa.field(name, _plain_type(field.type, hex_ids))


def _plain_type(kind: pa.DataType, hex_ids: bool) -> pa.DataType:
    if kind == ATTRIBUTES:
        return TEXT_MAP
    if kind == ANY_VALUE:
        return pa.string()
    if pa.types.is_struct(kind):
        return pa.struct([_field(field, hex_ids) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(_plain_type(kind.value_type, hex_ids))
    if pa.types.is_fixed_size_binary(kind):
        return pa.string() if hex_ids else pa.binary()
    if pa.types.is_timestamp(kind):
        return _TIME
    if pa.types.is_dictionary(kind):
        return kind.value_type
    return pa.int64() if pa.types.is_unsigned_integer(kind) else kind


def _plain(column: pa.Array, hex_ids: bool) -> pa.Array:
    kind = column.type
    if kind == ATTRIBUTES:
        return attributes_text(column)
    if kind == ANY_VALUE:
        return text_of(column)
    if pa.types.is_struct(kind):
        inner = [_plain(column.field(place), hex_ids) for place in range(kind.num_fields)]
        fields = [_field(field, hex_ids) for field in kind]
        return pa.StructArray.from_arrays(inner, fields=fields, mask=column.is_null())
    if pa.types.is_list(kind):
        start, offsets = offsets_of(column)
        inside = column.values.slice(start, int(offsets[-1]))
        return pa.ListArray.from_arrays(pa.array(offsets), _plain(inside, hex_ids), mask=_mask(column))
    if pa.types.is_fixed_size_binary(kind):
        return hex_text(column) if hex_ids else column.cast(pa.binary())
    if pa.types.is_timestamp(kind):
        return column.cast(_TIME, safe=False)
    if pa.types.is_dictionary(kind):
        return column.dictionary_decode()
    if pa.types.is_uint64(kind):
        most = pa.scalar(_INT64_MAX, pa.uint64())
        return pc.min_element_wise(column, most, skip_nulls=False).cast(pa.int64())
    return column.cast(pa.int64()) if pa.types.is_unsigned_integer(kind) else column


def attributes_text(column: pa.MapArray) -> pa.MapArray:
    """Convert attribute values to text."""
    start, offsets = offsets_of(column)
    keys, items = (part.slice(start, int(offsets[-1])) for part in (column.keys, column.items))
    return pa.MapArray.from_arrays(pa.array(offsets), keys, text_of(items), type=TEXT_MAP, mask=_mask(column))


def _mask(column: pa.Array) -> pa.BooleanArray | None:
    return column.is_null() if column.null_count else None


def hex_text(column: pa.FixedSizeBinaryArray) -> pa.StringArray:
    """Convert ids to hexadecimal, and null to null."""
    width: int = column.type.byte_width
    count = len(column)
    if not count:
        return pa.array([], pa.string())
    cells = np.frombuffer(column.buffers()[1], np.uint8, count * width, column.offset * width)
    offsets = np.arange(0, 2 * width * (count + 1), 2 * width, dtype=np.int32)
    text = pa.StringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(_DIGITS[cells]))
    return pc.if_else(column.is_valid(), text, None) if column.null_count else text
