"""Predicates in the forms that clients send."""

from __future__ import annotations

import pytest

from penstock.topics.errors import InvalidRequest
from penstock.topics.model import Predicate, canonical, matches, parse_match


@pytest.mark.parametrize(
    ("spelled", "shown"),
    [
        ("a", ["tag", "Eq", "a"]),
        ("a*", ["tag", "Glob", "a*"]),
        ("*", ["tag", "Glob", "*"]),
        ("a*b", ["tag", "Eq", "a*b"]),
        (["tag", "Eq", "a*"], ["tag", "Eq", "a*"]),
        (["tag", "Glob", "a**"], ["tag", "Glob", "a**"]),
        (["tag", "Eq", ""], ["tag", "Eq", ""]),
    ],
)
def test_every_form_has_one_canonical_form(spelled: object, shown: list[str]) -> None:
    assert list(canonical(parse_match(spelled))) == shown
    assert parse_match(shown) == parse_match(spelled)


@pytest.mark.parametrize(
    "spelled",
    [
        None,
        1,
        True,
        {},
        [],
        ["tag", "Eq"],
        ["tag", "Eq", "a", "b"],
        ["node", "Eq", "a"],
        ["tag", "Ne", "a"],
        ["tag", "Eq", 1],
        ["tag", "Eq", None],
        ["tag", "Glob", "a"],
        ["tag", "Glob", ""],
        [["tag"], "Eq", "a"],
        ["tag", ["Eq"], "a"],
        ["Tag", "Eq", "a"],
        ["tag", "eq", "a"],
    ],
)
def test_anything_else_is_refused(spelled: object) -> None:
    with pytest.raises(InvalidRequest):
        parse_match(spelled)


def test_a_prefix_is_literal_and_an_untagged_record_never_matches() -> None:
    every = Predicate(value="", is_prefix=True)
    assert matches(every, "")
    assert matches(every, "x")
    assert not matches(every, None)
    assert not matches(Predicate(value="a.", is_prefix=True), "ab")
    assert matches(Predicate(value="a"), "a")
    assert not matches(Predicate(value="a"), "ab")
