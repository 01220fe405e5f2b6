"""The accumulators: which are due and why, and which part holds back the log."""

from __future__ import annotations

import pyarrow as pa
import pytest
from tests.unit.quiver.bundles import batch, part

from penstock.quiver.model import StreamKey, Trigger
from penstock.quiver.segments.memtable import ActiveSegments

pytestmark = pytest.mark.unit

WIDE = {"target_bytes": 10_000, "max_open_s": 60.0, "max_streams": 10}


def other_batch(name: str) -> pa.RecordBatch:
    return pa.record_batch({name: pa.array([1], pa.int64())})


def filled(*sizes: int) -> tuple[ActiveSegments, list[StreamKey]]:
    """Open one stream per size, one second after another."""
    segments, keys = ActiveSegments(), []
    for place, size in enumerate(sizes):
        each = part(other_batch(f"c{place}"), place + 1, size=size)
        segments.add(each, float(place))
        keys.append(StreamKey(each.slot, each.fingerprint))
    return segments, keys


def test_batches_of_one_schema_wait_in_one_stream_whatever_their_metadata() -> None:
    segments = ActiveSegments()
    segments.add(part(batch(1), 1), 0.0)
    segments.add(part(batch(2).replace_schema_metadata({"a": "b"}), 2), 1.0)
    assert segments.stream_count == 1
    assert segments.byte_count == 200


def test_nothing_is_due_while_everything_is_small_and_young() -> None:
    segments, _ = filled(100, 200)
    assert segments.due(2.0, **WIDE) == []


def test_size_seals_the_largest_stream_first_and_no_more_than_needed() -> None:
    segments, keys = filled(4000, 5000, 1000)
    assert segments.due(2.0, **WIDE) == [(keys[1], Trigger.SIZE)]


def test_size_seals_streams_until_the_rest_is_below_the_target() -> None:
    segments, keys = filled(9000, 9000, 9000)
    assert segments.due(3.0, **WIDE) == [
        (key, Trigger.SIZE) for key in sorted(keys, key=lambda key: key.fingerprint)[:2]
    ]


def test_age_seals_only_the_streams_that_are_old_enough() -> None:
    segments, keys = filled(100, 100)
    assert segments.due(60.5, **WIDE) == [(keys[0], Trigger.AGE)]


def test_too_many_streams_seal_the_largest() -> None:
    segments, keys = filled(100, 300, 200)
    due = segments.due(3.0, target_bytes=10_000, max_open_s=60.0, max_streams=2)
    assert due == [(keys[1], Trigger.STREAMS)]


def test_sealing_removes_a_stream_and_the_next_part_starts_a_new_one() -> None:
    segments, keys = filled(100, 200)
    taken = segments.take(keys[0], Trigger.AGE)
    assert (taken.byte_count, taken.trigger, [each.wal_seq for each in taken.parts]) == (
        100,
        Trigger.AGE,
        [1],
    )
    assert (segments.byte_count, segments.stream_count) == (200, 1)
    segments.add(part(other_batch("c0"), 9, size=50), 9.0)
    assert [each.wal_seq for each in segments.take(keys[0]).parts] == [9]


def test_the_oldest_waiting_part_holds_back_the_log() -> None:
    segments, keys = filled(100, 100)
    assert segments.lowest_wal_start() == 1000
    assert segments.oldest_s == 0.0
    segments.take(keys[0])
    assert segments.lowest_wal_start() == 2000
    segments.take(keys[1])
    assert segments.lowest_wal_start() is None
    assert segments.oldest_s is None


def test_sealing_an_empty_stream_is_an_error() -> None:
    segments, keys = filled(100)
    segments.take(keys[0])
    with pytest.raises(KeyError):
        segments.take(keys[0])
