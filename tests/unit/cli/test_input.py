from __future__ import annotations

import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.input import FRAMINGS, Framing, LengthPrefixed, Lines, Whole
from penstock.errors import InvalidInput

LINE = st.binary(max_size=20).map(lambda data: data.replace(b"\n", b""))


def feed_in_pieces(framing: Framing, data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    records: list[bytes] = []
    for start, end in itertools.pairwise(edges):
        if end > start:
            records += framing.feed(data[start:end])
    return records + framing.finish()


@given(st.lists(LINE), st.lists(st.integers(0, 1000)))
def test_lines_are_the_same_for_any_split_of_the_stream(lines: list[bytes], cuts: list[int]) -> None:
    data = b"".join(line + b"\n" for line in lines)
    assert feed_in_pieces(Lines(), data, cuts) == lines


def test_a_last_line_without_a_newline_is_a_record() -> None:
    assert feed_in_pieces(Lines(), b"a\nb", []) == [b"a", b"b"]


def test_an_empty_line_is_an_empty_record() -> None:
    assert feed_in_pieces(Lines(), b"a\n\nb\n", []) == [b"a", b"", b"b"]


@given(st.lists(st.binary(max_size=20)), st.lists(st.integers(0, 1000)))
def test_length_prefixed_records_are_the_same_for_any_split_of_the_stream(
    records: list[bytes], cuts: list[int]
) -> None:
    data = b"".join(struct.pack("<I", len(record)) + record for record in records)
    assert feed_in_pieces(LengthPrefixed(), data, cuts) == records


def test_truncated_length_prefixed_input_is_refused() -> None:
    framing = LengthPrefixed()
    assert framing.feed(b"\x05\0\0\0abc") == []
    with pytest.raises(InvalidInput, match="ends inside a record"):
        framing.finish()


def test_a_length_beyond_any_record_is_refused_before_it_is_read() -> None:
    with pytest.raises(InvalidInput, match="--delimiter"):
        LengthPrefixed().feed(b"\xff\xff\xff\xff")


def test_without_a_delimiter_the_whole_input_is_one_record() -> None:
    assert feed_in_pieces(Whole(), b"a\nb\n", [1, 2]) == [b"a\nb\n"]


@pytest.mark.parametrize("name", FRAMINGS)
def test_no_input_is_no_record(name: str) -> None:
    assert FRAMINGS[name]().finish() == []
