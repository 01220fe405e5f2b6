"""Columns that follow from others: they are for whoever queries, and are left out on the way back to OTLP."""

from __future__ import annotations

import base64

import pyarrow as pa
import pyarrow.compute as pc

from penstock.otlp.any_json import json_of

__all__ = ["duration_of", "text_of"]


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
