"""Telemetry for tools that know less than Arrow: attributes as text, ids in hexadecimal, and so on."""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from penstock.errors import Unsupported
from penstock.quiver.slots import signal_of, slot_name

__all__ = ["has_view", "known_schema", "text_view"]

_FLAT: Final = (50, 51, 52)
_RAW: Final = (60, 61, 62)


def has_view(slot: int) -> bool:
    """Whether a slot holds spans, logs or metrics as one wide table."""
    return slot in _FLAT


def text_view(batch: pa.RecordBatch, slot: int) -> pa.RecordBatch:
    """The batch as `penstock.otlp.view` shows it. Raises `Unsupported` for a slot without a view."""
    if not has_view(slot):
        raise Unsupported(f"view: {slot_name(slot)} has no view; spans, logs and metrics have one")
    from penstock.otlp import view

    return view(batch)


def known_schema(slot: int) -> pa.Schema | None:
    """The columns of a slot that are known without looking at a segment; None when they are not."""
    if slot in _RAW:
        return pa.schema([pa.field("data", pa.binary())])
    if not has_view(slot):
        return None
    from penstock.otlp import Signal, schema_of

    return schema_of(Signal(signal_of(slot).value))
