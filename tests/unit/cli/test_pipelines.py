"""Errors of the pipeline commands' options, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli.pipeline_file import overrides, read_pipeline, settings
from penstock.cli.pipelines import parse_position, parse_sequences, parse_since, tables_to_compact
from penstock.cli.run.command import run
from penstock.errors import ConfigError
from penstock.spark.pipeline.spec import PipelineSpec, read_spec

PIPELINE = """
name: clicks
source: {buffer: {store: queue}}
sink: {delta: {path: lake/clicks}}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "clicks.yaml"
    path.write_text(PIPELINE)
    return path


def test_a_key_of_the_file_can_be_set(file: Path) -> None:
    spec = read_pipeline(file, ["trigger.interval=10s", "trigger.max_batches=5", "name=other"])
    assert (spec.name, spec.trigger.interval, spec.trigger.max_batches) == ("other", "10s", 5)
    assert spec.source.buffer.store == str(file.parent / "queue")


def test_changes_are_values_of_yaml_and_nest() -> None:
    layer = overrides(["sink.delta.partition_by=[day]", "sink.delta.path=x", "on_gap=record"])
    assert layer == {"sink": {"delta": {"partition_by": ["day"], "path": "x"}}, "on_gap": "record"}


def test_a_wrong_key_names_the_closest(file: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'interval'"):
        read_pipeline(file, ["trigger.intervall=10s"])


@pytest.mark.parametrize("change", ["secret", "=secret", "a..b=secret", "a=[secret"])
def test_a_malformed_change_is_refused_without_quoting_it(change: str) -> None:
    with pytest.raises(ConfigError) as refused:
        overrides([change])
    assert "secret" not in str(refused.value)


def test_settings_are_pairs() -> None:
    assert settings(["spark.a=1", "spark.b=x=y"], "--conf") == {"spark.a": "1", "spark.b": "x=y"}
    with pytest.raises(ConfigError, match="--conf: expected KEY=VALUE"):
        settings(["secret"], "--conf")


@pytest.mark.parametrize(
    ("text", "found"), [("7", (7, 7)), ("3-9", (3, 9)), ("3-", (3, 2**63 - 1)), ("-9", (0, 9))]
)
def test_sequences_are_a_range(text: str, found: tuple[int, int]) -> None:
    assert parse_sequences(text) == found


@pytest.mark.parametrize("text", ["", "-", "9-3", "a-b", "1-2-3"])
def test_other_sequences_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--sequence: expected A-B"):
        parse_sequences(text)


def test_a_position_is_three_numbers() -> None:
    assert parse_position("0:17:3") == (0, 17, 3)
    for text in ("", "1:2", "a:b:c", "0:1:-1", "0:1:2:3", f"0:{2**63}:0"):
        with pytest.raises(ConfigError, match="--position"):
            parse_position(text)


def test_since_is_a_time_or_an_age() -> None:
    assert parse_since("2h", 10_000_000) == 10_000_000 - 7_200_000
    assert parse_since("1970-01-01T00:00:01Z", 0) == 1000
    assert parse_since("1970-01-01T00:00:01", 0) == 1000
    with pytest.raises(ConfigError, match="--since"):
        parse_since("yesterday", 0)


def many_sinks(**sinks: object) -> PipelineSpec:
    return read_spec({"name": "p", "source": {"buffer": {"store": "q"}}, "sinks": sinks, "on_error": "skip"})


def test_compaction_selects_the_compactable_tables() -> None:
    spec = many_sinks(
        lake={"delta": {"path": "t"}}, folder={"parquet": {"path": "f"}}, out={"buffer": {"store": "o"}}
    )
    assert list(tables_to_compact(spec, None)) == ["lake"]
    assert list(tables_to_compact(spec, "folder")) == ["folder"]
    with pytest.raises(ConfigError, match="a queue has no files"):
        tables_to_compact(spec, "out")
    with pytest.raises(ConfigError, match="did you mean 'lake'"):
        tables_to_compact(spec, "lak")
    with pytest.raises(ConfigError, match="no Delta or Iceberg table"):
        tables_to_compact(many_sinks(folder={"parquet": {"path": "f"}}), None)


def test_a_wrong_file_is_refused_before_anything_starts(file: Path) -> None:
    file.write_text(PIPELINE + "transfrom: SELECT 1\n")
    refused = CliRunner().invoke(run, [str(file)])
    assert isinstance(refused.exception, ConfigError)
    assert "did you mean 'transform'" in str(refused.exception)


def test_a_master_and_a_remote_exclude_each_other(file: Path) -> None:
    refused = CliRunner().invoke(run, [str(file), "--master", "local[1]", "--remote", "sc://x"])
    assert isinstance(refused.exception, ConfigError)
