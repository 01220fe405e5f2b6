from __future__ import annotations

import hashlib
import struct

import pyarrow as pa
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.buffer.doubles import golden

from penstock.buffer import CompressionType, SerializationError
from penstock.buffer.batch import decode_batch, encode_batch

WORDS = [b"hello", b"", b"foo"]
TABLED = [b"%d:" % n + b"x" * (n % 7) for n in range(80)]


def stored(records: list[bytes], compression: CompressionType = CompressionType.NONE) -> bytes:
    return encode_batch([pa.array(records, pa.binary())], compression).to_bytes()


def read(raw: bytes, **caps: int) -> list[bytes]:
    return decode_batch(memoryview(raw), **caps).to_list()


def test_the_uncompressed_example_is_encoded_byte_for_byte() -> None:
    assert stored(WORDS) == golden("none.batch")
    assert hashlib.sha256(golden("none.batch")).hexdigest().startswith("f8db95b7d30afdd0")
    assert encode_batch([], CompressionType.NONE).to_bytes() == golden("empty-none.batch")
    assert stored([]) == golden("empty-none.batch")


def test_large_blocks_are_encoded_byte_for_byte() -> None:
    assert stored(TABLED) == golden("table.batch")


@pytest.mark.parametrize(
    ("name", "records"),
    [
        ("none", WORDS),
        ("zstd", WORDS),
        ("empty-none", []),
        ("empty-zstd", []),
        ("table", TABLED),
        ("table-zstd-checksum", TABLED),
    ],
)
def test_golden_batches_decode(name: str, records: list[bytes]) -> None:
    assert read(golden(f"{name}.batch")) == records


@given(st.lists(st.lists(st.binary(max_size=30), max_size=60), max_size=4), st.sampled_from(CompressionType))
def test_all_records_of_all_chunks_are_decoded_in_order(
    chunks: list[list[bytes]], compression: CompressionType
) -> None:
    encoded = encode_batch([pa.array(chunk, pa.binary()) for chunk in chunks], compression)
    raw = encoded.to_bytes()
    assert len(raw) == encoded.size
    assert encoded.record_count == sum(map(len, chunks))
    assert read(raw) == [record for chunk in chunks for record in chunk]


@pytest.mark.parametrize("name", ["none", "zstd", "empty-none", "empty-zstd", "table", "table-zstd-checksum"])
def test_truncation_at_every_offset_is_a_serialization_error(name: str) -> None:
    raw = golden(f"{name}.batch")
    for size in range(len(raw)):
        with pytest.raises(SerializationError):
            read(raw[:size])


@pytest.mark.parametrize("name", ["none", "zstd", "table-zstd-checksum"])
def test_a_block_cut_before_its_footer_is_a_serialization_error(name: str) -> None:
    raw = golden(f"{name}.batch")
    for size in range(len(raw) - 7):
        with pytest.raises(SerializationError):
            read(raw[:size] + raw[-7:])


def test_a_table_cut_away_or_cut_short_changes_nothing() -> None:
    raw = golden("table.batch")
    table_bytes = 80 + 13
    for lost in range(1, table_bytes + 1):
        assert read(raw[: -7 - lost] + raw[-7:]) == TABLED


@pytest.mark.parametrize("kind", [2, 3, 127, 255])
def test_reserved_compression_types_are_refused(kind: int) -> None:
    with pytest.raises(SerializationError, match=f"compression type {kind}"):
        read(golden("none.batch")[:-7] + struct.pack("<BIH", kind, 3, 1))


@pytest.mark.parametrize("version", [0, 2, 99])
def test_every_other_version_is_refused(version: int) -> None:
    with pytest.raises(SerializationError, match=f"version {version}"):
        read(golden("none.batch")[:-2] + struct.pack("<H", version))


@pytest.mark.parametrize("count", [6, 100, 2**32 - 1])
def test_a_record_count_beyond_the_block_is_refused(count: int) -> None:
    with pytest.raises(SerializationError):
        read(golden("none.batch")[:-7] + struct.pack("<BIH", 0, count, 1))


def test_bytes_after_the_last_record_are_ignored() -> None:
    raw = golden("none.batch")
    assert read(raw[:-7] + b"for a later version" + raw[-7:]) == WORDS
    assert read(raw[:-7] + struct.pack("<BIH", 0, 2, 1)) == WORDS[:2]


def test_compressed_bytes_that_claim_to_be_plain_do_not_decode_as_records() -> None:
    raw = golden("zstd.batch")
    with pytest.raises(SerializationError):
        read(raw[:-7] + struct.pack("<BIH", 0, 3, 1))


def test_a_block_above_the_cap_is_refused() -> None:
    assert read(golden("none.batch"), bytes_max=20) == WORDS
    for name in ("none", "zstd"):
        with pytest.raises(SerializationError, match="cap"):
            read(golden(f"{name}.batch"), bytes_max=19)


def test_several_frames_make_one_block() -> None:
    block = golden("none.batch")[:-7]
    maker = zstandard.ZstdCompressor()
    frames = maker.compress(block[:7]) + maker.compress(block[7:])
    assert read(frames + struct.pack("<BIH", 1, 3, 1)) == WORDS


def test_nothing_is_joined_for_an_uncompressed_batch() -> None:
    chunks = [pa.array([b"one"], pa.binary()), pa.array([b"two"], pa.binary())]
    assert len(encode_batch(chunks, CompressionType.NONE).parts) == 3
    assert len(encode_batch(chunks, CompressionType.ZSTD).parts) == 2
