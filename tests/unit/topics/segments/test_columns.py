"""Rows of consecutive records."""

from __future__ import annotations

import sys

import numpy as np

from penstock.topics.segments.columns import DELETED, Columns, pack_row
from penstock.topics.segments.format import HAS_META, HAS_TAG, HOLE, IDX_DTYPE, IDX_STRIDE


def rows_of(count: int) -> bytes:
    return b"".join(pack_row(100 * n, 60 + n, 1000 + n, HAS_TAG if n % 2 else 0, 50) for n in range(count))


def test_one_row_and_many_rows_give_the_same_result() -> None:
    one, many = Columns(5), Columns(5)
    many.append_rows(3, 7, rows_of(40))
    for n in range(40):
        one.append_row(3, 7 + 100 * n, 60 + n, 1000 + n, HAS_TAG if n % 2 else 0, 50)
    for run in (one, many):
        assert (run.first_seq, run.end_seq, len(run)) == (5, 45, 40)
        assert run.offset.tolist() == [7 + 100 * n for n in range(40)]
        assert run.length.tolist() == [60 + n for n in range(40)]
        assert run.ts.tolist() == [1000 + n for n in range(40)]
        assert run.flags.tolist() == [n % 2 for n in range(40)]
        assert run.overhead.tolist() == [50] * 40
        assert run.accounted(3, 6).tolist() == [13, 14, 15]
        assert run.row(4) == (407, 64, 1004, 0, 50)
    assert one.index_rows().tobytes() == many.index_rows().tobytes()


def test_an_array_taken_before_the_run_grew_stays_unchanged() -> None:
    run = Columns(1)
    run.append_rows(1, 0, rows_of(16))
    before = run.length
    run.append_rows(1, 0, rows_of(500))
    run.mark(0, DELETED)
    assert before.tolist() == [60 + n for n in range(16)]


def test_the_file_of_a_row_may_have_any_number() -> None:
    run = Columns(1)
    run.append_rows(2**40, 0, rows_of(3))
    run.append_rows(2**40, 0, rows_of(1))
    run.append_rows(2**41, 0, rows_of(2))
    assert run.file_of(0) == run.file_of(3) == (2**40, 4)
    assert run.file_of(4) == (2**41, 6)
    assert run.files() == [2**40, 2**41]
    assert run.files(from_place=4) == [2**41]
    assert run.file.tolist() == [2**40] * 4 + [2**41] * 2


def test_a_part_keeps_rows_flags_and_files() -> None:
    run = Columns(10, source="s")
    run.append_rows(1, 0, rows_of(4))
    run.append_rows(2, 0, rows_of(4))
    run.mark(5, DELETED)
    part = run.part(13, 16)
    assert (part.first_seq, part.count, part.source) == (13, 4, "s")
    assert part.offset.tolist() == [300, 0, 100, 200]
    assert part.file.tolist() == [1, 2, 2, 2]
    assert part.is_live(0, 4).tolist() == [True, True, False, True]
    assert part.live == 3
    run.mark(3, DELETED)
    assert part.is_live(0, 1).all()


def test_the_rows_of_a_segment_are_never_written_to() -> None:
    stored = bytearray(rows_of(5))
    before = bytes(stored)
    run = Columns.of_segment(1, np.frombuffer(stored, IDX_DTYPE))
    assert (run.live, run.live_bytes) == (5, 10 + 11 + 12 + 13 + 14)
    assert not run.changed
    run.mark(np.array([1, 3]), DELETED)
    run.mark(0, DELETED)
    assert bytes(stored) == before
    assert run.changed
    assert run.is_live(0, 5).tolist() == [False, False, True, False, True]
    assert run.deleted_seqs().tolist() == [1, 2, 4]
    assert run.index_rows().tobytes() == before
    copied = Columns(1)
    copied.append_part(run, 1, 4)
    assert copied.is_live(0, 3).tolist() == [False, True, False]


def test_a_hole_is_never_live_and_was_never_deleted() -> None:
    run = Columns.of_segment(1, pack_row(0, 0, 5, HOLE, 0) + pack_row(0, 60, 5, HAS_META, 50))
    assert run.is_live(0, 2).tolist() == [False, True]
    assert run.live == 1
    assert run.deleted_seqs().tolist() == []
    run.recount(below_seq=3)
    assert (run.live, run.live_bytes) == (0, 0)


def test_an_empty_run_has_empty_columns() -> None:
    for run in (Columns(1), Columns.of_segment(1, b"")):
        assert run.offset.tolist() == run.flags.tolist() == run.file.tolist() == []
        assert run.accounted(0, 0).tolist() == []
        run.recount()
        assert run.live == 0


def test_a_row_costs_bytes_and_not_an_object() -> None:
    run = Columns(1)
    run.append_rows(1, 0, rows_of(4096))
    assert sys.getsizeof(run._rows) <= 2 * 4096 * IDX_STRIDE
    assert len(run._spans) == 1
