"""The reference of the pipeline file names every key, with its default."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from penstock.spark.pipeline import sink_spec, spec
from penstock.spark.pipeline.dead_letters import LETTER_COLUMNS

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "reference" / "pipeline.md").read_text(encoding="utf-8")
SECTIONS = {
    "The whole": spec.PipelineSpec,
    "Source": spec.BufferSourceSpec,
    "Decode": spec.DecodeSpec,
    "Sink": sink_spec.SinkSpec,
    "delta": sink_spec.DeltaSinkSpec,
    "parquet": sink_spec.ParquetSinkSpec,
    "iceberg": sink_spec.IcebergSinkSpec,
    "buffer": sink_spec.BufferSinkSpec,
    "timeseries": sink_spec.TimeSeriesSinkSpec,
    "vector": sink_spec.VectorSinkSpec,
    "Trigger": spec.TriggerSpec,
}


def section(title: str) -> str:
    return re.split(rf"^##+ {title}\n", TEXT, maxsplit=1, flags=re.MULTILINE)[1].split("\n##", 1)[0]


def rows(title: str) -> dict[str, list[str]]:
    """Key to the cells of its row."""
    cells = [line.strip("| ").split(" | ") for line in section(title).splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): [cell.strip() for cell in row] for row in cells}


@pytest.mark.parametrize(("title", "kind"), SECTIONS.items(), ids=list(SECTIONS))
def test_every_key_has_its_row_and_no_other(title: str, kind: type) -> None:
    named = [line.split("`")[1] for line in section(title).splitlines() if line.startswith("| `")]
    assert named == [field.name for field in dataclasses.fields(kind)]


@pytest.mark.parametrize(("title", "kind"), SECTIONS.items(), ids=list(SECTIONS))
def test_every_plain_default_is_stated(title: str, kind: type) -> None:
    told = rows(title)
    for field in dataclasses.fields(kind):
        if isinstance(field.default, str | int | bool):
            assert told[field.name][2] == f"`{field.default}`", field.name
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        assert (told[field.name][2] == "required") == required, field.name


def test_merge_and_the_one_key_of_the_source_are_documented() -> None:
    for field in dataclasses.fields(sink_spec.MergeSpec):
        assert f"`{field.name}` (list, required)" in section("delta")
    assert [field.name for field in dataclasses.fields(spec.SourceSpec)] == ["buffer"]


def test_the_columns_of_a_letter_are_documented() -> None:
    told = set(re.findall(r"`(\w+)`", section("The dead-letter table")))
    assert {column.split()[0] for column in LETTER_COLUMNS.split(", ")} <= told


def test_the_example_is_a_pipeline() -> None:
    import yaml

    (example,) = re.findall(r"^```yaml\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
    assert spec.read_spec(yaml.safe_load(example)).name == "clicks"
