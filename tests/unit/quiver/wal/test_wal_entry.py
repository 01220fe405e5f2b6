from __future__ import annotations

import struct

import pyarrow as pa
import pytest
import xxhash

from penstock.errors import Corrupt, LimitExceeded
from penstock.quiver.wal.entry import ENTRY_BYTES_MAX, Opening, SlotPart, WalEntry, WalFormat, encode_entry
from penstock.quiver.wal.payload import decode_batch, encode_part, fingerprint

PLAIN = pa.record_batch({"n": pa.array([1, 2, 3], pa.int64()), "s": ["a", None, "c"]})
NESTED = pa.record_batch(
    {
        "d": pa.array(["x", "y", "x"]).dictionary_encode(),
        "l": pa.array([[{"k": "a"}], None, []], pa.list_(pa.struct([("k", pa.string())]))),
    }
)
FORMAT = WalFormat()


def entry(*parts: SlotPart, wal_seq: int = 7) -> bytes:
    return b"".join(encode_entry(123, wal_seq, parts)[0])


def test_an_entry_has_the_bytes_of_the_format() -> None:
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, PLAIN.schema) as writer:
        writer.write_batch(PLAIN)
    payload = stream.getvalue().to_pybytes()
    body = struct.pack("<BqQQ", 0, 123, 7, 1 << 50)
    body += struct.pack("<H32sII", 50, fingerprint(PLAIN.schema), 3, len(payload)) + payload
    expected = struct.pack("<I", len(body)) + body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))
    assert entry(encode_part(50, PLAIN)) == expected


@pytest.mark.parametrize("batch", [PLAIN, NESTED, PLAIN.slice(1, 1), PLAIN.slice(0, 0)])
def test_a_batch_is_decoded_unchanged(batch: pa.RecordBatch) -> None:
    data = memoryview(entry(encode_part(51, batch)))
    found = WalEntry.decode(data[4:-8])
    assert (found.ingest_ns, found.wal_seq) == (123, 7)
    assert decode_batch(found.parts[0]).equals(batch)


def test_several_slots_are_decoded_in_order() -> None:
    data = memoryview(entry(encode_part(3, PLAIN), encode_part(51, NESTED)))
    assert [part.slot for part in WalEntry.decode(data[4:-8]).parts] == [3, 51]


def test_zero_bytes_are_not_an_entry() -> None:
    assert FORMAT.frame_end(memoryview(bytes(4096)), 0, 4096) is None


def test_any_flipped_bit_is_detected() -> None:
    data = entry(encode_part(50, PLAIN))
    for bit in range(0, len(data) * 8, 3):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        assert FORMAT.frame_end(memoryview(damaged), 0, len(damaged)) is None


def test_every_truncated_entry_is_invalid() -> None:
    data = memoryview(entry(encode_part(50, PLAIN)))
    assert FORMAT.frame_end(data, 0, len(data)) == len(data)
    assert all(FORMAT.frame_end(data, 0, limit) is None for limit in range(len(data)))


def test_a_length_beyond_the_limit_is_refused_before_reading() -> None:
    data = struct.pack("<I", ENTRY_BYTES_MAX + 1) + bytes(64)
    assert FORMAT.frame_end(memoryview(data), 0, 1 << 40) is None


def test_a_bundle_larger_than_an_entry_is_refused() -> None:
    part = SlotPart(slot=50, fingerprint=bytes(32), rows=1, payload=[], byte_count=ENTRY_BYTES_MAX)
    with pytest.raises(LimitExceeded, match="split it"):
        encode_entry(0, 1, [part])


def test_marks_have_one_length_and_one_start() -> None:
    low, high = FORMAT.mark(0), FORMAT.mark(2**64 - 1)
    assert len(low) == len(high) == 37
    assert low[:13] == high[:13]
    assert FORMAT.read_mark(memoryview(high)) == 2**64 - 1
    assert FORMAT.read_mark(memoryview(entry(encode_part(50, PLAIN)))) is None


def test_an_opening_is_decoded_and_is_not_a_mark() -> None:
    opening = Opening(position=2**40, number=9, salt=2**64 - 3)
    data = memoryview(bytes(5) + opening.encode())
    assert Opening.decode(data, 5) == opening
    assert Opening.decode(data, 4) is None
    assert FORMAT.read_mark(data[5:]) is None


@pytest.mark.parametrize("cut", [10, 30, 66, 80])
def test_an_inconsistent_body_is_corrupt(cut: int) -> None:
    body = memoryview(entry(encode_part(50, PLAIN)))[4:-8]
    with pytest.raises(Corrupt):
        WalEntry.decode(body[:cut])
    with pytest.raises(Corrupt, match="after its last slot"):
        WalEntry.decode(memoryview(bytes(body) + b"x"))


def test_a_payload_that_is_not_a_stream_is_corrupt() -> None:
    part = SlotPart(slot=50, fingerprint=bytes(32), rows=1, payload=[memoryview(b"nonsense")], byte_count=8)
    with pytest.raises(Corrupt, match="not an Arrow stream"):
        decode_batch(part)


def read_back(batch: pa.RecordBatch) -> pa.RecordBatch:
    data = memoryview(entry(encode_part(51, batch)))
    return decode_batch(WalEntry.decode(data[4:-8]).parts[0])


def test_metadata_of_one_schema_is_not_used_for_another() -> None:
    for name in (b"a", b"b", b"a"):
        batch = PLAIN.replace_schema_metadata({b"name": name})
        assert read_back(batch).schema.metadata == {b"name": name}
        assert encode_part(51, batch).fingerprint == encode_part(51, PLAIN).fingerprint


def test_a_stream_that_is_larger_than_its_columns_is_complete() -> None:
    wide = pa.record_batch({f"c{n}": pa.array(["x"]).dictionary_encode() for n in range(800)})
    assert encode_part(51, wide).byte_count > wide.nbytes + 64 * 1024
    assert read_back(wide).equals(wide)
