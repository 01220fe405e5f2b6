"""Building columns from messages, field by field."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from penstock.otlp.schema import (
    ANY_VALUE,
    ARRAY,
    ATTRIBUTES,
    BOOL,
    BYTES,
    DOUBLE,
    EMPTY,
    INT,
    MAP,
    OTHER,
    STR,
    TIME,
)

if TYPE_CHECKING:
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

_KINDS: Final = {
    "string_value": STR,
    "bool_value": BOOL,
    "int_value": INT,
    "double_value": DOUBLE,
    "array_value": ARRAY,
    "kvlist_value": MAP,
    "bytes_value": BYTES,
}


class Values:
    """A column of values of any kind."""

    def __init__(self) -> None:
        self._kinds: list[int | None] = []
        self._plain: tuple[list[object], ...] = ([], [], [], [], [], [])

    def add(self, value: AnyValue | None) -> None:
        """Add a value, or None where the message has none."""
        kind, cells = _cells(value)
        self._kinds.append(kind)
        for column, cell in zip(self._plain, cells, strict=True):
            column.append(cell)

    def finish(self) -> pa.StructArray:
        """Return the column."""
        missing = pa.array([kind is None for kind in self._kinds], pa.bool_())
        leaves = [pa.array(self._kinds, pa.int8())]
        for field, cells in zip(list(ANY_VALUE)[1:], self._plain, strict=True):
            leaves.append(pa.array(cells, field.type))
        return pa.StructArray.from_arrays(leaves, fields=list(ANY_VALUE), mask=missing)


_Cells = tuple[str | None, int | None, float | None, bool | None, bytes | None, bytes | None]
_NOTHING: Final[_Cells] = (None, None, None, None, None, None)


def _cells(value: AnyValue | None) -> tuple[int | None, _Cells]:
    """Return the kind of a value and its cells `str`, `int`, `double`, `bool`, `bytes`, `ser`."""
    if value is None:
        return None, _NOTHING
    field = value.WhichOneof("value")
    if field == "string_value":
        return STR, (value.string_value, None, None, None, None, None)
    if field == "int_value":
        return INT, (None, value.int_value, None, None, None, None)
    if field == "double_value":
        return DOUBLE, (None, None, value.double_value, None, None, None)
    if field == "bool_value":
        return BOOL, (None, None, None, value.bool_value, None, None)
    if field == "bytes_value":
        return BYTES, (None, None, None, None, value.bytes_value, None)
    if field is None:
        return EMPTY, _NOTHING
    return _KINDS.get(field, OTHER), (None, None, None, None, None, value.SerializeToString())


class Attributes:
    """A column of attributes."""

    def __init__(self) -> None:
        self._offsets: list[int] = [0]
        self._missing: list[bool] = []
        self._keys: list[str] = []
        self._values = Values()

    def add(self, pairs: Iterable[KeyValue] | None) -> None:
        """Add the attributes of a row, or None if the message that would have them is missing."""
        for pair in pairs or ():
            self._keys.append(pair.key)
            self._values.add(pair.value if pair.HasField("value") else None)
        self._offsets.append(len(self._keys))
        self._missing.append(pairs is None)

    def finish(self) -> pa.MapArray:
        """Return the column."""
        return pa.MapArray.from_arrays(
            pa.array(self._offsets, pa.int32()),
            pa.array(self._keys, pa.string()),
            self._values.finish(),
            type=ATTRIBUTES,
            mask=pa.array(self._missing, pa.bool_()),
        )


class Lists:
    """A column of lists of structs, given as rows of cells. Columns that are already arrays come last."""

    def __init__(self, kind: pa.ListType) -> None:
        self._kind = kind
        self._offsets: list[int] = [0]
        self._missing: list[bool] = []
        self.cells: list[tuple[object, ...]] = []

    def end_row(self, *, missing: bool = False) -> None:
        """End a row: its list is everything added to `cells` since the last call."""
        self._offsets.append(len(self.cells))
        self._missing.append(missing)

    def finish(self, **built: pa.Array) -> pa.ListArray:
        """Return the column. `built` are the fields that are already arrays."""
        return pa.ListArray.from_arrays(
            pa.array(self._offsets, pa.int32()),
            struct_of(self._kind.value_type, self.cells, built),
            type=self._kind,
            mask=pa.array(self._missing, pa.bool_()),
        )


def columns_of(
    schema: pa.Schema, names: Sequence[str], cells: Sequence[tuple[object, ...]]
) -> dict[str, pa.Array]:
    """Return the columns `names` from one tuple per row."""
    columns = zip(*cells, strict=True) if cells else [()] * len(names)
    return {
        name: _column(column, schema.field(name).type) for name, column in zip(names, columns, strict=True)
    }


def _column(cells: Sequence[object], kind: pa.DataType) -> pa.Array:
    return times(cells) if kind == TIME else pa.array(cells, kind)


def struct_of(
    kind: pa.StructType, cells: Sequence[tuple[object, ...]], built: dict[str, pa.Array]
) -> pa.StructArray:
    """Return an array of `kind`: the fields in `built` unchanged, the others from the tuples, in order."""
    plain = [field for field in kind if field.name not in built]
    columns = list(zip(*cells, strict=True)) if cells else [()] * len(plain)
    arrays = dict(built)
    for field, column in zip(plain, columns, strict=True):
        arrays[field.name] = _column(column, field.type)
    return pa.StructArray.from_arrays([arrays[field.name] for field in kind], fields=list(kind))


def times(nanoseconds: Sequence[object]) -> pa.TimestampArray:
    """Convert nanoseconds since 1970 to times, and 0 to null. From 2262 on times are negative, losslessly."""
    unsigned = np.array(nanoseconds, np.uint64)
    return pa.array(unsigned.view(np.int64), pa.int64(), mask=unsigned == 0).cast(TIME)
