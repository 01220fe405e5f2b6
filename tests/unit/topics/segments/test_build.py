"""The conversion of log frames to segment frames."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.topics.segments.segment_doubles import Written, log_frame, log_of, segment_frame, some_records

from penstock.errors import LimitExceeded
from penstock.topics.segments.build import BuiltRows, build, rows_that_fit
from penstock.topics.segments.columns import DAMAGED, DELETED, Columns
from penstock.topics.segments.format import HOLE, LOST, data_end, overhead_of, read_index, verify


def frames_of(built: BuiltRows) -> bytes:
    return b"".join(built.data)


def test_every_record_becomes_its_segment_frame_byte_for_byte() -> None:
    records = some_records(1500)
    rows, log = log_of(records, first_seq=41)
    built = build(rows, lambda _file: memoryview(log))
    assert frames_of(built) == b"".join(segment_frame(41 + i, record) for i, record in enumerate(records))
    assert built.data_bytes == len(frames_of(built)) == data_end(read_index(built.idx, 41))
    assert (built.first_seq, built.count, built.lost) == (41, 1500, [])


@pytest.mark.parametrize("gap", [0, 50, 5000])
def test_foreign_frames_between_the_records_are_left_out(gap: int) -> None:
    records = some_records(30)
    rows, log = log_of(records, gap=gap)
    assert frames_of(build(rows, lambda _file: memoryview(log))) == b"".join(
        segment_frame(1 + i, record) for i, record in enumerate(records)
    )


def test_accounted_bytes_are_the_same_in_log_and_segment() -> None:
    rows, log = log_of(some_records(9))
    found = build(rows, lambda _file: memoryview(log)).rows
    assert (found["length"] - overhead_of(found)).tolist() == rows.accounted(0, 9).tolist()
    assert found["ts"].tolist() == rows.ts.tolist()
    assert found["flags"].tolist() == rows.flags.tolist()


def test_records_of_several_log_files_come_together() -> None:
    records = some_records(7)
    rows, logs = Columns(1), {}
    for file, (start, stop) in enumerate([(0, 2), (2, 3), (3, 7)]):
        part, log = log_of(records[start:stop], first_seq=start + 1, gap=file)
        logs[file] = log
        for place in range(part.count):
            rows.append_row(file, *part.row(place))
    built = build(rows, lambda file: memoryview(logs[file]))
    assert frames_of(built) == b"".join(segment_frame(1 + i, record) for i, record in enumerate(records))


def test_deleted_records_and_holes_become_holes_that_keep_their_time() -> None:
    rows, log = log_of(some_records(4))
    rows.append_row(0, 0, 0, 1_700_000_000_099, HOLE, 0)
    rows.mark(1, DELETED)
    rows.mark(2, DELETED | DAMAGED)
    built = build(rows, lambda _file: memoryview(log))
    assert built.rows["flags"].tolist()[1:3] == [HOLE, HOLE]
    assert built.rows["flags"][4] == HOLE
    assert built.rows["ts"].tolist() == rows.ts.tolist()
    assert built.lost == []
    assert frames_of(built) == segment_frame(1, some_records(4)[0]) + segment_frame(4, some_records(4)[3])
    assert len(read_index(built.idx, 1)) == 5


def test_a_record_known_to_be_damaged_is_lost_and_not_a_hole() -> None:
    rows, log = log_of(some_records(3))
    rows.mark(1, DAMAGED)
    built = build(rows, lambda _file: memoryview(log))
    assert built.lost == [2]
    assert built.rows["flags"][1] == LOST


def test_any_flipped_bit_in_the_log_loses_that_record_and_no_other() -> None:
    records = some_records(3)
    rows, log = log_of(records, gap=3)
    start, size = int(rows.offset[1]), int(rows.length[1])
    good = segment_frame(1, records[0]) + segment_frame(3, records[2])
    for bit in range(start * 8, (start + size) * 8):
        damaged = bytearray(log)
        damaged[bit // 8] ^= 1 << bit % 8
        built = build(rows, lambda _file, damaged=damaged: memoryview(damaged))
        assert built.lost == [2]
        assert frames_of(built) == good
        assert built.rows["flags"][1] == LOST


def test_rows_that_point_to_another_record_are_lost_even_unverified() -> None:
    rows, log = log_of(some_records(2))
    wrong = Columns(5)
    for place in range(2):
        wrong.append_row(0, *rows.row(place))
    assert build(wrong, lambda _file: memoryview(log), verify=False).lost == [5, 6]


def test_a_frame_of_another_kind_is_lost() -> None:
    frame = log_frame(1, Written(b'{"d":1}'), kind=6)
    rows = Columns(1)
    rows.append_row(0, 0, len(frame), 1_700_000_000_000, 0, 50)
    assert build(rows, lambda _file: memoryview(frame)).lost == [1]


def test_rows_that_reach_past_the_log_are_lost() -> None:
    rows, log = log_of(some_records(3))
    built = build(rows, lambda _file: memoryview(log[:-1]))
    assert built.lost == [3]
    assert build(rows, lambda _file: memoryview(b"")).lost == [1, 2, 3]


def test_offsets_continue_where_the_segment_ends() -> None:
    rows, log = log_of(some_records(2))
    built = build(rows, lambda _file: memoryview(log), data_offset=1000)
    assert int(built.rows["offset"][0]) == 1000


def test_a_segment_never_grows_beyond_the_offsets_of_its_index() -> None:
    rows, log = log_of(some_records(2))
    with pytest.raises(LimitExceeded, match="start another"):
        build(rows, lambda _file: memoryview(log), data_offset=2**32 - 10)


def test_no_rows_make_nothing() -> None:
    built = build(Columns(5), lambda _file: memoryview(b""))
    assert (built.data, built.idx, built.data_bytes, built.count) == ([], b"", 0, 0)


def test_the_rows_that_fit_are_limited_by_events_and_bytes() -> None:
    lengths = np.array([109, 109, 209, 0, 109], np.uint32)
    assert rows_that_fit(lengths, events_left=10, bytes_left=100) == 1
    assert rows_that_fit(lengths, events_left=10, bytes_left=99) == 0
    assert rows_that_fit(lengths, events_left=10, bytes_left=400) == 4
    assert rows_that_fit(lengths, events_left=2, bytes_left=400) == 2
    assert rows_that_fit(lengths, events_left=0, bytes_left=400) == 0
    assert rows_that_fit(lengths, events_left=10, bytes_left=10**9) == 5


written = st.builds(
    Written,
    payload=st.binary(min_size=6, max_size=60),
    tag=st.binary(max_size=4),
    node=st.binary(max_size=4),
    ts=st.integers(0, 2**64 - 1),
)


@given(
    st.lists(
        st.tuples(written, st.sampled_from(["live", "live", "deleted", "hole", "damaged"])), max_size=40
    ),
    st.integers(0, 2**48),
    st.integers(0, 400),
    st.integers(0, 99),
)
def test_exactly_the_live_records_read_back(
    plan: list[tuple[Written, str]], first_seq: int, gap: int, seed: int
) -> None:
    rows, log = log_of([record for record, _ in plan], first_seq, gap)
    damaged = bytearray(log)
    for place, (_, fate) in enumerate(plan):
        if fate == "deleted":
            rows.mark(place, DELETED)
        elif fate == "hole":
            rows.mark(place, HOLE)
        elif fate == "damaged":
            start, size = int(rows.offset[place]), int(rows.length[place])
            damaged[start + random.Random(seed).randrange(size)] ^= 1 << seed % 8
    built = build(rows, lambda _file: memoryview(damaged))
    data, index = frames_of(built), read_index(built.idx, first_seq)
    for place, (record, fate) in enumerate(plan):
        flags = int(index["flags"][place])
        assert bool(flags & HOLE) == (fate in ("deleted", "hole"))
        assert bool(flags & LOST) == (fate == "damaged")
        if fate == "live":
            found = verify(data, index[place], first_seq + place)
            assert Written(bytes(found.payload), bytes(found.tag), bytes(found.node), found.ts) == record
