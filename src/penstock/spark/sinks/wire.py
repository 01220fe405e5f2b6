"""An encoder of Protobuf's wire format that encodes a whole column at a time.

A column is an array of bytes with one value for each row. A null is a field that the row does not have.
Bytes that all rows share are plain `bytes`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.protowire import varint

Part: TypeAlias = pa.LargeBinaryArray | bytes
"""A column of bytes, or bytes that all rows share."""

RECORD_COLUMNS: Final = pa.schema([("value", pa.binary()), ("metadata", pa.binary())])
"""The columns that an encoder passes to the queue's writer."""

_TYPE: Final = pa.large_binary()
_EMPTY: Final = pa.scalar(b"", _TYPE)
_VARINT, _BYTES = 0, 2
_MORE: Final = 0x80
_VARINT_BYTES_MAX: Final = 10


def as_column(values: pa.Array) -> pa.LargeBinaryArray:
    """Return a text or binary array of any Arrow type as a column."""
    return pc.cast(pc.cast(values, pa.large_string()) if pa.types.is_string(values.type) else values, _TYPE)


def rows_of(data: npt.NDArray[np.uint8], ends: npt.NDArray[np.int64]) -> pa.LargeBinaryArray:
    """Return a column whose row i is `data[ends[i] : ends[i + 1]]`, without copying the data."""
    buffers = [None, pa.py_buffer(np.ascontiguousarray(ends, np.int64)), pa.py_buffer(data)]
    return pa.LargeBinaryArray.from_buffers(_TYPE, len(ends) - 1, buffers)


def ends_of(column: pa.LargeBinaryArray) -> npt.NDArray[np.int64]:
    """Return the start of each row in the bytes of the column, then the end of the last row."""
    if not len(column):
        return np.zeros(1, np.int64)
    held = np.frombuffer(column.buffers()[1], np.int64)
    return held[column.offset : column.offset + len(column) + 1]


def content(column: pa.LargeBinaryArray, start: int, stop: int) -> bytes:
    """Return the concatenated bytes of the rows from `start` to `stop`."""
    ends = ends_of(column)
    data = column.buffers()[2]
    return b"" if data is None else bytes(memoryview(data)[int(ends[start]) : int(ends[stop])])


def fixed_rows(matrix: npt.NDArray[np.uint8]) -> pa.LargeBinaryArray:
    """Return the rows of a matrix of bytes as a column."""
    count, width = matrix.shape
    return rows_of(np.ascontiguousarray(matrix).reshape(-1), np.arange(count + 1, dtype=np.int64) * width)


def varints(numbers: npt.NDArray[np.uint64]) -> pa.LargeBinaryArray:
    """Encode each number as a varint: seven bits per byte, lowest bits first."""
    if int(numbers.max(initial=0)) < _MORE:
        return fixed_rows(numbers.astype(np.uint8)[:, None])
    sizes = np.ones(len(numbers), np.int64)
    for place in range(1, _VARINT_BYTES_MAX):
        sizes += (numbers >> np.uint64(7 * place)) > 0
    width = int(sizes.max(initial=1))
    places = np.arange(width)
    groups: npt.NDArray[np.uint8] = (numbers[:, None] >> (7 * places).astype(np.uint64)).astype(
        np.uint8
    ) & np.uint8(_MORE - 1)
    groups[places < sizes[:, None] - 1] |= _MORE
    used = places < sizes[:, None]
    return rows_of(groups[used], np.concatenate(([0], np.cumsum(sizes))))


def message(number: int, payload: bytes) -> bytes:
    """Return a length-delimited field (bytes, text or a message) that is the same for all rows."""
    return varint(number << 3 | _BYTES) + varint(len(payload)) + payload


def flag(number: int, value: int) -> bytes:
    """Return a varint field that is the same for all rows."""
    return varint(number << 3 | _VARINT) + varint(value)


def integers(number: int, values: npt.NDArray[np.int64], valid: pa.BooleanArray) -> pa.LargeBinaryArray:
    """Return an integer field, null in rows that are not valid."""
    return _null_unless(valid, joined(varint(number << 3 | _VARINT), varints(values.view(np.uint64))))


def field(number: int, *parts: Part) -> pa.LargeBinaryArray:
    """Return a length-delimited field with the concatenated parts, null in rows where a part is null."""
    return joined(varint(number << 3 | _BYTES), varints(_lengths(parts)), *parts)


def joined(*parts: Part) -> pa.LargeBinaryArray:
    """Return the concatenated parts, null in rows where a part is null."""
    given = [pa.scalar(part, _TYPE) if isinstance(part, bytes) else part for part in parts]
    return pc.binary_join_element_wise(*given, _EMPTY)


def present(column: pa.LargeBinaryArray) -> pa.LargeBinaryArray:
    """Replace nulls with empty bytes: absent fields take no bytes."""
    return pc.fill_null(column, _EMPTY) if column.null_count else column


def pieces(column: pa.LargeBinaryArray, bytes_max: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of runs of rows of up to `bytes_max` together. A longer row is a run by itself."""
    ends = ends_of(column)
    start = 0
    while start < len(column):
        stop = int(np.searchsorted(ends, ends[start] + bytes_max, side="right")) - 1
        stop = max(start + 1, stop)
        yield start, stop
        start = stop


def _null_unless(valid: pa.BooleanArray, column: pa.LargeBinaryArray) -> pa.LargeBinaryArray:
    return pc.if_else(valid, column, pa.scalar(None, _TYPE)) if valid.false_count else column


def _lengths(parts: tuple[Part, ...]) -> npt.NDArray[np.uint64]:
    """Return the total length of the parts for each row. It is meaningless for a row with a null."""
    constant = sum(len(part) for part in parts if isinstance(part, bytes))
    columns = [part for part in parts if not isinstance(part, bytes)]
    total = np.full(len(columns[0]), constant, np.int64)
    for column in columns:
        total += pc.fill_null(pc.binary_length(column), 0).to_numpy(zero_copy_only=False)
    return total.view(np.uint64)
