"""Object keys."""

from __future__ import annotations

import pytest

from penstock.errors import InvalidInput, LimitExceeded, Rejected
from penstock.limits import KEY_BYTES_MAX
from penstock.objects import check_prefix, join_key, normalise_key

FORBIDDEN = '\\{^}%`]">[~<#|*?'


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("a/b", "a/b"),
        ("/a//b/", "a/b"),
        ("a", "a"),
        ("///a", "a"),
        ("...", "..."),
        ("a..b/.c", "a..b/.c"),
        ("ä/日本", "ä/日本"),
    ],
)
def test_a_key_is_normalised(text: str, key: str) -> None:
    assert normalise_key(text) == key
    assert normalise_key(key) == key


@pytest.mark.parametrize("character", FORBIDDEN)
def test_a_character_that_other_clients_cannot_read_back_is_named(character: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        normalise_key(f"a/b{character}c")
    assert repr(character) in str(caught.value)


@pytest.mark.parametrize("character", ["\0", "\n", "\t", "\x1f", "\x7f", "\x85", "\ud800"])
def test_control_characters_and_surrogates_are_rejected(character: str) -> None:
    with pytest.raises(InvalidInput):
        normalise_key(f"a{character}b")


@pytest.mark.parametrize("text", [".", "..", "a/../b", "./a", "a/."])
def test_keys_are_not_relative_paths(text: str) -> None:
    with pytest.raises(InvalidInput, match="segment"):
        normalise_key(text)


@pytest.mark.parametrize("text", ["", "/", "//"])
def test_an_empty_key_is_rejected_but_an_empty_prefix_is_the_whole_store(text: str) -> None:
    with pytest.raises(InvalidInput, match="empty"):
        normalise_key(text)
    assert check_prefix(text) == ""


def test_the_longest_key_counts_bytes() -> None:
    assert normalise_key("k" * KEY_BYTES_MAX)
    with pytest.raises(LimitExceeded, match=str(KEY_BYTES_MAX)):
        normalise_key("k" * (KEY_BYTES_MAX + 1))
    with pytest.raises(LimitExceeded):
        normalise_key("ä" * (KEY_BYTES_MAX // 2 + 1))


@pytest.mark.parametrize("value", [None, b"a", 7, ["a"]])
def test_a_key_is_text(value: object) -> None:
    with pytest.raises(Rejected, match=type(value).__name__):
        normalise_key(value)


def test_parts_are_joined() -> None:
    assert join_key("ingest/", "/a", "b.batch") == "ingest/a/b.batch"
    assert join_key("", "a") == "a"
