from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError, InvalidInput
from penstock.spark.sources.offsets import (
    Bounds,
    QueueGap,
    admit_batches,
    admit_bytes,
    backlog,
    check_asked,
    check_held,
    check_identity,
    check_reached,
    lift,
    parse_position,
    read_after,
    read_offset,
    resolve,
    write_offset,
)

HELD = {0: Bounds(first=3, following=9)}
TWO = {0: Bounds(first=3, following=9), 1: Bounds(first=0, following=0)}


def test_shards_stand_in_numeric_order_whatever_order_they_came_in() -> None:
    offset = {10: 1, 2: 5, 0: 7}
    assert json.dumps(write_offset(offset)) == '{"0": 7, "2": 5, "10": 1}'
    assert json.dumps(write_offset(read_offset({"10": 1, "2": 5, "0": 7}, [0, 2, 10], "q"))) == json.dumps(
        write_offset(offset)
    )


@pytest.mark.parametrize("stored", [{"seq": 1}, {"0": "x"}, {"0": -1}, {"0": True}, {"0": 1, "1": 2}, {}])
def test_an_offset_of_something_else_is_refused(stored: dict[str, int]) -> None:
    with pytest.raises(QueueGap, match="belongs to another queue"):
        read_offset(stored, [0], "q")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("earliest", {0: 3}),
        ("latest", {0: 9}),
        ("5", {0: 5}),
        ('{"0": 4}', {0: 4}),
        ('{"0": "latest"}', {0: 9}),
    ],
)
def test_a_position_is_a_word_a_number_or_json(text: str, expected: dict[int, int]) -> None:
    assert resolve(parse_position(text, "startingOffsets"), HELD, "startingOffsets") == expected


@pytest.mark.parametrize(
    "text", ["", "-1", "soon", "{", '{"a": 1}', '{"0": -2}', '{"0": null}', "1.5", '{"0": 1.5}']
)
def test_any_other_position_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="startingOffsets: expected earliest, latest"):
        parse_position(text, "startingOffsets")


def test_one_number_cannot_stand_for_several_shards() -> None:
    with pytest.raises(ConfigError, match="give JSON"):
        resolve(5, TWO, "startingOffsets")
    assert resolve("latest", TWO, "startingOffsets") == {0: 9, 1: 0}
    with pytest.raises(ConfigError, match="name each of them"):
        resolve({0: 1}, TWO, "startingOffsets")


@pytest.mark.parametrize("place", [3, 4, 8, 9])
def test_a_place_that_is_held_can_be_read_on_from(place: int) -> None:
    check_held({0: place}, HELD, "q")
    check_reached({0: place}, HELD, "q")


def test_a_place_beyond_the_queue_means_that_the_queue_is_another_one() -> None:
    with pytest.raises(QueueGap, match="has read q up to 9, but it has handed out numbers only up to 8"):
        check_reached({0: 10}, HELD, "q")


def test_a_place_before_the_queue_is_a_gap_and_the_error_tells_how_to_go_on() -> None:
    with pytest.raises(QueueGap, match=r"q begins at 3, but 2 comes next.*onGap=record"):
        check_held({0: 2}, HELD, "q")
    with pytest.raises(QueueGap, match="shard 0 of q begins at 3"):
        check_held({0: 2, 1: 0}, TWO, "q")


ENTRIES = {(0, 4): "a", (0, 5): "b", (1, 0): "c"}


def location_of(shard: int, sequence: int) -> str | None:
    return ENTRIES.get((shard, sequence))


def test_the_last_entry_stands_behind_the_numbers_in_numeric_order() -> None:
    stored = write_offset({10: 1, 0: 6, 2: 0}, {10: "z", 0: "b"})
    assert json.dumps(stored) == '{"0": 6, "2": 0, "10": 1, "after": {"0": "b", "10": "z"}}'
    assert read_offset(stored, [0, 2, 10], "q") == {0: 6, 2: 0, 10: 1}
    assert read_after(stored, "q") == {0: "b", 10: "z"}
    assert json.dumps(write_offset({0: 0}, {})) == '{"0": 0}'


def test_an_offset_without_last_entries_stays_valid() -> None:
    assert read_after({"0": 6}, "q") == {}
    check_identity({0: 6}, {}, location_of, "q")


@pytest.mark.parametrize("after", [7, "b", None, ["b"], {"x": "b"}, {"0": 3}], ids=repr)
def test_last_entries_that_are_none_are_refused(after: object) -> None:
    with pytest.raises(QueueGap, match="belongs to another queue"):
        read_after({"0": 6, "after": after}, "q")


def test_the_same_entry_before_the_place_means_the_same_queue() -> None:
    check_identity({0: 6, 1: 1}, {0: "b", 1: "c"}, location_of, "q")


def test_another_entry_before_the_place_means_another_queue() -> None:
    with pytest.raises(QueueGap, match="up to 5, which was a, but b stands there: the manifest was deleted"):
        check_identity({0: 6}, {0: "a"}, location_of, "q")
    with pytest.raises(QueueGap, match="shard 1 of q up to 0, which was d, but c stands there"):
        check_identity({0: 6, 1: 1}, {0: "b", 1: "d"}, location_of, "q")


def test_an_entry_that_nobody_remembers_is_taken_on_trust() -> None:
    check_identity({0: 3}, {0: "long gone"}, location_of, "q")
    check_identity({0: 0}, {0: "nothing read"}, location_of, "q")


def test_the_higher_of_two_places_is_taken_in_every_shard() -> None:
    assert lift({0: 2, 1: 5}, {0: 3, 1: 4}) == {0: 3, 1: 5}


@pytest.mark.parametrize("asked", [2, 10])
def test_a_number_outside_the_queue_is_told_with_what_it_holds(asked: int) -> None:
    with pytest.raises(InvalidInput, match="q holds the sequences 3 to 8"):
        check_asked({0: asked}, HELD, "startingOffsets", "q")


def test_a_number_that_has_left_the_queue_may_be_asked_for_when_gaps_are_recorded() -> None:
    check_asked({0: 0}, HELD, "startingOffsets", "q", earlier=True)
    with pytest.raises(InvalidInput, match="10 is outside"):
        check_asked({0: 10}, HELD, "startingOffsets", "q", earlier=True)


SPANS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 30)), min_size=1, max_size=6)


@given(spans=SPANS, limit=st.integers(1, 100))
def test_admission_by_number_is_exact_and_never_leaves_the_range(
    spans: list[tuple[int, int]], limit: int
) -> None:
    start = {shard: first for shard, (first, _) in enumerate(spans)}
    end = {shard: first + count for shard, (first, count) in enumerate(spans)}
    reached = admit_batches(start, end, limit)
    assert all(start[shard] <= reached[shard] <= end[shard] for shard in start)
    assert backlog(start, reached) == min(limit, backlog(start, end))


@given(spans=SPANS, limit=st.integers(1, 100), sizes=st.lists(st.integers(0, 40), min_size=200, max_size=200))
def test_admission_by_bytes_makes_progress_and_keeps_the_limit_beyond_one_batch(
    spans: list[tuple[int, int]], limit: int, sizes: list[int]
) -> None:
    start = {shard: first for shard, (first, _) in enumerate(spans)}
    end = {shard: first + count for shard, (first, count) in enumerate(spans)}
    reached = admit_bytes(start, end, limit, lambda shard, sequence: sizes[shard + sequence])
    taken = [sizes[s + n] for s in start for n in range(start[s], reached[s])]
    assert all(start[shard] <= reached[shard] <= end[shard] for shard in start)
    assert len(taken) == 1 or sum(taken) <= limit
    assert bool(taken) == (backlog(start, end) > 0)


def test_a_short_shard_leaves_its_share_to_the_others() -> None:
    assert admit_batches({0: 0, 1: 0, 2: 0}, {0: 1, 1: 50, 2: 50}, 11) == {0: 1, 1: 5, 2: 5}
