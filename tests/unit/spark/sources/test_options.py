from __future__ import annotations

import os

import pytest

from penstock.errors import ConfigError
from penstock.spark.sources.buffer_options import BATCHES_PER_TRIGGER, BufferOptions
from penstock.spark.sources.columns import COLUMNS


def test_only_the_store_must_be_given() -> None:
    options = BufferOptions.parse({"store": "s3://bucket/folder"})
    assert options.store.url == "s3://bucket/folder"
    assert (options.manifest_path, options.data_path_prefix) == ("ingest/manifest", "ingest")
    assert options.columns == tuple(COLUMNS)
    assert (options.starting, options.ending, options.mode, options.sharded) == (
        "earliest",
        "latest",
        None,
        None,
    )
    assert options.batches_per_trigger == BATCHES_PER_TRIGGER
    assert options.tasks >= 2


@pytest.mark.parametrize("name", ["maxBatchesPerTrigger", "maxbatchespertrigger", "max_batches_per_trigger"])
def test_option_names_ignore_case_and_underscores(name: str) -> None:
    assert BufferOptions.parse({"store": "s3://b", name: "7"}).batches_per_trigger == 7


def test_the_path_of_load_is_the_store() -> None:
    assert BufferOptions.parse({"path": "s3://b"}).store.url == "s3://b"
    for given in ({}, {"path": "s3://b", "store": "s3://c"}):
        with pytest.raises(ConfigError, match="give the store once"):
            BufferOptions.parse(given)


def test_store_options_are_passed_on_and_never_shown() -> None:
    options = BufferOptions.parse({"store": "s3://b", "store.secret_access_key": "hush"})
    assert options.store.options == {"secret_access_key": "hush"}
    assert "hush" not in repr(options)


def test_a_path_is_made_absolute_for_the_executors() -> None:
    assert BufferOptions.parse({"store": "queue"}).store.url == os.path.abspath("queue")


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("maxBatchesPerTrigger", "0", "expected a whole number of at least 1"),
        ("partitions", "many", "expected a whole number of at least 1"),
        ("sharded", "maybe", "expected true or false"),
        ("mode", "write", "expected consume or read"),
        ("onGap", "skip", "onGap: expected fail or record, found 'skip'"),
        ("columns", "", "found nothing"),
        ("columns", "value,value", "names a column twice"),
        ("manifest_path", "a*b", "manifest_path"),
        ("gc_interval", "0s", "gc_interval must be above 0"),
        ("maxBytesPerTrigger", "0", "expected at least 1 byte"),
    ],
)
def test_a_wrong_value_names_its_option(name: str, value: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        BufferOptions.parse({"store": "s3://b", name: value})
    assert sentence in str(raised.value)


def test_a_gap_is_an_error_unless_gaps_are_recorded() -> None:
    assert BufferOptions.parse({"store": "s3://b"}).records_gaps is False
    assert BufferOptions.parse({"store": "s3://b", "on_gap": "Record"}).records_gaps is True


def test_recording_gaps_needs_the_columns_that_describe_them() -> None:
    given = {"store": "s3://b", "onGap": "record"}
    with pytest.raises(ConfigError, match=r"columns: onGap=record describes gaps .*; add index, metadata"):
        BufferOptions.parse({**given, "columns": "value,sequence"})
    assert BufferOptions.parse({**given, "columns": "metadata,index,sequence"}).records_gaps


def test_sizes_take_units() -> None:
    assert BufferOptions.parse({"store": "s3://b", "maxBytesPerTrigger": "2MiB"}).bytes_per_trigger == 2 << 20
    assert BufferOptions.parse({"store": "s3://b", "maxBytesPerTrigger": "500"}).bytes_per_trigger == 500
