"""Rows of many series, and the blocks in which a flush stores them."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.errors import Corrupt
from penstock.timeseries.delta import Rows, decode_block, encode_block
from penstock.timeseries.model import STALE_BITS, STALE_MARKER


def rows(*triples: tuple[int, int, float]) -> Rows:
    return Rows(
        np.array([one[0] for one in triples], np.uint32),
        np.array([one[1] for one in triples], np.int64),
        np.array([one[2] for one in triples], np.float64),
    )


def triples(found: Rows) -> list[tuple[int, int, float]]:
    return list(zip(found.ids.tolist(), found.timestamps.tolist(), found.values.tolist(), strict=True))


def test_a_block_comes_back_as_it_was() -> None:
    original = rows((0, 5, 1.5), (0, 9, -0.0), (7, -3, float("inf")), (2**32 - 1, 2**62, 2.0))
    assert triples(decode_block(encode_block(original))) == triples(original)


def test_a_block_keeps_the_bits_of_a_stale_marker() -> None:
    original = Rows(np.zeros(1, np.uint32), np.zeros(1, np.int64), np.array([STALE_MARKER]))
    assert decode_block(encode_block(original)).values.view(np.uint64).tolist() == [STALE_BITS]


def test_a_block_without_samples_is_one() -> None:
    assert len(decode_block(encode_block(Rows.empty()))) == 0


@pytest.mark.parametrize("cut", range(0, 40, 3))
def test_a_block_that_was_cut_is_noticed(cut: int) -> None:
    block = encode_block(rows((1, 2, 3.0), (1, 3, 4.0)))
    with pytest.raises(Corrupt):
        decode_block(block[: min(cut, len(block) - 1)])


def test_a_block_of_another_version_or_an_absurd_size_is_refused() -> None:
    block = encode_block(rows((1, 2, 3.0)))
    with pytest.raises(Corrupt, match="version 2"):
        decode_block(b"\x02" + block[1:])
    with pytest.raises(Corrupt, match="claims"):
        decode_block(b"\x01\xff\xff\xff\xff" + block[5:])
    with pytest.raises(Corrupt, match="holds"):
        decode_block(b"\x01\x02\x00\x00\x00" + block[5:])


def test_in_order_the_row_written_last_counts() -> None:
    mixed = rows((2, 1, 1.0), (1, 5, 2.0), (2, 1, 3.0), (1, 4, 4.0), (2, 1, 5.0))
    assert triples(mixed.in_order()) == [(1, 4, 4.0), (1, 5, 2.0), (2, 1, 5.0)]


def test_rows_are_chosen_by_id_and_time() -> None:
    found = rows((1, 1, 1.0), (2, 2, 2.0), (9, 3, 3.0)).of(np.array([2, 9], np.uint32))
    assert triples(found) == [(2, 2, 2.0), (9, 3, 3.0)]
    assert triples(found.between(3, 3)) == [(9, 3, 3.0)]
    assert len(found.of(np.array([], np.uint32))) == 0


def test_rows_by_series_are_slices_of_them() -> None:
    ids, samples = rows((1, 1, 1.0), (1, 2, 2.0), (4, 1, 3.0)).by_series()
    assert ids == [1, 4]
    assert [one.values.tolist() for one in samples] == [[1.0, 2.0], [3.0]]
    assert Rows.empty().by_series() == ([], [])
