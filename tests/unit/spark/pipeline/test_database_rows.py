"""The sections `timeseries` and `vector` of a pipeline, and the columns that they require."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from tests.unit.spark.sinks.schemas import schema_of

from penstock.config import Setting, merge
from penstock.errors import ConfigError
from penstock.spark.pipeline.outputs import Output, check_options, queue_of, table_of
from penstock.spark.pipeline.rows import check_database_columns, leaves_rows_out
from penstock.spark.pipeline.spec import PipelineSpec, read_spec
from penstock.spark.pipeline.transform import Shape, check_shape

POINTS: dict[str, Setting] = {"timeseries": {"store": "points", "metric": "clicks"}}
DOCS: dict[str, Setting] = {"vector": {"store": "docs"}}


def spec(sink: dict[str, Setting]) -> PipelineSpec:
    settings = {"name": "p", "source": {"buffer": {"store": "queue"}}, "sink": sink, "on_error": "skip"}
    return read_spec(settings, where="p.yaml", base=Path("/base"))


def test_a_database_sink_is_a_queue_with_its_own_format() -> None:
    read = spec(merge(POINTS, {"timeseries": {"labels": ["user"], "manifest_path": "m/manifest"}}))
    check_options(read)
    sink = read.outputs["timeseries"]
    assert (Output.of(sink).format, table_of(sink), sink.is_queue) == ("penstock-timeseries", None, True)
    assert sink.place == "m/manifest in /base/points"
    options = Output.of(sink).options
    assert (options["labels"], options["metric"], options["store"]) == ("user", "clicks", "/base/points")
    assert queue_of(sink).manifest_path == "m/manifest"
    assert Output.of(spec(DOCS).outputs["vector"]).format == "penstock-vector"


WRONG: dict[str, tuple[dict[str, Setting], str]] = {
    "no metric": ({"timeseries": {"store": "x"}}, "give either `metric`"),
    "a bad metric": ({"timeseries": {"store": "x", "metric": "a-b"}}, "metric: expected letters"),
    "a bad policy": (merge(POINTS, {"timeseries": {"on_null": "skip"}}), "on_null"),
    "an unknown key": (merge(DOCS, {"vector": {"atributes": ["a"]}}), "did you mean 'attributes'"),
    "no order": (merge(DOCS, {"vector": {"order_by": ["id"]}}), "cannot decide which row is the last"),
    "no dimensions": (merge(DOCS, {"vector": {"dimensions": 0}}), "expected 1 to 65535"),
    "its own queue": ({"vector": {"store": "queue"}}, "the pipeline's own source"),
    "two kinds": (POINTS | DOCS, "exactly one of delta, parquet, iceberg, buffer, timeseries, vector"),
}


@pytest.mark.parametrize("case", sorted(WRONG))
def test_problems_are_reported_with_its_place(case: str) -> None:
    sink, problem = WRONG[case]
    with pytest.raises(ConfigError, match=re.escape(problem)) as caught:
        spec(sink)
    assert str(caught.value).startswith("p.yaml")


def test_the_pipeline_in_the_how_to_is_valid() -> None:
    text = (Path(__file__).parents[4] / "docs" / "how-to" / "spark-into-databases.md").read_text("utf-8")
    (example,) = re.findall(r"^```yaml\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    read = read_spec(yaml.safe_load(example))
    check_options(read)
    assert [sink.kind for sink in read.outputs.values()] == ["timeseries", "vector"]


def test_a_pipeline_into_a_database_needs_a_dead_letter_table() -> None:
    settings = {"name": "p", "source": {"buffer": {"store": "queue"}}, "sink": DOCS}
    with pytest.raises(ConfigError, match="required when the first sink is a vector"):
        read_spec(settings)
    with pytest.raises(ConfigError, match="expected a plain delta, parquet or iceberg table"):
        read_spec(settings | {"dead_letter": POINTS})


def test_columns_that_are_only_for_ordering_are_not_checked() -> None:
    docs = spec(merge(DOCS, {"vector": {"order_by": ["at", "_index"]}})).outputs["vector"]
    columns = "id string, vector array<float>, title string"
    check_database_columns(docs, schema_of(f"{columns}, at timestamp, _index int"))
    with pytest.raises(ConfigError, match="order_by: the rows have no column 'at'"):
        check_database_columns(docs, schema_of(columns))
    with pytest.raises(ConfigError, match="'other' is timestamp"):
        check_database_columns(docs, schema_of(f"{columns}, at timestamp, _index int, other timestamp"))
    points = spec(POINTS).outputs["timeseries"]
    with pytest.raises(ConfigError, match="no column 'value'"):
        check_database_columns(points, schema_of("timestamp timestamp"))


@pytest.mark.parametrize(
    ("sink", "leaves"),
    [
        (POINTS, False),
        (merge(POINTS, {"timeseries": {"on_null": "drop"}}), True),
        (DOCS, False),
        (merge(DOCS, {"vector": {"order_by": ["n"]}}), True),
        ({"buffer": {"store": "x"}}, False),
    ],
    ids=["points", "points without nulls", "vectors", "the last vectors", "another queue"],
)
def test_rows_are_dropped_only_if_the_sink_is_configured_to(sink: dict[str, Setting], leaves: bool) -> None:
    assert leaves_rows_out(next(iter(spec(sink).outputs.values()))) is leaves


def test_groups_of_a_micro_batch_would_replace_each_other_in_a_series() -> None:
    plain = spec(POINTS).outputs["timeseries"]
    check_shape("points", plain, Shape.ONE_TO_ONE)
    with pytest.raises(ConfigError, match="the later point replaces the earlier"):
        check_shape("points", plain, Shape.GROUPED)
    check_shape("points", spec(POINTS | {"per_batch": True}).outputs["timeseries"], Shape.GROUPED)
