from __future__ import annotations

from pathlib import Path

import pytest

from penstock.spark.sinks.series import SERIES_OPTIONS
from penstock.spark.sinks.topic_options import _NAMES as TOPIC_SINK_NAMES
from penstock.spark.sinks.vectors import VECTOR_OPTIONS
from penstock.spark.sources.buffer_options import _NAMES
from penstock.spark.sources.columns import COLUMNS
from penstock.spark.sources.topic_columns import TOPIC_COLUMNS
from penstock.spark.sources.topic_options import _NAMES as TOPIC_NAMES

TEXT = (Path(__file__).parents[3] / "docs" / "reference" / "spark.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted({*_NAMES, *COLUMNS} - {"path"}))
def test_the_reference_names_every_option_and_column(name: str) -> None:
    assert f"`{name}`" in TEXT


@pytest.mark.parametrize("name", sorted({*TOPIC_NAMES, *TOPIC_SINK_NAMES, *TOPIC_COLUMNS} - {"path"}))
def test_the_reference_names_every_option_and_column_of_topics(name: str) -> None:
    assert f"`{name}`" in TEXT.split("## Topics")[1].split("## Sinks")[0]


@pytest.mark.parametrize("name", sorted({*SERIES_OPTIONS, *VECTOR_OPTIONS}))
def test_the_reference_names_every_option_of_the_databases(name: str) -> None:
    assert f"`{name}`" in TEXT.split("`penstock-timeseries` and")[1].split("## Gaps")[0]
