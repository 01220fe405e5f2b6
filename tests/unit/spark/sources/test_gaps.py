from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from tests.unit.spark.conftest import Queue

from penstock.buffer import BatchMissing, SerializationError
from penstock.spark.sources.buffer import read_slices
from penstock.spark.sources.buffer_options import BufferOptions
from penstock.spark.sources.columns import COLUMNS, BatchSlice, Gap, acknowledged_gap, arrow_schema, build_gap
from penstock.spark.sources.offsets import Bounds

METADATA = '{"gap": {"first": 7, "last": 9, "reason": "gone: «a»"}}'.encode()
HELD = Bounds(first=5, following=9)


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (5, 9, None),
        (7, 9, None),
        (2, 9, (2, 4)),
        (2, 5, (2, 4)),
        (2, 4, (2, 3)),
        (4, 4, None),
        (4, 5, (4, 4)),
    ],
)
def test_sequences_that_have_left_the_queue_are_one_gap(
    start: int, end: int, expected: tuple[int, int] | None
) -> None:
    gap = acknowledged_gap(3, start, end, HELD)
    assert (None if gap is None else (gap.first, gap.last)) == expected
    assert gap is None or (gap.shard, gap.location) == (3, None)


def test_the_row_of_a_gap_differs_from_every_record() -> None:
    gap = Gap(shard=2, first=7, last=9, reason="gone: «a»", location=None)
    batch = build_gap(gap, tuple(COLUMNS))
    assert batch.schema == arrow_schema(tuple(COLUMNS))
    assert batch.to_pylist() == [
        {
            "sequence": 7,
            "index": -1,
            "value": None,
            "ingestion_time": None,
            "metadata": METADATA,
            "location": None,
            "shard": 2,
        }
    ]


def slices_of(queue: Queue) -> list[BatchSlice]:
    return [
        BatchSlice(shard=0, sequence=sequence, location=location, manifest="ingest/manifest")
        for sequence, location in queue.entries().locations()
    ]


def rows(options: BufferOptions, slices: list[BatchSlice], *, set_aside: bool) -> list[tuple[int, int]]:
    table = pa.Table.from_batches(list(read_slices(options, slices, set_aside=set_aside)))
    return [(row["sequence"], row["index"]) for row in table.to_pylist()]


def test_bad_batches_become_rows_and_their_data_is_stored_first(queue: Queue) -> None:
    queue.produce(4)
    slices = slices_of(queue)
    (queue.root / slices[1].location).unlink()
    (queue.root / slices[2].location).write_bytes(b"x" * 30)
    options = queue.options(onGap="record")
    dead = queue.root / "ingest" / "manifest.dead"
    assert rows(options, slices, set_aside=False) == [(0, 0), (1, -1), (2, -1), (3, 0)]
    assert not dead.exists()
    assert rows(options, slices, set_aside=True) == rows(options, slices, set_aside=True)
    assert sorted(path.name for path in dead.iterdir()) == [
        "00000000000000000001.json",
        "00000000000000000002.bytes",
        "00000000000000000002.json",
    ]


def test_bad_batches_are_errors_unless_gaps_are_recorded(queue: Queue) -> None:
    queue.produce(2)
    slices = slices_of(queue)
    (queue.root / slices[0].location).unlink()
    (queue.root / slices[1].location).write_bytes(b"x" * 30)
    with pytest.raises(BatchMissing, match="penstock buffer fsck"):
        rows(queue.options(), slices[:1], set_aside=True)
    with pytest.raises(SerializationError, match="is damaged"):
        rows(queue.options(), slices[1:], set_aside=True)


def test_a_worker_that_does_not_see_the_queue_records_no_gap(queue: Queue, tmp_path: Path) -> None:
    queue.produce(1)
    slices = slices_of(queue)
    elsewhere = Queue(root=tmp_path / "another mount")
    elsewhere.root.mkdir()
    with pytest.raises(BatchMissing, match="this worker does not see the queue"):
        rows(elsewhere.options(onGap="record"), slices, set_aside=True)
