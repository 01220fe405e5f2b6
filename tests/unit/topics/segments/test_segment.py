"""The format of a segment's data and index."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.topics.segments.segment_doubles import Written, built_of, segment_frame, some_records

from penstock.topics.errors import Damaged
from penstock.topics.segments.format import (
    HOLE,
    IDX_DTYPE,
    LOST,
    Part,
    checksum,
    damaged_rows,
    data_end,
    overhead_of,
    read_frame,
    read_index,
    segment_id,
    segment_name,
    verify,
)


def flipped(raw: bytes, bit: int) -> bytes:
    changed = bytearray(raw)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_a_frame_round_trips_its_record() -> None:
    raw = segment_frame(9, Written(b'{"d":1}', tag=b"t", node=b"node", ts=5))
    record = read_frame(raw, 9)
    assert (record.seq, record.ts, record.flags) == (9, 5, 3)
    assert (bytes(record.node), bytes(record.tag), bytes(record.payload)) == (b"node", b"t", b'{"d":1}')


def test_any_flipped_bit_in_a_frame_is_damage() -> None:
    raw = segment_frame(9, Written(b'{"d":"x"}', tag=b"tag", node=b"n"))
    for bit in range(len(raw) * 8):
        with pytest.raises(Damaged):
            read_frame(flipped(raw, bit), 9)


def test_a_frame_cut_anywhere_is_damage() -> None:
    raw = segment_frame(9, Written(b'{"d":1}'))
    for size in range(len(raw)):
        with pytest.raises(Damaged):
            read_frame(raw[:size], 9)
    with pytest.raises(Damaged):
        read_frame(raw + b"\0", 9)


def test_a_sound_frame_in_the_place_of_another_is_damage() -> None:
    with pytest.raises(Damaged, match="record 9 is in its place"):
        read_frame(segment_frame(9, Written(b'{"d":1}')), 10)


@given(st.binary(max_size=80), st.integers(0, 2**64 - 1))
def test_reading_foreign_bytes_as_a_frame_is_damage(raw: bytes, seq: int) -> None:
    with pytest.raises(Damaged):
        read_frame(raw, seq)


def test_the_damage_names_the_record() -> None:
    with pytest.raises(Damaged) as caught:
        read_frame(b"", 12)
    assert caught.value.detail == {"first_seq": 12, "last_seq": 12}
    assert "12" in str(caught.value)


def test_an_index_entry_is_twenty_bytes_with_the_overhead_in_its_last_three() -> None:
    assert IDX_DTYPE.itemsize == 20
    built = built_of([Written(b'{"d":12}', ts=77)])
    frame_bytes = 29 + 8 + 8
    assert built.idx == (
        bytes(4) + frame_bytes.to_bytes(4, "little") + (77).to_bytes(8, "little") + bytes(1) + b"\x2b\0\0"
    )
    rows = read_index(built.idx, 1)
    assert overhead_of(rows).tolist() == [frame_bytes - len(b"12")]
    assert data_end(rows) == frame_bytes


def test_any_flipped_bit_in_an_index_with_a_known_checksum_is_damage() -> None:
    raw = built_of(some_records(4)).idx
    assert len(read_index(raw, 1, checksum(raw))) == 4
    for bit in range(len(raw) * 8):
        with pytest.raises(Damaged):
            read_index(flipped(raw, bit), 1, checksum(raw))


def test_a_flipped_bit_in_an_index_never_gives_a_wrong_record() -> None:
    built = built_of(some_records(4))
    data = b"".join(built.data)
    for bit in range(len(built.idx) * 8):
        try:
            rows = read_index(flipped(built.idx, bit), 1)
        except Damaged:
            continue
        changed = bit // 160
        if bit % 160 // 8 in (8, 9, 10, 11, 12, 13, 14, 15):
            with pytest.raises(Damaged):
                verify(data, rows[changed], 1 + changed)
        for place in range(4):
            if place != changed:
                verify(data, rows[place], 1 + place)


def test_an_index_that_is_not_a_whole_number_of_entries_is_damage() -> None:
    with pytest.raises(Damaged, match="whole number"):
        read_index(bytes(21), 1)


def test_an_index_whose_entries_leave_a_gap_or_overlap_is_damage() -> None:
    rows = built_of(some_records(3)).rows.copy()
    rows["offset"][2] += 1
    with pytest.raises(Damaged, match="record 43 is invalid"):
        read_index(rows.tobytes(), 41)


def test_an_entry_without_a_frame_must_not_claim_bytes() -> None:
    rows = np.zeros(1, IDX_DTYPE)
    for flags in (HOLE, LOST):
        rows["flags"] = flags
        assert len(read_index(rows.tobytes(), 1)) == 1
    rows["length"] = 60
    with pytest.raises(Damaged):
        read_index(rows.tobytes(), 1)


@given(st.binary(max_size=100))
def test_reading_foreign_bytes_as_an_index_is_fine_or_damage(raw: bytes) -> None:
    try:
        rows = read_index(raw, 1)
    except Damaged:
        return
    assert len(rows) * 20 == len(raw)


def test_a_lost_record_is_an_error_and_not_a_gap() -> None:
    rows = np.zeros(1, IDX_DTYPE)
    rows["flags"] = LOST
    with pytest.raises(Damaged, match="lost"):
        verify(b"", rows[0], 5)


def test_a_row_may_be_read_from_a_part_of_the_data() -> None:
    records = some_records(5)
    built = built_of(records)
    data, rows = b"".join(built.data), built.rows
    base = int(rows["offset"][2])
    assert bytes(verify(data[base:], rows[3], 4, base).payload) == records[3].payload
    with pytest.raises(Damaged, match="past the end"):
        verify(data[base:], rows[1], 2, base)
    with pytest.raises(Damaged, match="past the end"):
        verify(data[:-1], rows[4], 5)


def test_a_scrub_finds_exactly_the_damaged_records() -> None:
    built = built_of(some_records(6), first_seq=11)
    data = bytearray(b"".join(built.data))
    assert damaged_rows(data, built.rows, 11) == []
    for place in (1, 4):
        data[int(built.rows["offset"][place]) + 30] ^= 0x20
    assert [seq for seq, _ in damaged_rows(data, built.rows, 11)] == [12, 15]


@pytest.mark.parametrize("seq", [1, 10_001, 10**16 - 1, 10**16, 2**64 - 1])
def test_a_segment_is_named_by_its_first_record(seq: int) -> None:
    assert segment_id(segment_name(seq)) == seq
    assert segment_name(1) == "seg-0000000000000001"


@pytest.mark.parametrize(
    "name", ["seg-1", "seg-00000000000000001", "seg-", "seg-000000000000000x", "xseg-0000000000000001"]
)
def test_other_names_are_not_segments(name: str) -> None:
    assert segment_id(name) is None


def test_the_parts_are_the_extensions_of_the_files() -> None:
    assert [part.value for part in Part] == ["data", "idx", "tags", "del"]
