from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError, InvalidInput
from penstock.spark.sources.offsets import (
    Bounds,
    QueueGap,
    QueueOffsets,
    admit,
    admit_bytes,
    backlog,
    parse_position,
)

OFFSETS = QueueOffsets("q")
HELD = {0: Bounds(first=3, following=9)}
TWO = {0: Bounds(first=3, following=9), 1: Bounds(first=0, following=0)}


def test_shards_are_written_in_numeric_order() -> None:
    offset = {10: 1, 2: 5, 0: 7}
    assert json.dumps(OFFSETS.write(offset)) == '{"0": 7, "2": 5, "10": 1}'
    numbers, _ = OFFSETS.read({"10": 1, "2": 5, "0": 7})
    assert json.dumps(OFFSETS.write(numbers)) == json.dumps(OFFSETS.write(offset))


@pytest.mark.parametrize("stored", [{"seq": 1}, {"0": "x"}, {"0": -1}, {"0": True}, {"0": 1, "1": 2}, {}])
def test_an_offset_of_something_else_is_refused(stored: dict[str, int]) -> None:
    with pytest.raises(QueueGap, match="belongs to another queue"):
        OFFSETS.fit(*OFFSETS.read(stored), [0])


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
def test_a_position_is_a_name_a_number_or_json(text: str, expected: dict[int, int]) -> None:
    assert OFFSETS.resolve(parse_position(text, "startingOffsets"), HELD, "startingOffsets") == expected


@pytest.mark.parametrize(
    "text", ["", "-1", "soon", "{", '{"a": 1}', '{"0": -2}', '{"0": null}', "1.5", '{"0": 1.5}']
)
def test_any_other_position_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="startingOffsets: expected earliest, latest"):
        parse_position(text, "startingOffsets")


def test_one_number_is_refused_for_several_shards() -> None:
    with pytest.raises(ConfigError, match="give JSON"):
        OFFSETS.resolve(5, TWO, "startingOffsets")
    assert OFFSETS.resolve("latest", TWO, "startingOffsets") == {0: 9, 1: 0}
    with pytest.raises(ConfigError, match="name each of them"):
        OFFSETS.resolve({0: 1}, TWO, "startingOffsets")


@pytest.mark.parametrize("place", [3, 4, 8, 9])
def test_a_query_can_continue_at_any_number_that_is_held(place: int) -> None:
    OFFSETS.check_held({0: place}, HELD)
    OFFSETS.check_reached({0: place}, HELD)


def test_a_number_beyond_the_queue_means_another_queue() -> None:
    with pytest.raises(QueueGap, match="has read q up to 9, but it has handed out numbers only up to 8"):
        OFFSETS.check_reached({0: 10}, HELD)


def test_a_number_before_the_queue_is_a_gap_and_the_error_says_how_to_continue() -> None:
    with pytest.raises(QueueGap, match=r"q begins at 3, but this query continues at 2.*onGap=record"):
        OFFSETS.check_held({0: 2}, HELD)
    with pytest.raises(QueueGap, match="shard 0 of q begins at 3"):
        OFFSETS.check_held({0: 2, 1: 0}, TWO)


ENTRIES = {(0, 4): "a", (0, 5): "b", (1, 0): "c"}


def location_of(shard: int, sequence: int) -> str | None:
    return ENTRIES.get((shard, sequence))


def test_marks_follow_the_numbers_in_numeric_order() -> None:
    stored = OFFSETS.write({10: 1, 0: 6, 2: 0}, {10: "z", 0: "b"})
    assert json.dumps(stored) == '{"0": 6, "2": 0, "10": 1, "after": {"0": "b", "10": "z"}}'
    assert OFFSETS.read(stored) == ({0: 6, 2: 0, 10: 1}, {0: "b", 10: "z"})
    assert json.dumps(OFFSETS.write({0: 0}, {})) == '{"0": 0}'


def test_an_offset_without_marks_stays_valid() -> None:
    assert OFFSETS.read({"0": 6}) == ({0: 6}, {})
    OFFSETS.check_identity({0: 6}, {}, location_of)


@pytest.mark.parametrize("after", [7, "b", None, ["b"], {"x": "b"}, {"0": 3}], ids=repr)
def test_marks_that_are_not_locations_are_refused(after: object) -> None:
    with pytest.raises(QueueGap, match="belongs to another queue"):
        OFFSETS.read({"0": 6, "after": after})


def test_the_same_entry_before_the_place_means_the_same_queue() -> None:
    OFFSETS.check_identity({0: 6, 1: 1}, {0: "b", 1: "c"}, location_of)


def test_another_entry_before_the_place_means_another_queue() -> None:
    with pytest.raises(QueueGap, match="up to 5, which was a, but b is there now: the manifest was deleted"):
        OFFSETS.check_identity({0: 6}, {0: "a"}, location_of)
    with pytest.raises(QueueGap, match="shard 1 of q up to 0, which was d, but c is there now"):
        OFFSETS.check_identity({0: 6, 1: 1}, {0: "b", 1: "d"}, location_of)


def test_an_entry_that_is_no_longer_known_is_not_checked() -> None:
    OFFSETS.check_identity({0: 3}, {0: "long gone"}, location_of)
    OFFSETS.check_identity({0: 0}, {0: "nothing read"}, location_of)


@pytest.mark.parametrize("asked", [2, 10])
def test_a_number_outside_the_queue_is_refused_with_its_bounds(asked: int) -> None:
    with pytest.raises(InvalidInput, match="q holds 3 to 8"):
        OFFSETS.check_requested({0: asked}, HELD, "startingOffsets", earlier=False)


def test_a_number_that_has_left_the_queue_is_accepted_if_gaps_are_recorded() -> None:
    OFFSETS.check_requested({0: 0}, HELD, "startingOffsets", earlier=True)
    with pytest.raises(InvalidInput, match="10 is outside"):
        OFFSETS.check_requested({0: 10}, HELD, "startingOffsets", earlier=True)


SPANS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 30)), min_size=1, max_size=6)


@given(spans=SPANS, limit=st.integers(1, 100))
def test_admission_by_number_is_exact_and_never_leaves_the_range(
    spans: list[tuple[int, int]], limit: int
) -> None:
    start = {shard: first for shard, (first, _) in enumerate(spans)}
    end = {shard: first + count for shard, (first, count) in enumerate(spans)}
    reached = admit(start, end, limit)
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
    assert admit({0: 0, 1: 0, 2: 0}, {0: 1, 1: 50, 2: 50}, 11) == {0: 1, 1: 5, 2: 5}
