"""Conversion between OTLP and Arrow: one flat table per signal, lossless in both directions. No I/O.

    decoded = decode(body, Signal.TRACES)       # rows, and the number of refused items
    encode(decoded.batch, Signal.TRACES)        # the same request again

Consecutive rows of one resource and scope are grouped under one. Nothing else changes.
"""

from __future__ import annotations

from penstock.otlp.json_form import from_json, to_json
from penstock.otlp.messages import check_installed, count_items, messages_of, response
from penstock.otlp.schema import Signal, schema_of
from penstock.otlp.to_arrow import Decoded, decode
from penstock.otlp.to_proto import encode, split
from penstock.otlp.views import view, view_schema

__all__ = [
    "Decoded",
    "Signal",
    "check_installed",
    "count_items",
    "decode",
    "encode",
    "from_json",
    "messages_of",
    "response",
    "schema_of",
    "split",
    "to_json",
    "view",
    "view_schema",
]
