"""From nested Arrow to the flat columns, and columns that follow from others.

From nested Arrow to the flat columns: whole columns at a time, most of them without a copy.

What cannot be said this way raises `Unflattenable`, and the request is walked message by message instead.

Columns that follow from others: they are for whoever queries, and are left out on the way back to OTLP.
"""

from __future__ import annotations

import base64
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.otlp.json_form import json_of
from penstock.otlp.schema import ANY_VALUE, ARRAY, ATTRIBUTES, BOOL, BYTES, DOUBLE, INT, MAP, STR, TIME


class Unflattenable(Exception):
    """Something that only the messages can tell: go through them, one by one."""


_MORE: Final = 0x80


def varint(number: int) -> bytes:
    """A length as the wire has it."""
    out = bytearray()
    while number >= _MORE:
        out.append(number & 0x7F | _MORE)
        number >>= 7
    out.append(number)
    return bytes(out)


def field_content(message: bytes | None, number: int) -> bytes:
    """The bytes of field `number`, which is all that `message` holds. Raises `Unflattenable` if it is not."""
    tag = number << 3 | 2
    if not message or message[0] != tag:
        raise Unflattenable("a serialized value is not of its type")
    length = shift = 0
    for place in range(1, len(message)):
        length |= (message[place] & 0x7F) << shift
        shift += 7
        if message[place] < _MORE:
            content = message[place + 1 :]
            if len(content) != length:
                break
            return content
    raise Unflattenable("a serialized value is not whole")


def duration_of(start: pa.TimestampArray, end: pa.TimestampArray) -> pa.Int64Array:
    """Nanoseconds from `start` to `end`; null where one of them is."""
    return pc.subtract(end.cast(pa.int64()), start.cast(pa.int64()))


def text_of(values: pa.StructArray) -> pa.StringArray:
    """Every value as a person reads it: text as it is, numbers in digits, the rest as JSON, bytes in base64.

    Null where there is no value, or an empty one.
    """
    text = values.field("str")
    for name in ("int", "double", "bool"):
        leaf = values.field(name)
        if leaf.null_count < len(leaf):
            text = pc.coalesce(text, leaf.cast(pa.string()))
    for name, write in (("bytes", _base64), ("ser", json_of)):
        leaf = values.field(name)
        if leaf.null_count < len(leaf):
            cells = [None if cell is None else write(cell) for cell in leaf.to_pylist()]
            text = pc.coalesce(text, pa.array(cells, pa.string()))
    return text


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


_KINDS: Final = (
    ("string_value", STR),
    ("bool_value", BOOL),
    ("int_value", INT),
    ("double_value", DOUBLE),
    ("array_value", ARRAY),
    ("kvlist_value", MAP),
    ("bytes_value", BYTES),
)


def any_values(values: pa.StructArray) -> pa.StructArray:
    """Values of any kind."""
    if _has(values.field("string_value_strindex")):
        raise Unflattenable("a value refers to a table of strings, which requests have not")
    kinds = np.zeros(len(values), np.int8)
    for name, kind in _KINDS:
        leaf = values.field(name)
        if leaf.null_count == 0:
            kinds[:] = kind
        elif _has(leaf):
            kinds[np.asarray(leaf.is_valid())] = kind
    leaves = [
        pa.array(kinds),
        values.field("string_value"),
        values.field("int_value"),
        values.field("double_value"),
        values.field("bool_value"),
        values.field("bytes_value"),
        _serialized(values),
    ]
    mask = values.is_null() if values.null_count else None
    return pa.StructArray.from_arrays(leaves, fields=list(ANY_VALUE), mask=mask)


def _has(leaf: pa.Array) -> bool:
    return bool(leaf.null_count < len(leaf))


def _serialized(values: pa.StructArray) -> pa.BinaryArray:
    """Arrays and maps as the bytes of their value. There are few: they are parsed and written one by one."""
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue

    cells: list[bytes | None] | None = None
    for name, tag in (("array_value", b"\x2a"), ("kvlist_value", b"\x32")):
        leaf = values.field(name)
        if not _has(leaf):
            continue
        cells = cells or [None] * len(values)
        for place in np.flatnonzero(np.asarray(leaf.is_valid())).tolist():
            inner: bytes = leaf[place].as_py()
            try:
                value = AnyValue.FromString(tag + varint(len(inner)) + inner)
            except DecodeError as error:
                raise Unflattenable(str(error)) from error
            cells[place] = value.SerializeToString()
    return pa.nulls(len(values), pa.binary()) if cells is None else pa.array(cells, pa.binary())


def attributes(pairs: pa.ListArray, missing: pa.BooleanArray | None = None) -> pa.MapArray:
    """Lists of keys and values as maps; null where `missing` says so."""
    start, offsets = offsets_of(pairs)
    entries = pairs.values.slice(start, int(offsets[-1]))
    return pa.MapArray.from_arrays(
        pa.array(offsets),
        entries.field("key"),
        any_values(entries.field("value")),
        type=ATTRIBUTES,
        mask=missing,
    )


def offsets_of(lists: pa.ListArray) -> tuple[int, npt.NDArray[np.int32]]:
    """Where the values of `lists` begin, and their offsets from there."""
    offsets = np.asarray(lists.offsets, np.int32)
    start = int(offsets[0])
    return start, offsets - np.int32(start) if start else offsets


def parents(lists: pa.ListArray) -> npt.NDArray[np.int64]:
    """For every value of `lists` the row that it belongs to."""
    _, offsets = offsets_of(lists)
    return np.repeat(np.arange(len(lists), dtype=np.int64), np.diff(offsets))


def list_of(lists: pa.ListArray, kind: pa.ListType, fields: dict[str, pa.Array]) -> pa.ListArray:
    """Lists of structs with other fields, as long as `lists`."""
    _, offsets = offsets_of(lists)
    inner = list(kind.value_type)
    structs = pa.StructArray.from_arrays([fields[field.name] for field in inner], fields=inner)
    return pa.ListArray.from_arrays(pa.array(offsets), structs, type=kind)


def times(nanoseconds: pa.UInt64Array) -> pa.TimestampArray:
    """Nanoseconds since 1970 as times, 0 as null."""
    unsigned = np.asarray(nanoseconds)
    unknown = unsigned == 0
    if not unknown.any():
        return nanoseconds.view(TIME)
    return pa.array(unsigned.view(np.int64), pa.int64(), mask=unknown).view(TIME)


def ids(column: pa.BinaryArray, kind: pa.FixedSizeBinaryType) -> pa.FixedSizeBinaryArray:
    """Ids of `kind`, null where there are no bytes. Raises `Unflattenable` for one of a wrong length."""
    width: int = kind.byte_width
    lengths = np.asarray(pc.binary_length(column))
    there = lengths != 0
    if not np.all(lengths[there] == width):
        raise Unflattenable("an id has a wrong length")
    _, offsets, data = column.buffers()
    first = np.frombuffer(offsets, np.int32, 1, column.offset * 4)[0] if len(column) else 0
    if there.all():
        return pa.FixedSizeBinaryArray.from_buffers(
            kind, len(column), [None, _slice(data, int(first), width * len(column))]
        )
    cells = np.zeros((len(column), width), np.uint8)
    if there.any():
        count = int(there.sum())
        cells[there] = np.frombuffer(data, np.uint8, count * width, int(first)).reshape(count, width)
    valid = pa.py_buffer(np.packbits(there, bitorder="little"))
    return pa.FixedSizeBinaryArray.from_buffers(kind, len(column), [valid, pa.py_buffer(cells)])


def _slice(data: pa.Buffer | None, start: int, length: int) -> pa.Buffer:
    return pa.py_buffer(b"") if data is None else data.slice(start, length)
