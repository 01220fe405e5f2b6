"""The specifics of Delta: races, lost responses, and the rules of other writers' tables."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from deltalake.exceptions import DeltaError
from tests.unit.spark.tables.conftest import SCHEMA, Place, recorded_syncs

from penstock.errors import OutcomeUnknown, Unavailable, Unsupported
from penstock.spark.tables import TableSpec, open_table
from penstock.spark.tables import delta as module
from penstock.spark.tables.delta import DeltaLog


def racing(place: Place, monkeypatch: pytest.MonkeyPatch, app: str, version: int) -> None:
    """Let another writer commit between our read of the table and our log entry."""
    load, done = module.load_delta, []

    def load_then_lose(spec: TableSpec) -> DeltaTable | None:
        table = load(spec)
        if not done:
            done.append(True)
            rival = pa.table({"id": pa.array([1000], pa.int64()), "k": pa.array(["r"])})
            mark = CommitProperties(app_transactions=[Transaction(app, version)])
            write_deltalake(spec.path, rival, mode="append", commit_properties=mark)
        return table

    monkeypatch.setattr(module, "load_delta", load_then_lose)


def test_a_concurrent_commit_of_the_same_micro_batch_wins(
    delta: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    delta.open().prepare(SCHEMA)
    files = delta.write([1, 2])
    racing(delta, monkeypatch, "q", 0)
    assert not delta.open().commit("q", 0, files)
    assert delta.ids() == [1000]


def test_a_concurrent_commit_of_another_query_does_no_harm(
    delta: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    delta.open().prepare(SCHEMA)
    files = delta.write([1, 2])
    racing(delta, monkeypatch, "other", 0)
    assert delta.open().commit("q", 0, files)
    assert delta.ids() == [1, 2, 1000]


def test_the_table_is_read_after_a_lost_response(delta: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    delta.open().prepare(SCHEMA)
    files, append = delta.write([1, 2]), module._append

    def append_then_fail(*given: object) -> None:
        append(*given)  # type: ignore[arg-type]
        raise DeltaError("connection reset")

    monkeypatch.setattr(module, "_append", append_then_fail)
    assert delta.open().commit("q", 0, files)
    assert delta.ids() == [1, 2]


def test_an_unknown_outcome_is_settled_by_committing_again(
    delta: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    delta.open().prepare(SCHEMA)
    files = delta.write([1, 2])

    def fail(*_: object) -> None:
        raise DeltaError("timed out https://bucket.example/x?X-Amz-Signature=secret")

    with monkeypatch.context() as patch:
        patch.setattr(module, "_append", fail)
        with pytest.raises(OutcomeUnknown, match="start the query again") as caught:
            delta.open().commit("q", 0, files)
    assert "secret" not in str(caught.value)
    assert delta.open().commit("q", 0, files)
    assert delta.ids() == [1, 2]


def test_a_table_removed_under_the_query_is_reported(delta: Place) -> None:
    with pytest.raises(Unavailable, match="no longer exists"):
        delta.open().commit("q", 0, [])


def test_a_table_with_rules_that_are_not_enforced_is_refused(delta: Place) -> None:
    delta.open().prepare(SCHEMA)
    DeltaTable(delta.spec.path).alter.add_constraint({"positive": "id > 0"})
    with pytest.raises(Unsupported, match=r"delta\.constraints\.positive"):
        delta.open().prepare(SCHEMA)


def test_statistics_let_readers_skip_files(delta: Place) -> None:
    delta.open().prepare(SCHEMA)
    delta.open().commit("q", 0, delta.write(range(10, 20)))
    [action] = pa.table(DeltaTable(delta.spec.path).get_add_actions(flatten=True)).to_pylist()
    assert (action["num_records"], action["min.id"], action["max.id"], action["null_count.k"]) == (
        10,
        10,
        19,
        3,
    )


def test_a_column_that_was_added_to_the_table_may_be_left_out(delta: Place, tmp_path: Path) -> None:
    delta.open().prepare(SCHEMA)
    wider = pa.table({"id": pa.array([1], pa.int64()), "k": ["a"], "new": [True]})
    write_deltalake(delta.spec.path, wider, mode="append", schema_mode="merge")
    delta.open().prepare(SCHEMA)
    delta.open().commit("q", 0, delta.write([2]))
    assert delta.ids() == [1, 2]
    assert isinstance(open_table(delta.spec), DeltaLog)


def log_of(place: Place, version: int) -> list[str]:
    folder = f"{place.spec.path}/_delta_log"
    return [f"{folder}/{version:020}.json", folder]


def test_a_new_table_is_durable(delta: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = recorded_syncs(monkeypatch)
    delta.open().prepare(SCHEMA)
    path = delta.spec.path
    assert synced[-4:] == [*log_of(delta, 0), path, os.path.dirname(path)]


def test_a_commit_is_durable_before_it_is_reported(delta: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    delta.open().prepare(SCHEMA)
    delta.open().commit("q", 0, delta.write([1]))
    files, synced = delta.write([2]), recorded_syncs(monkeypatch)
    assert delta.open().commit("q", 1, files)
    # The previous entry is synced too: its writer may not sync.
    assert synced == [log_of(delta, 1)[0], *log_of(delta, 2)]


def test_an_existing_commit_is_made_durable(delta: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    delta.open().prepare(SCHEMA)
    files = delta.write([1])
    delta.open().commit("q", 0, files)
    delta.open().commit("other", 0, delta.write([2]))
    synced = recorded_syncs(monkeypatch)
    assert not delta.open().commit("q", 0, files)
    assert synced == [log_of(delta, 1)[0], *log_of(delta, 2)]


def test_a_commit_that_cannot_be_made_durable_is_not_reported(
    delta: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    delta.open().prepare(SCHEMA)
    files = delta.write([1])

    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(OutcomeUnknown, match="power cut"):
        delta.open().commit("q", 0, files)


def test_a_folder_of_a_crashed_creation_becomes_a_table(delta: Place) -> None:
    os.makedirs(f"{delta.spec.path}/_delta_log")
    delta.open().prepare(SCHEMA)
    assert delta.ids() == []
