"""Pipelines on a real Spark: every record ends in the table or in the dead-letter table, once."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from tests.spark.conftest import Plant

from penstock.config import Setting, merge
from penstock.errors import ConfigError, InvalidInput, PenstockError
from penstock.spark.pipeline import Pipeline
from penstock.spark.pipeline.ledger import BatchLine
from penstock.spark.pipeline.microbatch import MicroBatches
from penstock.spark.pipeline.spec import read_spec

SCHEMA = "user string, n bigint, at timestamp"


def settings(plant: Plant, **more: Setting) -> dict[str, Setting]:
    plain: dict[str, Setting] = {
        "name": "clicks",
        "source": {"buffer": {"store": plant.store}},
        "decode": {"format": "json", "schema": SCHEMA},
        "sink": {"delta": {"path": "table"}},
    }
    for name in ("sinks",):
        if name in more:
            plain.pop("sink")
    return merge(plain, more)


def pipeline(plant: Plant, **more: Setting) -> Pipeline:
    return Pipeline(read_spec(settings(plant, **more), base=plant.root))


def run(plant: Plant, **more: Setting) -> Pipeline:
    made = pipeline(plant, **more)
    assert made.start(plant.spark, once=True).wait(200)
    return made


def click(number: int, user: str = "ann") -> bytes:
    return json.dumps({"user": user, "n": number, "at": "2026-11-16T10:00:00Z"}).encode()


def rows(path: Path, *columns: str) -> list[dict[str, object]]:
    return DeltaTable(str(path)).to_pyarrow_table(columns=list(columns) or None).to_pylist()


def lines(made: Pipeline) -> list[BatchLine]:
    app = json.loads(Path(made.spec.checkpoint_path, "metadata").read_text())["id"]
    return made.ledger.lines(app)


def test_records_are_decoded_transformed_and_delivered_with_their_positions(plant: Plant) -> None:
    plant.produce([[click(n) for n in range(3)], [click(n, "bob") for n in range(3, 5)]])
    made = run(plant, transform="SELECT user, n, date(at) AS day, _sequence, _index FROM input WHERE n <> 1")
    found = sorted(
        (row["n"], row["user"], str(row["day"]), row["_sequence"], row["_index"])
        for row in rows(plant.root / "table")
    )
    assert found == [
        (0, "ann", "2026-11-16", 0, 0),
        (2, "ann", "2026-11-16", 0, 2),
        (3, "bob", "2026-11-16", 1, 0),
        (4, "bob", "2026-11-16", 1, 1),
    ]
    (line,) = lines(made)
    assert line.took_ms > 0
    assert (line.start, line.end, line.read, line.rows, line.dropped("delta")) == (
        {0: 0},
        {0: 2},
        5,
        {"delta": 4},
        1,
    )


BAD = {
    b"": "is empty",
    b"\xff\xfe": "is not valid UTF-8",
    b"nonsense": "does not parse as JSON of the schema",
    b"null": "does not parse as JSON of the schema",
    b"[1]": "does not parse as JSON of the schema",
    b'{"user":"a","n":"many"}': "does not parse as JSON of the schema",
    click(1) + click(2): "does not parse as JSON of the schema",
    click(1) + b"," + click(2): "does not parse as JSON of the schema",
    click(1) + b"} " + click(2): "does not parse as JSON of the schema",
    click(1) + b"]} " + click(2): "does not parse as JSON of the schema",
    click(1) + b',"n":2': "does not parse as JSON of the schema",
    b'{"n":5}': "has no user",
}


def test_bad_records_keep_their_bytes_their_place_and_the_reason(plant: Plant) -> None:
    batch = [record for bad in BAD for record in (click(1), bad)]
    plant.produce([batch])
    made = run(plant, decode={"schema": SCHEMA.replace("user string", "user string not null")})
    letters = rows(plant.root / "table_dead_letters")
    assert {bytes(row["value"]): row["reason"] for row in letters} == BAD  # type: ignore[call-overload]
    assert sorted(row["index"] for row in letters) == list(range(1, 2 * len(BAD), 2))  # type: ignore[type-var]
    assert {(row["pipeline"], row["batch"], row["shard"], row["sequence"]) for row in letters} == {
        ("clicks", 0, 0, 0)
    }
    assert len(rows(plant.root / "table")) == len(BAD)
    (line,) = lines(made)
    assert (line.read, line.dead, line.skipped, line.dropped("delta")) == (2 * len(BAD), len(BAD), 0, 0)


def test_json_beyond_the_limits_becomes_a_letter_and_the_other_records_are_delivered(plant: Plant) -> None:
    levels = (135, 136, 200)
    deep = [b'{"user":"ann","n":%d,"more":%b%b}' % (n, b"[" * n, b"]" * n) for n in levels]
    digits = [b'{"user":"ann","n":1,"more":%b}' % (b"9" * n) for n in (1000, 1001)]
    plant.produce([[click(1), *deep, *digits, click(2)]])
    run(
        plant,
        decode={"schema": "user string, n bigint, more string"},
        transform="SELECT n, more, _index FROM input",
    )
    assert sorted(row["_index"] for row in rows(plant.root / "table")) == [0, 1, 4, 6]  # type: ignore[type-var]
    letters = rows(plant.root / "table_dead_letters")
    assert {row["index"]: bytes(row["value"]) for row in letters} == {  # type: ignore[call-overload]
        2: deep[1],
        3: deep[2],
        5: digits[1],
    }


def test_a_deep_record_in_the_sample_does_not_keep_the_schema_from_being_found(plant: Plant) -> None:
    deep = b'{"user":"ann","n":1,"more":%b1%b}' % (b'{"a":' * 400, b"}" * 400)
    plant.produce([[deep, click(1), click(2)]])
    run(plant, decode={"schema": None})
    assert len(rows(plant.root / "table")) == 2
    assert [bytes(row["value"]) for row in rows(plant.root / "table_dead_letters")] == [deep]  # type: ignore[call-overload]


def test_skip_drops_bad_records_and_counts_them(plant: Plant) -> None:
    plant.produce([[click(1), b"bad"]])
    made = run(plant, on_error="skip")
    assert len(rows(plant.root / "table")) == 1
    assert lines(made)[0].skipped == 1
    assert not (plant.root / "table_dead_letters").exists()


def test_fail_stops_before_anything_of_the_batch_is_written_and_names_the_record(plant: Plant) -> None:
    plant.produce([[click(1), b"bad"]])
    with pytest.raises(PenstockError, match=r"record 1 of sequence 0 .* does not parse as JSON"):
        run(plant, on_error="fail")
    assert not DeltaTable.is_deltatable(str(plant.root / "table")) or rows(plant.root / "table") == []


def test_several_sinks_are_fed_from_one_read_and_totals_are_merged(plant: Plant) -> None:
    sinks: Mapping[str, Setting] = {
        "clicks": {"delta": {"path": "table"}},
        "totals": {
            "transform": "SELECT user, count(*) AS clicks FROM transformed GROUP BY user",
            "delta": {"path": "totals", "merge": {"keys": ["user"], "add": ["clicks"]}},
        },
        "copies": {"transform": "SELECT _value AS value FROM input", "buffer": {"store": "copies"}},
    }
    for start in (0, 10):
        plant.produce([[click(n, "ann" if n % 3 else "bob") for n in range(start, start + 10)]])
        made = run(plant, sinks=sinks, transform="SELECT user, n FROM input")
    assert len(rows(plant.root / "table")) == 20
    assert sorted((row["user"], row["clicks"]) for row in rows(plant.root / "totals")) == [
        ("ann", 13),
        ("bob", 7),
    ]
    frame = plant.spark.read.format("penstock-buffer").load(str(plant.root / "copies"))
    assert sorted(bytes(row[0]) for row in frame.select("value").collect()) == sorted(
        click(n, "ann" if n % 3 else "bob") for n in range(20)
    )
    assert [line.rows for line in lines(made)] == [{"clicks": 10, "totals": 2, "copies": 10}] * 2


def test_a_batch_that_spark_runs_again_changes_no_sink(plant: Plant) -> None:
    sinks: Mapping[str, Setting] = {
        "clicks": {"delta": {"path": "table"}},
        "folder": {"parquet": {"path": "folder"}},
        "copies": {"transform": "SELECT _value AS value FROM input", "buffer": {"store": "copies"}},
        "totals": {
            "transform": "SELECT user, count(*) AS clicks FROM input GROUP BY user",
            "delta": {"path": "totals", "merge": {"keys": ["user"], "add": ["clicks"]}},
        },
    }
    plant.produce([[click(1), b"bad", click(2)]])
    made = run(plant, sinks=sinks)
    shutil.rmtree(Path(made.spec.checkpoint_path, "commits"))
    made = run(plant, sinks=sinks)
    assert len(rows(plant.root / "table")) == 2
    assert len(rows(plant.root / "table_dead_letters")) == 1
    assert rows(plant.root / "totals") == [{"user": "ann", "clicks": 2}]
    assert plant.spark.read.parquet(str(plant.root / "folder")).count() == 2
    assert plant.spark.read.format("penstock-buffer").load(str(plant.root / "copies")).count() == 2
    assert [line.batch for line in lines(made)] == [0]


def test_csv_records_decode(plant: Plant) -> None:
    plant.produce([[b"ann;1;2026-11-16T10:00:00Z", b"bob;x;2026-11-16T10:00:00Z", b""]])
    run(plant, decode={"format": "csv", "options": {"delimiter": ";"}})
    assert [(row["user"], row["n"]) for row in rows(plant.root / "table")] == [("ann", 1)]
    assert sorted(str(row["reason"]) for row in rows(plant.root / "table_dead_letters")) == [
        "does not parse as CSV of the schema",
        "is empty",
    ]


def ipc(**columns: object) -> bytes:
    sink = io.BytesIO()
    table = pa.table(columns)
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def test_arrow_records_have_any_number_of_rows(plant: Plant) -> None:
    plant.produce([[ipc(user=["ann", "bob"], n=[1, 2]), b"no arrow", ipc(user=["eve"], n=["many"])]])
    run(plant, decode={"format": "arrow", "schema": "user string, n bigint"})
    assert sorted((row["user"], row["n"]) for row in rows(plant.root / "table")) == [("ann", 1), ("bob", 2)]
    assert len(rows(plant.root / "table_dead_letters")) == 2


def test_raw_records_arrive_unchanged(plant: Plant) -> None:
    plant.produce([[b"\x00\xff", b""]])
    run(plant, decode={"format": "raw", "schema": None})
    assert sorted(bytes(row["value"]) for row in rows(plant.root / "table")) == [b"", b"\x00\xff"]  # type: ignore[call-overload]


def test_a_schema_is_inferred_once_and_kept(plant: Plant) -> None:
    with pytest.raises((InvalidInput, PenstockError), match=r"produce some first|there is no manifest"):
        run(plant, decode={"schema": None})
    plant.produce([[click(1)]])
    run(plant, decode={"schema": None})
    plant.produce([[b'{"user":"zoe","n":2,"extra":true}']])
    made = run(plant, decode={"schema": None})
    assert sorted(str(row["user"]) for row in rows(plant.root / "table")) == ["ann", "zoe"]
    kept = made.ledger.kept("schema.json")
    assert kept is not None
    assert "extra" not in json.dumps(kept)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"transform": "SELECT user, count(*) AS c FROM input GROUP BY user"}, "partial results"),
        ({"transform": "SELECT * FROM input LIMIT 3"}, "LIMIT"),
        ({"transform": "SELECT usr FROM input"}, "usr"),
    ],
    ids=["grouped", "limited", "unknown column"],
)
def test_a_transform_that_cannot_be_exact_is_refused(
    plant: Plant, more: dict[str, Setting], problem: str
) -> None:
    plant.produce([[click(1)]])
    with pytest.raises((ConfigError, PenstockError), match=problem):
        run(plant, **more)


def test_starting_at_the_latest_means_the_latest_of_the_first_start(plant: Plant) -> None:
    source: Setting = {"buffer": {"starting": "latest"}}
    plant.produce([[click(1)]])
    made = run(plant, source=source)
    plant.produce([[click(2)]])
    run(plant, source=source)
    # The very first micro-batch is repeated while the queue has grown.
    shutil.rmtree(Path(made.spec.checkpoint_path, "commits"))
    plant.produce([[click(3)]])
    run(plant, source=source)
    assert sorted(row["n"] for row in rows(plant.root / "table")) == [2, 3]  # type: ignore[type-var]


def test_the_origin_is_kept_when_spark_has_forgotten_its_first_micro_batches(plant: Plant) -> None:
    trigger: Setting = {"max_batches": 1}
    plant.produce([[click(0)], [click(1)], [click(2)]])
    made = run(plant, trigger=trigger)
    for folder in ("offsets", "commits"):
        Path(made.spec.checkpoint_path, folder, "0").unlink()
    plant.produce([[click(3)]])
    run(plant, trigger=trigger)
    assert made.ledger.kept("origin.json") == {"0": 0}
    assert sorted(row["n"] for row in rows(plant.root / "table")) == [0, 1, 2, 3]  # type: ignore[type-var]
    assert [(line.start, line.end) for line in lines(made)] == [({0: n}, {0: n + 1}) for n in range(4)]


MERGE: Setting = {"path": "table", "merge": {"keys": ["user"], "add": ["clicks"]}}
GROUPED = "SELECT user, count(*) AS clicks FROM input GROUP BY user"


def test_a_merge_may_be_the_only_sink(plant: Plant) -> None:
    plant.produce([[click(1), b"bad", click(2)]])
    made = run(plant, sink={"delta": MERGE}, transform=GROUPED)
    assert rows(plant.root / "table") == [{"user": "ann", "clicks": 2}]
    (line,) = lines(made)
    assert (line.read, line.dead, line.rows) == (3, 1, {"delta": 1})


@pytest.mark.parametrize(
    "transform",
    ["SELECT n FROM input WHERE 1 = 0", "SELECT n FROM input WHERE n < 0 ORDER BY n"],
    ids=["never", "sorted nothing"],
)
def test_a_micro_batch_without_rows_is_counted(plant: Plant, transform: str) -> None:
    plant.produce([[click(1), b"bad"]])
    made = run(plant, transform=transform)
    (line,) = lines(made)
    assert (line.read, line.dead, line.rows, line.dropped("delta")) == (2, 1, {"delta": 0}, 1)
    assert len(rows(plant.root / "table_dead_letters")) == 1


def test_a_checkpoint_that_was_set_back_is_refused_before_it_swallows_records(plant: Plant) -> None:
    trigger: Setting = {"max_batches": 1}
    plant.produce([[click(1)], [click(2)]])
    made = run(plant, trigger=trigger)
    for folder in ("offsets", "commits"):
        Path(made.spec.checkpoint_path, folder, "1").unlink()
    plant.produce([[click(3)]])
    with pytest.raises(PenstockError, match="micro-batch 1 was planned before as 1 to 1"):
        run(plant, trigger={"max_batches": 5})
    assert sorted(row["n"] for row in rows(plant.root / "table")) == [1, 2]  # type: ignore[type-var]


def test_a_schema_that_changes_under_a_batch_that_a_sink_has_is_refused(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object) -> None:
        raise OSError("the disk is full")

    plant.produce([[b'{"n":1}', b'{"n":"99999999999"}']])
    with monkeypatch.context() as patched:
        patched.setattr(MicroBatches, "_write_letters", crash)
        with pytest.raises(Exception, match="disk is full"):
            run(plant, decode={"schema": "n int"})
    with pytest.raises(PenstockError, match="started with another decode section"):
        run(plant, decode={"schema": "n bigint"})
    run(plant, decode={"schema": "n int"})
    assert len(rows(plant.root / "table")) + len(rows(plant.root / "table_dead_letters")) == 2


def test_a_new_checkpoint_does_not_deliver_again_what_the_ledger_knows(plant: Plant) -> None:
    plant.produce([[click(1)]])
    made = run(plant)
    shutil.rmtree(made.spec.checkpoint_path)
    plant.produce([[click(2)]])
    with pytest.raises(ConfigError, match=r"set source\.buffer\.starting to 1 to continue"):
        run(plant)
    run(plant, source={"buffer": {"starting": "1"}})
    assert sorted(row["n"] for row in rows(plant.root / "table")) == [1, 2]  # type: ignore[type-var]
