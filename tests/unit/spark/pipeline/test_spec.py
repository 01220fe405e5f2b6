"""The YAML of a pipeline: valid files are read in full, errors are reported with their place."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config import Setting, merge
from penstock.errors import ConfigError
from penstock.spark.pipeline.outputs import Output, source_options
from penstock.spark.pipeline.spec import PipelineSpec, load_spec, read_spec

PLAIN: dict[str, Setting] = {
    "name": "clicks",
    "source": {"buffer": {"store": "queue"}},
    "sink": {"delta": {"path": "table"}},
}


def spec(**more: Setting) -> PipelineSpec:
    return read_spec(merge(PLAIN, more), where="clicks.yaml", base=Path("/base"), environ={"KEY": "s3cret"})


def test_the_example_of_the_documentation_is_read(tmp_path: Path) -> None:
    file = tmp_path / "clicks.yaml"
    file.write_text(
        """
name: clicks
source: {buffer: {store: s3://ingest, manifest_path: clicks/manifest}}
decode: {format: json, schema: "user string, url string, at timestamp"}
transform: SELECT user, url, at, date(at) AS day FROM input WHERE user IS NOT NULL
on_error: dead_letter
on_gap: fail
sink: {delta: {path: s3://lake/clicks, partition_by: [day]}}
trigger: {interval: 5s, max_batches: 200}
"""
    )
    read = load_spec(file)
    assert read.outputs["delta"].place == "s3://lake/clicks"
    letters = read.letters
    assert letters is not None
    assert letters.place == "s3://lake/clicks_dead_letters"
    assert read.checkpoint_path == str(tmp_path / ".penstock/clicks/checkpoint")
    assert read.ledger_store == str(tmp_path / ".penstock/clicks/checkpoint.ledger")
    options = source_options(read, ("value",))
    assert options["manifest_path"] == "clicks/manifest"
    assert options["maxBatchesPerTrigger"] == "200"


def test_relative_paths_are_relative_to_the_file() -> None:
    read = spec(checkpoint="state/c")
    assert (read.source.buffer.store, read.outputs["delta"].place) == ("/base/queue", "/base/table")
    assert read.checkpoint_path == "/base/state/c"


def test_environment_variables_replace_secrets_and_stay_out_of_repr() -> None:
    read = spec(source={"buffer": {"store_options": {"secret_access_key": "${KEY}", "allow_http": True}}})
    assert source_options(read, ("value",))["store.secret_access_key"] == "s3cret"
    assert source_options(read, ("value",))["store.allow_http"] == "true"
    assert "s3cret" not in repr(read)


def test_a_missing_environment_variable_is_named() -> None:
    with pytest.raises(ConfigError, match="environment variable NOWHERE is not set"):
        spec(transform="SELECT '${NOWHERE}'")


@pytest.mark.parametrize(
    ("environ", "store"), [({}, "/near/q"), ({"WHERE": "/far"}, "/far/q"), ({"WHERE": ""}, "/q")]
)
def test_a_variable_that_is_not_set_has_its_default_text(environ: dict[str, str], store: str) -> None:
    spec = read_spec(
        {
            "name": "clicks",
            "source": {"buffer": {"store": "${WHERE:-/near}/q"}},
            "decode": {"format": "raw"},
            "sink": {"parquet": {"path": "/lake/clicks"}},
        },
        environ=environ,
    )
    assert spec.source.buffer is not None
    assert spec.source.buffer.store == store


WRONG: dict[str, tuple[dict[str, Setting], str]] = {
    "unknown key": ({"triger": {}}, "triger: unknown key, did you mean 'trigger'"),
    "unknown nested key": ({"sink": {"delta": {"partition": ["a"]}}}, "did you mean 'partition_by'"),
    "unknown source": ({"source": {"bufer": {}}}, "did you mean 'buffer'"),
    "unknown policy": ({"on_error": "deadletter"}, "did you mean 'dead_letter'"),
    "two kinds": ({"sink": {"parquet": {"path": "x"}}}, "exactly one of delta, parquet, iceberg, buffer"),
    "sink and sinks": ({"sinks": {"a": {"delta": {"path": "x"}}}}, "either `sink` (one) or `sinks`"),
    "bad name": ({"name": "a b"}, "name: expected letters"),
    "short interval": ({"trigger": {"interval": "1ms"}}, "at least 10ms"),
    "raw with schema": ({"decode": {"schema": "a int"}}, "raw records have no schema"),
    "useless letters": (
        {"on_error": "skip", "dead_letter": {"delta": {"path": "x"}}},
        "this on_error does not use it",
    ),
    "letters to a buffer": ({"dead_letter": {"buffer": {"store": "x"}}}, "plain delta, parquet or iceberg"),
    "one place twice": ({"dead_letter": {"delta": {"path": "table/"}}}, "two outputs write to"),
    "its own queue": (
        {"sinks": {"q": {"buffer": {"store": "queue"}}}, "sink": None, "on_error": "skip"},
        "the pipeline's own source",
    ),
    "the place of the letters": (
        {"sinks": {"a": {"delta": {"path": "x"}}, "b": {"delta": {"path": "x_dead_letters"}}}, "sink": None},
        "two outputs write to",
    ),
    "another spelling": ({"dead_letter": {"delta": {"path": "./table"}}}, "two outputs write to"),
    "merge without add": ({"sink": {"delta": {"merge": {"keys": ["a"], "add": []}}}}, "merge needs"),
    "key added up": (
        {"sink": {"delta": {"merge": {"keys": ["a"], "add": ["a"]}}}},
        "both a key and added up",
    ),
}


@pytest.mark.parametrize("case", sorted(WRONG))
def test_problems_are_reported_with_its_place(case: str) -> None:
    more, problem = WRONG[case]
    with pytest.raises(ConfigError) as caught:
        spec(**more)
    assert problem in str(caught.value)
    assert str(caught.value).startswith("clicks.yaml")


def test_a_pipeline_into_a_buffer_needs_a_dead_letter_table() -> None:
    buffer: dict[str, Setting] = {"name": "c", "source": PLAIN["source"], "sink": {"buffer": {"store": "x"}}}
    with pytest.raises(ConfigError, match="give a table for bad records"):
        read_spec(buffer)
    assert read_spec(buffer | {"on_error": "skip"}).letters is None


def test_a_checkpoint_on_a_file_system_of_sparks_own_needs_a_ledger() -> None:
    read = spec(checkpoint="hdfs://namenode/clicks")
    with pytest.raises(ConfigError, match="ledger: required"):
        _ = read.ledger_store
    assert spec(checkpoint="hdfs://n/c", ledger="s3://books").ledger_store == "s3://books"


def test_a_sink_passes_all_its_settings_to_sparks_writer() -> None:
    read = spec(sink={"delta": {"partition_by": ["day"], "store_options": {"region": "eu"}}})
    options = Output.of(read.outputs["delta"]).options
    assert (options["path"], options["partitionBy"], options["store.region"]) == ("/base/table", "day", "eu")
