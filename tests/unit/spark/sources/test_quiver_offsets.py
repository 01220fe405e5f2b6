"""Offsets over segments: positions, gaps, and another directory under an old checkpoint."""

from __future__ import annotations

import pytest
from tests.unit.quiver.bundles import SECOND_NS

from penstock.errors import ConfigError
from penstock.quiver.model import SegmentInfo, Signal
from penstock.spark.sources.quiver_offsets import (
    SegmentGap,
    SegmentOffsets,
    bounds_of,
    marks_at,
    missing_segments,
    parse_position,
    segment_ranges,
    segments_between,
)

OFFSETS = SegmentOffsets()
pytestmark = pytest.mark.unit


def info(seq: int, core: int = 0, *, second: int = 0, xxh3: str = "") -> SegmentInfo:
    return SegmentInfo(
        seq=seq,
        signal=Signal.LOGS,
        slot=51,
        schema_hash="00",
        bundle_count=1,
        item_count=1,
        ingest_ns_min=second * SECOND_NS,
        ingest_ns_max=second * SECOND_NS,
        event_ns_min=None,
        event_ns_max=None,
        wal_start=0,
        wal_end=1,
        wal_seq_min=0,
        wal_seq_max=0,
        core_id=core,
        file_size=1,
        xxh3=xxh3 or f"{core:08d}{seq:08d}",
        created_by="",
    )


def test_an_offset_is_json_with_cores_in_numeric_order() -> None:
    stored = OFFSETS.write({10: 5, 2: 7}, {2: "ab@3"})
    assert list(stored["next"]) == ["2", "10"]
    assert OFFSETS.read(stored) == ({2: 7, 10: 5}, {2: "ab@3"})
    assert OFFSETS.read({"next": {}}) == ({}, {})


@pytest.mark.parametrize("stored", [None, {}, {"next": 3}, {"next": {"x": 1}}, {"next": {"0": -1}}, []])
def test_other_values_than_offsets_are_refused(stored: object) -> None:
    with pytest.raises(SegmentGap, match="not an offset of segments"):
        OFFSETS.read(stored)


def test_a_position_is_for_all_cores_or_for_each() -> None:
    assert parse_position(" earliest ", "x") == "earliest"
    assert parse_position("7", "x") == 7
    assert parse_position('{"0": 3, "1": "latest"}', "x") == {0: 3, 1: "latest"}
    for wrong in ("soon", "0", "{", '{"a": 1}', "[1]", '{"0": 1.5}'):
        with pytest.raises(ConfigError, match="startingOffsets"):
            parse_position(wrong, "startingOffsets")


def test_a_position_becomes_numbers_for_every_core() -> None:
    bounds = bounds_of([info(4), info(6), info(2, 1)])
    assert OFFSETS.resolve("earliest", bounds, "x") == {0: 4, 1: 2}
    assert OFFSETS.resolve("latest", bounds, "x") == {0: 7, 1: 3}
    assert OFFSETS.resolve({0: 5}, bounds, "x") == {0: 5, 1: 2}
    with pytest.raises(ConfigError, match="core 0, core 1 have separate numbers"):
        OFFSETS.resolve(5, bounds, "x")
    with pytest.raises(ConfigError, match="no core 9"):
        OFFSETS.resolve({9: 1}, bounds, "x")


def test_missing_segments_are_named_core_by_core() -> None:
    infos = [info(3), info(6), info(1, 1)]
    start, end = {0: 3, 1: 1}, {0: 8, 1: 3, 2: 5}
    assert missing_segments(infos, start, end) == [(0, 4), (0, 5), (0, 7), (1, 2)]
    assert segment_ranges(missing_segments(infos, start, end)) == "4 to 5 of core 0, 7 of core 0, 2 of core 1"
    assert [(each.core_id, each.seq) for each in segments_between(infos, start, end)] == [
        (0, 3),
        (0, 6),
        (1, 1),
    ]


def test_a_new_core_has_no_segments_and_no_gap_yet() -> None:
    infos = [info(5, 1), info(6, 1)]
    assert segments_between(infos, {}, {1: 5}) == []
    assert missing_segments(infos, {}, {1: 5}) == []


def test_an_end_before_the_start_is_refused() -> None:
    OFFSETS.check_order({0: 3}, {0: 3, 1: 9})
    for end in ({0: 2}, {1: 9}):
        with pytest.raises(SegmentGap, match="would start at 3"):
            OFFSETS.check_order({0: 3}, end)


def test_the_last_read_segment_is_recognised() -> None:
    infos = [info(1), info(2, second=5)]
    marks = marks_at(infos, {0: 3}, {})
    OFFSETS.check_identity(infos, {0: 3}, marks)
    OFFSETS.check_identity([info(1)], {0: 3}, marks)
    OFFSETS.check_identity([], {0: 3}, marks)
    with pytest.raises(SegmentGap, match="created again"):
        OFFSETS.check_identity([info(2, xxh3="f" * 16)], {0: 3}, marks)


def test_numbers_that_started_over_are_noticed_by_their_time() -> None:
    marks = marks_at([info(9, second=100)], {0: 10}, {})
    OFFSETS.check_identity([info(1, second=130)], {0: 10}, marks)
    with pytest.raises(SegmentGap, match="created again"):
        OFFSETS.check_identity([info(1, second=100 + 3601)], {0: 10}, marks)
    OFFSETS.check_identity([info(10, second=10_000)], {0: 10}, marks)


def test_marks_that_cannot_be_renewed_stay() -> None:
    assert marks_at([], {0: 5, 1: 2}, {0: "ab@1", 7: "x@1"}) == {0: "ab@1"}
