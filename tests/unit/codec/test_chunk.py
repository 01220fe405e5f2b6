"""Chunks give the same bytes regardless of how they are cut and how the records were passed."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.buffer import CompressionType
from penstock.buffer import batch as batches
from penstock.codec import RecordChunk, encode_records

RECORDS = st.lists(st.binary(max_size=40), max_size=60)


@given(RECORDS, st.integers(1, 200))
@example([b"ab", b""], 1)  # empty records after the last cut belong to the last piece
def test_joined_pieces_are_the_whole_chunk(records: list[bytes], piece_bytes: int) -> None:
    values = pa.array(records, pa.binary())
    chunk = RecordChunk.of_array(values)
    pieces = list(chunk.pieces(piece_bytes))
    assert b"".join(piece.encode() for piece in pieces) == bytes(encode_records(values))
    assert sum(map(len, pieces)) == len(records)
    longest = max(map(len, records), default=0)
    assert all(piece.record_bytes <= piece_bytes + longest for piece in pieces)


@given(RECORDS)
def test_a_list_and_an_array_encode_alike(records: list[bytes]) -> None:
    listed = RecordChunk.of_list(records)
    array = RecordChunk.of_array(pa.array(records, pa.binary()))
    assert bytes(listed.encode()) == bytes(array.encode())
    assert listed.lengths.tolist() == array.lengths.tolist() == [len(record) for record in records]
    assert listed.record_bytes == sum(map(len, records))


def test_a_second_iteration_over_a_batch_returns_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "PIECE_BYTES", 1000)
    records = [bytes([n % 256]) * (n % 90) for n in range(500)]
    encoded = batches.encode_batch([pa.array(records, pa.binary())], CompressionType.NONE)
    assert len(encoded.parts) > 10
    assert b"".join(encoded.parts) == b"".join(encoded.parts)
    assert sum(part.nbytes for part in encoded.parts) == encoded.size
    assert batches.decode_batch(memoryview(encoded.to_bytes())).to_list() == records
    assert bytes(encoded.parts[-1]) == bytes(encoded.parts[len(encoded.parts) - 1])
