"""The same tables in a bucket of a real S3-compatible server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql.types import LongType, StringType, StructField, StructType
from tests import servers

from penstock.errors import PenstockError
from penstock.spark.tables import DataFile, TableKind, TableSpec, open_table
from penstock.spark.tables.format import DeltaFormat
from penstock.spark.tables.parts import write_parts

SCHEMA = StructType([StructField("id", LongType()), StructField("k", StringType())])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.S3Server]:
    with servers.seaweedfs(tmp_path_factory.mktemp("tables") / "seaweedfs") as running:
        running.make_bucket("tables")
        yield running


def make_spec(kind: TableKind, server: servers.S3Server, root: Path) -> TableSpec:
    store = {f"store.{name}": value for name, value in server.options().items()}
    if kind != "iceberg":
        url = f"s3://tables/{root.name}-{kind}"
        return TableSpec(kind=kind, path=url, partition_by=("k",), options=store)
    told = server.options()
    catalog = {
        "catalog.type": "sql",
        "catalog.uri": f"sqlite:///{root}/catalog.db",
        "catalog.warehouse": f"s3://tables/{root.name}-warehouse",
        "catalog.s3.endpoint": told["endpoint"],
        "catalog.s3.access-key-id": told["access_key_id"],
        "catalog.s3.secret-access-key": told["secret_access_key"],
        "catalog.s3.region": told.get("region", "us-east-1"),
    }
    return TableSpec(kind=kind, table="db.events", partition_by=("k",), options=catalog)


def write(spec: TableSpec, ids: list[int]) -> list[DataFile]:
    rows = pa.record_batch({"id": pa.array(ids, pa.int64()), "k": [f"k{n % 2}" for n in ids]})
    return write_parts(open_table(spec).layout(SCHEMA), iter([rows]))


@pytest.mark.parametrize("kind", ["delta", "iceberg", "parquet"])
def test_a_micro_batch_is_in_the_bucket_once(
    kind: TableKind, server: servers.S3Server, tmp_path: Path
) -> None:
    spec = make_spec(kind, server, tmp_path)
    table = open_table(spec)
    table.prepare(SCHEMA)
    assert table.commit("q", 0, write(spec, [1, 2, 3]))
    table.prepare(SCHEMA)
    assert not table.commit("q", 0, write(spec, [1, 2, 3]))
    assert table.commit("q", 1, write(spec, [4]))
    assert table.rows_by_version("q") == {0: 3, 1: 1}
    assert (table.row_count(), table.last_version("q")) == (4, 1)


def test_spark_writes_a_delta_table_into_a_bucket(
    spark: SparkSession, server: servers.S3Server, tmp_path: Path
) -> None:
    spark.dataSource.register(DeltaFormat)
    spec = make_spec("delta", server, tmp_path)
    frame = spark.sql("select id, concat('k', id % 2) k from range(10)")
    frame.write.format(spec.format).mode("append").options(**spec.to_options()).save()
    found = DeltaTable(spec.path, storage_options=spec.store_options).to_pyarrow_table()
    assert sorted(found["id"].to_pylist()) == list(range(10))


@pytest.mark.parametrize("kind", ["delta", "parquet"])
def test_a_wrong_key_is_reported_without_showing_it(
    kind: TableKind, server: servers.S3Server, tmp_path: Path
) -> None:
    right = make_spec(kind, server, tmp_path)
    options = {**right.options, "store.secret_access_key": "hunter2"}
    spec = TableSpec(kind=kind, path=right.path, options=options)
    with pytest.raises(PenstockError, match="s3://tables") as caught:
        open_table(spec).prepare(SCHEMA)
    assert "hunter2" not in str(caught.value)
