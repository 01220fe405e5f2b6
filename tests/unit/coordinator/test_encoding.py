"""Sortable keys and length-prefixed values."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.coordinator.keys import Subsystem, key_prefix, read_terminated, terminated
from penstock.coordinator.values import array, read_array, read_utf8, utf8
from penstock.errors import Corrupt, InvalidInput


def test_terminated_bytes_are_as_the_format_says() -> None:
    assert terminated(b"") == b"\x00"
    assert terminated(b"a\x00b\x01c\xffd") == b"a\x01\x01b\x01\x02c\x01\x03d\x00"


@given(st.binary(), st.binary())
def test_terminated_bytes_come_back_from_inside_a_key(data: bytes, rest: bytes) -> None:
    key = b"pp" + terminated(data) + rest
    assert read_terminated(key, 2) == (data, len(key) - len(rest))


@given(st.text(), st.text())
def test_texts_sort_in_keys_as_they_do_by_themselves(one: str, other: str) -> None:
    left, right = one.encode(), other.encode()
    assert (terminated(left) < terminated(right)) == (left < right)


@given(st.binary(), st.binary())
def test_different_bytes_make_different_keys_and_none_is_a_prefix_of_another(
    one: bytes, other: bytes
) -> None:
    if one != other:
        assert not terminated(one).startswith(terminated(other))


@pytest.mark.parametrize("key", [b"", b"abc", b"a\x01\x00", b"a\x01\x04\x00", b"a\xff\x00"])
def test_a_key_part_that_was_not_written_by_us_is_corrupt(key: bytes) -> None:
    with pytest.raises(Corrupt):
        read_terminated(key)


def test_a_prefix_names_the_subsystem_and_its_version() -> None:
    assert key_prefix(Subsystem.TIMESERIES, 2) == b"\x01\x02"
    assert [subsystem.value for subsystem in Subsystem] == [1, 2, 3, 4]
    with pytest.raises(InvalidInput):
        key_prefix(Subsystem.KV, 256)


def test_values_are_little_endian() -> None:
    assert utf8("ab") == b"\x02\x00ab"
    assert array([b"x", b"yy"]) == b"\x02\x00xyy"


@given(st.lists(st.text(max_size=20), max_size=20))
def test_an_array_of_texts_comes_back(texts: list[str]) -> None:
    data = b"head" + array(utf8(text) for text in texts) + b"tail"
    assert read_array(data, 4, read_utf8) == (texts, len(data) - 4)


@given(st.binary(max_size=40))
def test_any_bytes_decode_or_are_corrupt(data: bytes) -> None:
    for read in (read_utf8, read_terminated):
        try:
            read(data, 0)
        except Corrupt:
            pass
    try:
        read_array(data, 0, read_utf8)
    except Corrupt:
        pass


def test_what_does_not_fit_its_length_is_refused() -> None:
    with pytest.raises(InvalidInput, match="65536 bytes"):
        utf8("a" * 65_536)
    with pytest.raises(InvalidInput, match="65536 items"):
        array([b""] * 65_536)
    with pytest.raises(InvalidInput, match="not a Unicode text"):
        utf8("\ud800")
    assert len(utf8("a" * 65_535)) == 65_537


def test_a_length_that_points_past_its_value_is_corrupt() -> None:
    with pytest.raises(Corrupt, match="a text of 9 bytes at offset 0 ends after its value"):
        read_utf8(struct.pack("<H", 9) + b"short")
    with pytest.raises(Corrupt, match="not UTF-8"):
        read_utf8(b"\x01\x00\xff")
