from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidInput
from penstock.ids import SYSTEM_RNG, is_ulid, mint_ulid, parse_ulid, ulid_ms

MS = st.integers(0, 2**48 - 1)


@given(ms=MS, seed=st.integers())
def test_a_ulid_carries_its_millisecond(ms: int, seed: int) -> None:
    text = mint_ulid(ms, random.Random(seed))
    assert ulid_ms(text) == ms
    assert ulid_ms(text.lower()) == ms
    assert len(text) == 26
    assert text == text.upper()


@given(first=MS, second=MS, seed=st.integers())
def test_ulids_sort_by_time(first: int, second: int, seed: int) -> None:
    rng = random.Random(seed)
    if first < second:
        assert mint_ulid(first, rng) < mint_ulid(second, rng)


def test_the_same_seed_mints_the_same_ulid() -> None:
    assert mint_ulid(1, random.Random(7)) == mint_ulid(1, random.Random(7))


def test_the_system_source_does_not_repeat() -> None:
    assert len({mint_ulid(0, SYSTEM_RNG) for _ in range(1000)}) == 1000


def test_a_known_ulid_reads_back() -> None:
    assert ulid_ms("01ARZ3NDEKTSV4RRFFQ69G5FAV") == 1469922850259
    assert parse_ulid("7ZZZZZZZZZZZZZZZZZZZZZZZZZ") == 2**128 - 1
    assert parse_ulid("00000000000000000000000000") == 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "01ARZ3NDEKTSV4RRFFQ69G5FA",
        "01ARZ3NDEKTSV4RRFFQ69G5FAVV",
        "81ARZ3NDEKTSV4RRFFQ69G5FAV",
        "Z1ARZ3NDEKTSV4RRFFQ69G5FAV",
        "01ARZ3NDEKTSV4RRFFQ69G5FAI",
        "01ARZ3NDEKTSV4RRFFQ69G5FAL",
        "01ARZ3NDEKTSV4RRFFQ69G5FAO",
        "01ARZ3NDEKTSV4RRFFQ69G5FAU",
        "01ARZ3NDEKTSV4RRFFQ69G5FA-",
        "01ARZ3NDEKTSV4RRFFQ69G5FA\u0661",
    ],
)
def test_text_that_is_not_a_ulid_is_refused(text: str) -> None:
    assert not is_ulid(text)
    with pytest.raises(InvalidInput, match="is not a ULID"):
        ulid_ms(text)


@given(st.text(max_size=30))
def test_any_text_parses_or_is_invalid_input(text: str) -> None:
    assert is_ulid(text) in (True, False)


@pytest.mark.parametrize("ms", [-1, 2**48])
def test_a_time_outside_48_bits_is_refused(ms: int) -> None:
    with pytest.raises(InvalidInput, match="does not fit"):
        mint_ulid(ms, random.Random(0))
