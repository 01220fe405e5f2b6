"""The options of the table formats: their names, their values, and that secrets stay hidden."""

from __future__ import annotations

import os

import pytest

from penstock.errors import ConfigError
from penstock.spark.tables.format import Txn
from penstock.spark.tables.spec import TARGET_FILE_BYTES, TableSpec


def test_options_survive_spark() -> None:
    spec = TableSpec(
        kind="delta",
        path="/data/events",
        partition_by=("day", "country"),
        options={"store.region": "eu-west-1"},
        compression="zstd",
        target_file_bytes=1 << 20,
    )
    assert TableSpec.parse("delta", spec.to_options()) == spec


def test_table_option_names_ignore_case_and_underscores() -> None:
    spec = TableSpec.parse("parquet", {"PATH": "/t", "partition_by": "a, b", "TARGETFILEBYTES": "2MiB"})
    assert (spec.path, spec.partition_by, spec.target_file_bytes) == ("/t", ("a", "b"), 2 << 20)


def test_a_missing_option_has_a_default() -> None:
    spec = TableSpec.parse("delta", {"path": "/t"})
    assert (spec.compression, spec.target_file_bytes, spec.partition_by) == ("snappy", TARGET_FILE_BYTES, ())


def test_a_relative_path_is_made_absolute_on_the_driver() -> None:
    assert TableSpec.parse("delta", {"path": "x/y"}).path == os.path.abspath("x/y")


def test_options_of_the_stream_itself_are_not_ours() -> None:
    assert TableSpec.parse("delta", {"path": "/t", "checkpointLocation": "/c"}).path == "/t"


def test_secrets_are_not_shown() -> None:
    given = {"path": "s3://b/t", "store.secret_access_key": "hunter2"}
    spec = TableSpec.parse("delta", given)
    assert "hunter2" not in repr(spec)
    assert "secret_access_key=***" in repr(spec)
    assert spec.store_options == {"secret_access_key": "hunter2"}
    assert spec.store.options == {"secret_access_key": "hunter2"}


@pytest.mark.parametrize(
    ("kind", "given", "says"),
    [
        pytest.param("delta", {"path": "/t", "partitonBy": "a"}, "partitionBy", id="unknown"),
        pytest.param("delta", {"path": "/t", "catalog.uri": "x"}, "unknown key", id="catalog-of-delta"),
        pytest.param("delta", {}, "path", id="no-path"),
        pytest.param("delta", {"path": "memory://x"}, "memory", id="memory"),
        pytest.param("parquet", {"path": "/t", "compression": "brotly"}, "compression", id="compression"),
        pytest.param("parquet", {"path": "/t", "targetFileBytes": "0"}, "targetFileBytes", id="size"),
        pytest.param("parquet", {"path": "/t", "partitionBy": "a,a"}, "twice", id="twice"),
        pytest.param("iceberg", {"table": "events"}, "namespace", id="no-namespace"),
        pytest.param("iceberg", {"table": "db.events", "path": "/t"}, "unknown key", id="path-of-iceberg"),
    ],
)
def test_a_wrong_option_is_reported(kind: str, given: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        TableSpec.parse(kind, given)  # type: ignore[arg-type]


def test_a_transaction_is_taken_out_of_the_options() -> None:
    options = {"path": "/t", "txnappid": "q", "txnVersion": "7"}
    assert Txn.take(options) == Txn(app="q", version=7)
    assert options == {"path": "/t"}
    assert Txn.take(options) is None


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"txnAppId": "q"}, id="app-alone"),
        pytest.param({"txnVersion": "1"}, id="version-alone"),
        pytest.param({"txnAppId": "q", "txnVersion": "-1"}, id="negative"),
        pytest.param({"txnAppId": "q", "txnVersion": "one"}, id="text"),
        pytest.param({"txnApp": "q"}, id="unknown"),
    ],
)
def test_half_a_transaction_is_refused(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="txn"):
        Txn.take(dict(options))


def test_writes_without_a_transaction_are_distinct() -> None:
    assert Txn.unique() != Txn.unique()
