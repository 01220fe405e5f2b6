"""Columns of bytes, compared with the output of Google's own encoder."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from google.protobuf.internal.encoder import _VarintBytes
from hypothesis import given
from hypothesis import strategies as st

from penstock.protowire import varint
from penstock.spark.sinks.wire import as_column, field, pieces, present, varints

texts = st.lists(st.one_of(st.none(), st.text(max_size=300)), min_size=1, max_size=20)


@given(st.lists(st.integers(0, 2**64 - 1), max_size=30))
def test_varints_match_the_wire_format(numbers: list[int]) -> None:
    expected = [_VarintBytes(number) for number in numbers]
    assert varints(np.array(numbers, np.uint64)).to_pylist() == expected
    assert [varint(number) for number in numbers] == expected


@given(texts, st.integers(0, 5), st.integers(0, 5))
def test_a_field_has_its_length_and_is_absent_where_a_part_is_null(
    given_texts: list[str | None], before: int, behind: int
) -> None:
    padded = pa.array(["x"] * before + given_texts + ["y"] * behind, pa.string())
    column = as_column(padded[before : before + len(given_texts)])  # a slice, as Arrow hands them out
    made = present(field(3, b"ab", column)).to_pylist()
    for text, found in zip(given_texts, made, strict=True):
        if text is None:
            assert found == b""
        else:
            payload = b"ab" + text.encode()
            assert found == _VarintBytes(3 << 3 | 2) + _VarintBytes(len(payload)) + payload


@given(st.lists(st.binary(max_size=20), max_size=30), st.integers(1, 50))
def test_pieces_hold_every_row_once_and_stay_below_the_limit(rows: list[bytes], bytes_max: int) -> None:
    column = pa.array(rows, pa.large_binary())
    found = list(pieces(column, bytes_max))
    assert [row for start, stop in found for row in rows[start:stop]] == rows
    for start, stop in found:
        assert stop - start == 1 or sum(map(len, rows[start:stop])) <= bytes_max
