"""Messages out of columns: what the builders did, taken back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from penstock.otlp.schema import BOOL, BYTES, DOUBLE, EMPTY, INT, STR

if TYPE_CHECKING:
    from google.protobuf.internal.containers import RepeatedCompositeFieldContainer
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

__all__ = ["AttributeReader", "ListReader", "ValueReader", "nanoseconds"]

_LEAVES: Final = {STR: "str", INT: "int", DOUBLE: "double", BOOL: "bool", BYTES: "bytes"}
_FIELDS: Final = {
    STR: "string_value",
    INT: "int_value",
    DOUBLE: "double_value",
    BOOL: "bool_value",
    BYTES: "bytes_value",
}


class ValueReader:
    """Values of any kind, to be put into messages."""

    def __init__(self, column: pa.StructArray) -> None:
        valid = column.is_valid().to_pylist()
        self._kinds = [
            kind if there else None
            for kind, there in zip(column.field("type").to_pylist(), valid, strict=True)
        ]
        self._leaves: dict[int, list[object]] = {}
        for kind, name in _LEAVES.items():
            if kind in self._kinds:
                self._leaves[kind] = column.field(name).to_pylist()
        self._serialized: list[bytes] = column.field("ser").to_pylist()

    def has(self, place: int) -> bool:
        """Whether there is a value at all."""
        return self._kinds[place] is not None

    def fill(self, place: int, value: AnyValue) -> None:
        """Put the value at `place` into a message of its own."""
        kind = self._kinds[place]
        if kind in self._leaves:
            setattr(value, _FIELDS[kind], self._leaves[kind][place])
        elif kind == EMPTY or self._serialized[place] is None:
            value.SetInParent()
        else:
            value.MergeFromString(self._serialized[place])


class AttributeReader:
    """Attributes, row by row."""

    def __init__(self, column: pa.MapArray) -> None:
        offsets = np.asarray(column.offsets, np.int64)
        start, length = int(offsets[0]), int(offsets[-1] - offsets[0])
        self._offsets: list[int] = (offsets - start).tolist()
        self._keys: list[str] = column.keys.slice(start, length).to_pylist()
        self._values = ValueReader(column.items.slice(start, length))

    def fill(self, row: int, pairs: RepeatedCompositeFieldContainer[KeyValue]) -> None:
        """Put the attributes of `row` into a message."""
        for place in range(self._offsets[row], self._offsets[row + 1]):
            pair = pairs.add()
            pair.key = self._keys[place]
            if self._values.has(place):
                self._values.fill(place, pair.value)


class ListReader:
    """Lists of structs, row by row: the places of a row, and the fields' cells by place."""

    def __init__(self, column: pa.ListArray) -> None:
        offsets = np.asarray(column.offsets, np.int64)
        start, length = int(offsets[0]), int(offsets[-1] - offsets[0])
        self._offsets: list[int] = (offsets - start).tolist()
        self.structs: pa.StructArray = column.values.slice(start, length)

    def places(self, row: int) -> range:
        """Where the list of `row` stands."""
        return range(self._offsets[row], self._offsets[row + 1])


def nanoseconds(column: pa.TimestampArray) -> list[int]:
    """Times as the protocol has them: unsigned, 0 for an unknown one."""
    found: list[int] = np.asarray(column.cast(pa.int64()).fill_null(0), np.int64).view(np.uint64).tolist()
    return found
