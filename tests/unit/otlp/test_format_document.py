"""The format document names exactly the existing columns, in their order."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.otlp import Signal, schema_of
from penstock.otlp.limits import ITEMS_MAX
from penstock.otlp.schema import ANY_VALUE
from penstock.otlp.to_arrow import REPEATED_BYTES_MAX

TEXT = (Path(__file__).parents[3] / "docs/formats/otlp-arrow.md").read_text(encoding="utf-8")
SECTIONS = {Signal.TRACES: "Spans", Signal.LOGS: "Logs", Signal.METRICS: "Metrics"}


def columns_in(title: str) -> list[str]:
    """Return the first cell of every row of a section's table."""
    section = TEXT.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]


@pytest.mark.parametrize("signal", list(Signal))
def test_the_document_names_every_column_in_order(signal: Signal) -> None:
    columns = columns_in(SECTIONS[signal]) + columns_in("Columns of every signal")
    assert columns == schema_of(signal).names


def test_the_document_names_the_fields_of_a_value_in_order() -> None:
    fields = ", ".join(f"`{field.name}`" for field in ANY_VALUE).replace("`type`", "`type` (int8)")
    assert f"The fields stand in this order: {fields}." in TEXT


def test_the_document_states_the_caps() -> None:
    assert f"more than {ITEMS_MAX:,} items" in TEXT
    assert f"{REPEATED_BYTES_MAX >> 20} MiB" in TEXT


@pytest.mark.parametrize("signal", list(Signal))
def test_the_types_match_segments_on_disk(signal: Signal) -> None:
    """A change here changes the fingerprint of stored segments, so it needs a separate slot."""
    kept = Path(__file__).parents[2] / "golden" / "otlp" / f"{signal}.schema"
    assert schema_of(signal).equals(pa.ipc.read_schema(pa.py_buffer(kept.read_bytes())))
