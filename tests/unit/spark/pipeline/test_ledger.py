"""The ledger: one line per micro-batch, durable, repeatable, and safe from an old driver."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from penstock.errors import Corrupt
from penstock.objects import StoreConfig
from penstock.spark.pipeline.ledger import LINES_PER_OBJECT, BatchLine, Ledger


def line(batch: int, rows: int = 8) -> BatchLine:
    return BatchLine(
        batch=batch,
        start={0: batch * 10},
        end={0: batch * 10 + 10},
        read=10,
        dead=1,
        rows={"delta": rows},
        one_to_one={"delta": True},
        at_ms=1,
    )


def ledger(tmp_path: Path) -> Ledger:
    return Ledger(StoreConfig(url=str(tmp_path / "ledger")))


def test_lines_come_back_in_order_over_many_objects(tmp_path: Path) -> None:
    books = ledger(tmp_path)
    batches = [0, 1, LINES_PER_OBJECT - 1, LINES_PER_OBJECT, LINES_PER_OBJECT + 1]
    for batch in batches:
        books.write("app", line(batch))
    assert [found.batch for found in ledger(tmp_path).lines("app")] == batches
    assert ledger(tmp_path).lines("other") == []


@pytest.mark.parametrize("damage", ["torn", "cut", "zeroed", "missing", "older"])
def test_lines_that_a_finished_micro_batch_has_lost_are_reported(tmp_path: Path, damage: str) -> None:
    books = ledger(tmp_path)
    for batch in range(3):
        books.write("app", line(batch))
    [file] = (tmp_path / "ledger" / "app").iterdir()
    older = file.read_bytes()
    for batch in range(3, 6):
        books.write("app", line(batch))
    raw = file.read_bytes()
    assert ledger(tmp_path).without_line("app", range(6)) == []
    if damage == "missing":
        file.unlink()
    else:
        at_a_line = raw[: raw.rstrip().rindex(b"\n") + 1]
        left = {"torn": raw[:-20], "cut": at_a_line, "zeroed": bytes(len(raw)), "older": older}
        file.write_bytes(left[damage])
    if damage in ("torn", "zeroed"):
        with pytest.raises(Corrupt):
            ledger(tmp_path).without_line("app", range(6))
        return
    lost = {"cut": [5], "missing": [*range(6)], "older": [3, 4, 5]}[damage]
    assert ledger(tmp_path).without_line("app", range(6)) == lost


def test_a_line_that_is_written_again_replaces_itself(tmp_path: Path) -> None:
    ledger(tmp_path).write("app", line(0, rows=3))
    ledger(tmp_path).write("app", line(0, rows=8))
    assert ledger(tmp_path).lines("app") == [line(0, rows=8)]


def test_an_old_driver_cannot_overwrite_its_successors_lines(tmp_path: Path) -> None:
    old, new = ledger(tmp_path), ledger(tmp_path)
    old.write("app", line(0))
    new.write("app", line(1))
    new.write("app", line(2))
    old.write("app", line(1))
    assert [found.batch for found in new.lines("app")] == [0, 1, 2]


def test_damage_is_reported_with_the_object_and_nothing_overwrites_it(tmp_path: Path) -> None:
    ledger(tmp_path).write("app", line(0))
    (file,) = (tmp_path / "ledger/app").glob("*.jsonl")
    file.write_bytes(b"{broken")
    with pytest.raises(Corrupt, match=r"app/0+\.jsonl"):
        ledger(tmp_path).lines("app")
    with pytest.raises(Corrupt):
        ledger(tmp_path).write("app", line(1))
    assert file.read_bytes() == b"{broken"


def test_the_records_that_a_transform_dropped_are_the_difference() -> None:
    assert line(0, rows=7).dropped("delta") == 2
    grouped = BatchLine(batch=0, start={}, end={}, read=10, rows={"totals": 2}, at_ms=1)
    assert grouped.dropped("totals") is None


def test_documents_are_kept_and_replaced(tmp_path: Path) -> None:
    books = ledger(tmp_path)
    assert books.kept("origin.json") is None
    books.keep("origin.json", {"0": 1})
    books.keep("origin.json", {"0": 2})
    assert pickle.loads(pickle.dumps(books)).kept("origin.json") == {"0": 2}
