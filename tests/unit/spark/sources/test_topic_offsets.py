from __future__ import annotations

import json

import pytest

from penstock.errors import ConfigError, Corrupt, InvalidInput
from penstock.spark.sources.offsets import Bounds, admit
from penstock.spark.sources.topic_offsets import (
    TopicGap,
    TopicOffsets,
    TopicRange,
    cut,
    parse_position,
    ranges_between,
)

OFFSETS = TopicOffsets(["b", "a"])
ONE = TopicOffsets(["a"])
BOUNDS = {"a": Bounds(first=3, following=11), "b": Bounds(first=1, following=1)}


def test_an_offset_survives_a_round_trip_for_any_order_of_topics() -> None:
    one = OFFSETS.write({"b": 1, "a": 4}, {"b": 5, "a": 6})
    assert json.dumps(one) == json.dumps(OFFSETS.write({"a": 4, "b": 1}, {"a": 6, "b": 5}))
    assert OFFSETS.read(one) == ({"a": 4, "b": 1}, {"a": 6, "b": 5})
    assert ONE.read(ONE.write({"a": 4})) == ({"a": 4}, {})


@pytest.mark.parametrize(
    "stored",
    [
        None,
        7,
        [],
        {},
        {"0": 17},
        {"next": 3},
        {"next": {"a": -1}},
        {"next": {"a": True}},
        {"next": {"a": "1"}},
    ],
)
def test_an_offset_of_something_else_is_refused(stored: object) -> None:
    with pytest.raises(TopicGap, match="not an offset of topics"):
        ONE.read(stored)


def test_the_topics_of_a_query_cannot_change() -> None:
    with pytest.raises(TopicGap, match="has read a and the query reads a, b"):
        OFFSETS.read({"next": {"a": 4}})
    assert issubclass(TopicGap, Corrupt)


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("earliest", "earliest"),
        (" latest ", "latest"),
        ("17", 17),
        ('{"a": 17, "b": "latest"}', {"a": 17, "b": "latest"}),
    ],
)
def test_positions_are_read(text: str, position: object) -> None:
    assert parse_position(text, "startingOffsets") == position


@pytest.mark.parametrize(
    "text", ["", "first", "0", "-1", "1.5", "{", '{"a": 0}', '{"a": null}', '{"a": true}']
)
def test_other_values_than_positions_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="startingOffsets: expected earliest"):
        parse_position(text, "startingOffsets")


def test_positions_become_numbers() -> None:
    assert OFFSETS.resolve("earliest", BOUNDS, "o") == {"a": 3, "b": 1}
    assert OFFSETS.resolve("latest", BOUNDS, "o") == {"a": 11, "b": 1}
    assert OFFSETS.resolve({"a": 5, "b": "latest"}, BOUNDS, "o") == {"a": 5, "b": 1}
    assert OFFSETS.resolve(7, {"a": BOUNDS["a"]}, "o") == {"a": 7}
    with pytest.raises(ConfigError, match="a, b have separate numbers"):
        OFFSETS.resolve(7, BOUNDS, "o")
    with pytest.raises(ConfigError, match="name each of them once"):
        OFFSETS.resolve({"a": 5}, BOUNDS, "o")


def test_numbers_that_do_not_fit_the_topics_are_refused() -> None:
    held = {"a": BOUNDS["a"]}
    OFFSETS.check_requested({"a": 11, "b": 1}, BOUNDS, "o")
    with pytest.raises(InvalidInput, match="o: a holds 3 to 10; 12 is outside"):
        OFFSETS.check_requested({"a": 12}, held, "o")
    OFFSETS.check_reached({"a": 11}, held)
    with pytest.raises(TopicGap, match="has read a up to 11, but it has handed out numbers only up to 10"):
        OFFSETS.check_reached({"a": 12}, held)
    with pytest.raises(TopicGap, match="a would start at 5 and end at 4"):
        OFFSETS.check_order({"a": 5}, {"a": 4})
    OFFSETS.check_time("a", 4, 1, 1)
    with pytest.raises(TopicGap, match="record 4 of a, the last one read, has changed since"):
        OFFSETS.check_time("a", 4, 1, 2)


def test_a_limit_is_shared_by_the_topics() -> None:
    assert admit({"a": 1, "b": 1}, {"a": 101, "b": 11}, 40) == {"a": 31, "b": 11}
    assert admit({"a": 1, "b": 1}, {"a": 101, "b": 11}, 1000) == {"a": 101, "b": 11}


def test_records_that_have_left_a_topic_are_one_range_before_the_others() -> None:
    assert ranges_between({"a": 1, "b": 1}, {"a": 11, "b": 1}, BOUNDS) == [
        TopicRange(topic="a", first=1, last=2, gone=True),
        TopicRange(topic="a", first=3, last=10),
    ]
    assert ranges_between({"a": 1}, {"a": 2}, BOUNDS) == [TopicRange(topic="a", first=1, last=1, gone=True)]
    assert ranges_between({"a": 4}, {"a": 4}, BOUNDS) == []


def test_ranges_are_cut_into_pages_unless_they_are_gone() -> None:
    ranges = [
        TopicRange(topic="a", first=1, last=5000, gone=True),
        TopicRange(topic="a", first=5001, last=5025),
    ]
    assert [(piece.first, piece.last) for piece in cut(ranges, 10)] == [
        (1, 5000),
        (5001, 5010),
        (5011, 5020),
        (5021, 5025),
    ]
