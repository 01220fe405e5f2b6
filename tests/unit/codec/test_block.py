from __future__ import annotations

import re
import struct

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.codec import (
    as_binary_array,
    block,
    encode_records,
    index_block,
    length_table,
    record_bytes,
    record_lengths,
)
from penstock.codec.block import TABLE_MAGIC, TABLE_RECORDS_MIN
from penstock.errors import Corrupt, InvalidInput, LimitExceeded


def block_of(records: list[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(record)) + record for record in records)


def table_of(lengths: list[int], width: int = 1, count: int | None = None) -> bytes:
    kind = {1: "<u1", 2: "<u2", 4: "<u4"}[width]
    tail = struct.pack("<BI8s", width, len(lengths) if count is None else count, TABLE_MAGIC)
    return np.array(lengths, kind).tobytes() + tail


def decoded(raw: bytes, count: int) -> list[bytes]:
    found = index_block(pa.py_buffer(raw), count)
    as_list = found.to_list()
    assert found.to_arrow().to_pylist() == as_list
    assert found.to_arrow_view().to_pylist() == as_list
    assert found.to_arrow().validate(full=True) is None
    assert found.to_arrow_view().validate(full=True) is None
    assert found.record_bytes == sum(map(len, as_list))
    assert len(found) == count
    return as_list


records_st = st.lists(st.binary(max_size=40), max_size=150)
MIXED = [b"%d" % n * (n % 5) for n in range(100)]
VARIED = [bytes([n]) * (13 + n % 11) for n in range(100)]


@given(records_st)
def test_records_are_decoded_unchanged(records: list[bytes]) -> None:
    values = as_binary_array(records)
    block, lengths = encode_records(values), record_lengths(values)
    assert bytes(block) == block_of(records)
    assert lengths.tolist() == [len(record) for record in records]
    assert decoded(bytes(block) + length_table(lengths), len(records)) == records


@given(records_st, st.sampled_from(["binary", "large", "view", "chunked", "sliced", "chunked view"]))
def test_every_input_form_gives_the_same_records(records: list[bytes], kind: str) -> None:
    held: pa.Array | pa.ChunkedArray
    match kind:
        case "binary":
            held = pa.array(records, pa.binary())
        case "large":
            held = pa.array(records, pa.large_binary())
        case "view":
            held = pa.array(records, pa.binary_view())
        case "sliced":
            held = pa.array([b"before", *records, b"after"], pa.binary()).slice(1, len(records))
        case "chunked":
            half = len(records) // 2
            held = pa.chunked_array([records[:half], records[half:]], pa.binary())
        case _:
            half = len(records) // 3
            held = pa.chunked_array([records[:half], [], records[half:]], pa.binary_view())
    values = as_binary_array(held)
    assert values.to_pylist() == records
    assert record_bytes(values) == sum(map(len, records))
    block, lengths = encode_records(values), record_lengths(values)
    assert decoded(bytes(block) + length_table(lengths), len(records)) == records


@given(st.integers(1, 20), st.integers(0, 100), st.integers(0, 5))
def test_fixed_size_records_of_a_slice_are_accepted(size: int, count: int, skip: int) -> None:
    values = [bytes([n % 256]) * size for n in range(count + skip)]
    held = as_binary_array(pa.array(values, pa.binary(size)).slice(skip))
    block, lengths = encode_records(held), record_lengths(held)
    assert decoded(bytes(block) + length_table(lengths), count) == values[skip:]


def test_a_tuple_is_a_list_of_records() -> None:
    assert as_binary_array((b"a", b"")).to_pylist() == [b"a", b""]


@pytest.mark.parametrize(
    "held",
    [
        pa.array([b"a", None], pa.binary()),
        pa.array([b"a", None], pa.binary_view()),
        pa.chunked_array([[b"a"], [None]], pa.binary()),
        pa.array([None], pa.null()),
        pa.array(["text"]),
        pa.array([1, 2]),
        [b"a", None],
        [b"a", "text"],
        [bytearray(b"a")],
        [1],
        "text",
        b"bytes",
        memoryview(b"bytes"),
        None,
        5,
        {b"a"},
        iter([b"a"]),
    ],
    ids=lambda held: type(held).__name__,
)
def test_other_values_than_a_list_of_bytes_are_refused(held: object) -> None:
    with pytest.raises(InvalidInput):
        as_binary_array(held)


def test_the_error_names_the_first_invalid_record() -> None:
    with pytest.raises(InvalidInput, match="record 2 is str"):
        as_binary_array([b"a", b"b", "c", "d"])


def test_a_null_outside_a_slice_is_ignored() -> None:
    assert as_binary_array(pa.array([None, b"a"], pa.binary()).slice(1)).to_pylist() == [b"a"]


@pytest.mark.parametrize(("longest", "width"), [(255, 1), (256, 2), (65535, 2), (65536, 4)])
def test_the_table_is_as_wide_as_the_longest_record_needs(longest: int, width: int) -> None:
    records = [b"r"] * 63 + [bytes(longest)]
    values = as_binary_array(records)
    block, lengths = encode_records(values), record_lengths(values)
    table = length_table(lengths)
    assert table == table_of([len(record) for record in records], width)
    assert decoded(bytes(block) + table, 64) == records


def test_a_small_block_has_no_table() -> None:
    assert length_table(np.ones(TABLE_RECORDS_MIN - 1, "<u4")) == b""
    assert length_table(np.ones(TABLE_RECORDS_MIN, "<u4")) != b""


@pytest.mark.parametrize("records", [MIXED, VARIED], ids=["short", "long"])
def test_a_block_without_a_table_is_walked(records: list[bytes]) -> None:
    assert decoded(block_of(records), 100) == records


@pytest.mark.parametrize("records", [MIXED, VARIED], ids=["short", "long"])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda lengths: table_of([*lengths[1:], lengths[0]]),
        lambda lengths: table_of([lengths[0] + 1, *lengths[1:]]),
        lambda lengths: table_of([lengths[0] + lengths[1], 0, *lengths[2:]]),
        lambda lengths: table_of([0] * len(lengths)),
        lambda lengths: table_of(lengths, width=2),
        lambda lengths: table_of(lengths, width=4),
        lambda lengths: table_of(lengths[:-1]),
        lambda lengths: table_of(lengths, count=2**32 - 1),
        lambda lengths: table_of(lengths)[:-13] + struct.pack("<BI8s", 3, len(lengths), TABLE_MAGIC),
        lambda lengths: table_of(lengths)[:-1] + b"2",
        lambda lengths: table_of(lengths) + b"?",
        lambda lengths: table_of([2**32 - 1] * len(lengths), width=4),
        lambda lengths: b"some bytes nobody knows",
    ],
)
def test_a_table_that_contradicts_the_headers_is_ignored(records: list[bytes], spoil: object) -> None:
    assert callable(spoil)
    tail = spoil([len(record) for record in records])
    assert decoded(block_of(records) + tail, 100) == records


def test_a_table_hidden_in_the_last_record_does_not_move_the_others() -> None:
    inner = table_of([0] * 64)
    records = [b""] * 63 + [b"payload" + inner]
    assert decoded(block_of(records), 64) == records


@pytest.mark.parametrize("size", [0, 1, 12, 13, 300])
def test_records_of_one_length_decode_without_a_table(size: int) -> None:
    records = [bytes([n]) * size for n in range(100)]
    assert decoded(block_of(records), 100) == records
    assert decoded(block_of(records) + b"trailing", 100) == records


def test_one_odd_record_among_equal_ones_is_found() -> None:
    for place in (0, 1, 50, 99):
        records = [b"12345678"] * 100
        records[place] = b"123"
        assert decoded(block_of(records), 100) == records


@pytest.mark.parametrize("records", [MIXED, VARIED, [b"abc"] * 100, [b"a", b"", b"b"]], ids=len)
def test_a_block_cut_anywhere_is_corrupt(records: list[bytes]) -> None:
    raw = block_of(records)
    for size in range(len(raw)):
        with pytest.raises(Corrupt):
            index_block(pa.py_buffer(raw[:size]), len(records))


@pytest.mark.parametrize("count", [4, 1000, 2**32 - 1])
def test_a_count_beyond_the_bytes_is_corrupt_before_anything_is_allocated(count: int) -> None:
    with pytest.raises(Corrupt):
        index_block(pa.py_buffer(block_of([b"a", b"b", b"c"])), count)


def test_a_smaller_count_leaves_the_rest_unread() -> None:
    assert decoded(block_of([b"a", b"b", b"c"]), 2) == [b"a", b"b"]
    assert decoded(block_of(MIXED) + table_of(list(map(len, MIXED))), 70) == MIXED[:70]
    assert decoded(b"anything", 0) == []


def test_chunks_beyond_two_gib_together_are_refused() -> None:
    chunk = pa.array([b"x" * (300 << 20)], pa.binary())
    with pytest.raises(LimitExceeded, match="2 GiB"):
        as_binary_array(pa.chunked_array([chunk] * 8))


def _foreign(records: list[bytes], rest: bytes = b"") -> pa.Buffer:
    return pa.py_buffer(b"".join(len(record).to_bytes(4, "little") + record for record in records) + rest)


def _same(raw: pa.Buffer, count: int) -> None:
    """Check that the fast path finds the same records, or the same error, as one walk in Python."""
    try:
        expected = block._by_walk(raw, count)
    except Corrupt as error:
        with pytest.raises(Corrupt, match=re.escape(str(error))):
            index_block(raw, count)
        return
    found = index_block(raw, count)
    assert found.starts.tolist() == expected.starts.tolist()
    assert found.lengths.tolist() == expected.lengths.tolist()


def test_records_of_other_clients_are_found_by_many_walks() -> None:
    records = [b"r" * (n * 7 % 53 + 1) for n in range(20_000)]
    raw = _foreign(records)
    assert block._by_many_walks(raw, len(records)) is not None
    _same(raw, len(records))
    _same(_foreign(records, b"bytes after the last record are ignored"), len(records))


def test_data_that_looks_like_headers_never_changes_where_records_are() -> None:
    inner = b"".join(len(part).to_bytes(4, "little") + part for part in [b"x" * 20, b"y" * 31, b"z" * 9])
    records = [inner * (n % 3 + 1) for n in range(20_000)]
    raw = _foreign(records)
    assert block._by_many_walks(raw, len(records)) is not None
    _same(raw, len(records))


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(
        st.sampled_from([b"", b"a", b"text" * 9, bytes(40), b"\x08\0\0\0abcdefgh" * 4]), min_size=1
    ),
    count=st.integers(200, 400),
    longer=st.integers(0, 5),
    damage=st.lists(st.tuples(st.integers(0, 2**16), st.binary(min_size=1, max_size=5)), max_size=3),
    cut=st.integers(0, 9),
)
def test_many_walks_find_what_one_walk_finds_whatever_the_bytes(
    kinds: list[bytes], count: int, longer: int, damage: list[tuple[int, bytes]], cut: int
) -> None:
    raw = bytearray(_foreign([kinds[n % len(kinds)] + b"p" * (n * 5 % 11) for n in range(count)]))
    for place, value in damage:
        place %= len(raw)
        raw[place : place + len(value)] = value
    data = pa.py_buffer(bytes(raw[: len(raw) - cut]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block, "MANY_WALKS_MIN", 100)
        _same(data, count + longer)
