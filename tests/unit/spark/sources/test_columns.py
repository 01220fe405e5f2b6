from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pytest

from penstock.buffer.batch import CompressionType, decode_batch, encode_batch
from penstock.buffer.manifest import Entry, Metadata
from penstock.codec import Block
from penstock.spark.sources import columns
from penstock.spark.sources.buffer import partition_slices, slice_of
from penstock.spark.sources.columns import COLUMNS, BatchSlice, build_batch, regroup


def block_of(values: Sequence[bytes]) -> Block:
    encoded = encode_batch([pa.array(list(values), pa.binary())], CompressionType.NONE)
    return decode_batch(memoryview(encoded.to_bytes()))


def entry_of(*metas: Metadata) -> BatchSlice:
    entry = Entry(sequence=7, location="ingest/x.batch", metadata=metas)
    return slice_of(2, entry, with_metadata=True)


def test_every_record_gets_the_time_and_metadata_of_its_call() -> None:
    slice_ = entry_of(
        Metadata(start_index=0, ingestion_time_ms=1000, payload=b"a"),
        Metadata(start_index=2, ingestion_time_ms=2500, payload=b""),
    )
    batch = build_batch(slice_, block_of([b"x", b"", b"z"]), list(COLUMNS))
    assert batch.schema == columns.arrow_schema(list(COLUMNS))
    rows = batch.to_pydict()
    assert rows["value"] == [b"x", b"", b"z"]
    assert rows["metadata"] == [b"a", b"a", b""]
    assert [time.timestamp() for time in rows["ingestion_time"]] == [1.0, 1.0, 2.5]
    assert (rows["sequence"], rows["index"], rows["shard"]) == ([7] * 3, [0, 1, 2], [2] * 3)
    assert rows["location"] == ["ingest/x.batch"] * 3


@pytest.mark.parametrize("metas", [(), (Metadata(start_index=9, ingestion_time_ms=1),)])
def test_records_that_no_call_claims_have_no_time(metas: tuple[Metadata, ...]) -> None:
    rows = build_batch(entry_of(*metas), block_of([b"x", b"y"]), ["ingestion_time", "metadata"]).to_pydict()
    assert rows == {"ingestion_time": [None, None], "metadata": [None, None]}


def test_a_time_that_does_not_fit_into_microseconds_is_null() -> None:
    slice_ = entry_of(Metadata(start_index=0, ingestion_time_ms=-(2**63)))
    assert build_batch(slice_, block_of([b"x"]), ["ingestion_time"]).to_pydict() == {"ingestion_time": [None]}


def test_an_empty_batch_has_the_schema_and_no_rows() -> None:
    batch = build_batch(entry_of(), block_of([]), list(COLUMNS))
    assert (batch.num_rows, batch.schema) == (0, columns.arrow_schema(list(COLUMNS)))


def batches(*rows: int, width: int = 1) -> list[pa.RecordBatch]:
    return [pa.RecordBatch.from_pydict({"value": [b"x" * width] * count}) for count in rows]


def test_small_batches_are_joined_and_large_ones_cut_without_losing_a_row() -> None:
    out = list(regroup(batches(10, 0, 20, 9000, 5, 100_000)))
    assert sum(batch.num_rows for batch in out) == 109_035
    assert all(batch.num_rows <= columns.ROWS_MAX for batch in out)
    assert len(out) < 7


def test_large_records_are_cut_by_bytes_down_to_one() -> None:
    out = list(regroup(batches(3, width=columns.BYTES_MAX)))
    assert [batch.num_rows for batch in out] == [1, 1, 1]
    assert [batch.num_rows for batch in regroup(batches(8, width=columns.BYTES_MAX // 3))] == [2, 2, 2, 2]


@pytest.mark.parametrize(("count", "partitions"), [(0, 4), (1, 4), (4, 4), (10, 4), (10, 1), (1000, 7)])
def test_work_is_divided_evenly_in_order_and_without_empty_tasks(count: int, partitions: int) -> None:
    slices = [BatchSlice(shard=0, sequence=n, location="x") for n in range(count)]
    parts = partition_slices(slices, partitions)
    assert [s for part in parts for s in part.slices] == slices
    assert len(parts) == min(count, partitions)
    lengths = [len(part.slices) for part in parts]
    assert not lengths or max(lengths) - min(lengths) <= 1


def test_metadata_without_a_column_is_not_sent_to_the_tasks() -> None:
    entry = Entry(
        sequence=1, location="x", metadata=(Metadata(start_index=0, ingestion_time_ms=1, payload=b"p"),)
    )
    slice_ = slice_of(0, entry, with_metadata=False)
    assert (slice_.starts, slice_.times_ms, slice_.payloads) == (b"", b"", None)
