"""The specifics of Iceberg: the race in which the library would accept a duplicate."""

from __future__ import annotations

import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.table import Table as CatalogTable
from pyiceberg.transforms import DayTransform
from pyspark.sql.types import StructField, StructType, TimestampType
from tests.unit.spark.tables.conftest import SCHEMA, Place

from penstock.errors import OutcomeUnknown, Unavailable, Unsupported
from penstock.spark.tables import TableSpec
from penstock.spark.tables import iceberg as module


def racing(place: Place, monkeypatch: pytest.MonkeyPatch, app: str, ids: list[int]) -> None:
    """Let another handle commit between our read of the table and our change."""
    load, files, done = module.load_iceberg, place.write(ids), []

    def load_then_lose(spec: TableSpec) -> CatalogTable | None:
        table = load(spec)
        if not done:
            done.append(True)
            assert place.open().commit(app, 0, files)
        return table

    monkeypatch.setattr(module, "load_iceberg", load_then_lose)


@pytest.mark.parametrize("earlier", [0, 1], ids=["empty-table", "with-a-snapshot"])
def test_a_concurrent_commit_of_the_same_micro_batch_is_not_repeated(
    iceberg: Place, monkeypatch: pytest.MonkeyPatch, earlier: int
) -> None:
    iceberg.open().prepare(SCHEMA)
    for number in range(earlier):
        iceberg.open().commit("before", number, iceberg.write([500]))
    files = iceberg.write([1, 2])
    racing(iceberg, monkeypatch, "q", [1, 2])
    assert not iceberg.open().commit("q", 0, files)
    assert iceberg.ids() == [1, 2] + [500] * earlier


def test_a_concurrent_commit_of_another_query_does_no_harm(
    iceberg: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    iceberg.open().prepare(SCHEMA)
    files = iceberg.write([1, 2])
    racing(iceberg, monkeypatch, "other", [3])
    assert iceberg.open().commit("q", 0, files)
    assert iceberg.ids() == [1, 2, 3]


def test_the_last_version_outlives_the_snapshots(iceberg: Place) -> None:
    table = iceberg.open()
    table.prepare(SCHEMA)
    table.commit("q", 3, iceberg.write([1]))
    held = module.load_iceberg(iceberg.spec)
    assert held is not None
    assert held.properties["penstock.txn.q"] == "3"
    assert "commit.retry.num-retries" not in held.properties


def test_the_table_is_read_after_a_lost_response(iceberg: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    iceberg.open().prepare(SCHEMA)
    files, catalog = iceberg.write([1, 2]), module._catalog(iceberg.spec)
    commit = catalog.commit_table

    def commit_then_fail(*given: object, **named: object) -> None:
        commit(*given, **named)  # type: ignore[arg-type]
        raise ConnectionResetError("lost")

    monkeypatch.setattr(catalog, "commit_table", commit_then_fail)
    assert iceberg.open().commit("q", 0, files)
    assert iceberg.ids() == [1, 2]


def test_an_unknown_outcome_is_settled_by_committing_again(
    iceberg: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    iceberg.open().prepare(SCHEMA)
    files, catalog = iceberg.write([1, 2]), module._catalog(iceberg.spec)

    def fail(*_: object, **__: object) -> None:
        raise ConnectionResetError("postgres://user:hunter2@host")

    with monkeypatch.context() as patch:
        patch.setattr(catalog, "commit_table", fail)
        with pytest.raises(OutcomeUnknown, match="start the query again") as caught:
            iceberg.open().commit("q", 0, files)
    assert "hunter2" not in str(caught.value)
    assert iceberg.open().commit("q", 0, files)
    assert iceberg.ids() == [1, 2]


def test_a_table_partitioned_by_a_transform_is_refused(iceberg: Place) -> None:
    schema = StructType([*SCHEMA.fields, StructField("at", TimestampType())])
    iceberg.open().prepare(schema)
    table = load_catalog("default", **iceberg.spec.catalog_options).load_table(iceberg.spec.table)
    with table.update_spec() as update:
        update.add_field("at", DayTransform(), "at_day")
    with pytest.raises(Unsupported, match=r"day\(at\)"):
        iceberg.open().prepare(schema)


def test_a_catalog_that_cannot_be_opened_is_reported_without_its_secrets() -> None:
    options = {"catalog.type": "sql", "catalog.uri": "sqlite:////proc/hunter2/x.db"}
    with pytest.raises(Unavailable, match=r"catalog\.\* options") as caught:
        module.load_iceberg(TableSpec(kind="iceberg", table="db.t", options=options))
    assert "hunter2" not in str(caught.value)


def test_settings_of_the_catalog_reach_the_tasks_store() -> None:
    options = {
        "catalog.s3.endpoint": "http://localhost:9000",
        "catalog.s3.access-key-id": "a",
        "store.access_key_id": "b",
    }
    spec = TableSpec(kind="iceberg", table="db.t", options=options)
    assert module._store_options(spec) == {
        "endpoint": "http://localhost:9000",
        "allow_http": "true",
        "access_key_id": "b",
    }
