"""Hostile bytes: the decoders raise only `Corrupt`, or find nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.properties.mutations import changes, mutated
from tests.unit.topics.log_doubles import MemoryTopic, StoredSegment, encoded, record

from penstock.errors import Corrupt, InvalidInput
from penstock.storage.log_layout import chase
from penstock.topics.log.control import Deletion, TopicChange, Watermarks, read_head_watermark
from penstock.topics.log.frame import FrameType, encode_control
from penstock.topics.log.frame_scan import WalFormat, read_frames
from penstock.topics.model import Predicate, canonical, parse_match
from penstock.topics.read.page import DiffRequest
from penstock.topics.routers.copy_frame import LOST_SOURCE, CopyFrame, CopyRun
from penstock.topics.routers.model import RouterEntry, decode_created, encode_created
from penstock.topics.topic.lease_log import (
    LeaseEvent,
    dead_letter_frame,
    lease_frame,
    replay_lease,
    reservation_frame,
)
from penstock.topics.topic.leases import JobState, LeaseTable

WAL = WalFormat()


def _body(frame: bytes) -> bytes:
    ends, _ = WAL.frame_ends(memoryview(frame), 0, len(frame))
    return bytes(read_frames(memoryview(frame), 0, ends).body(0))


def _replayed(raw: bytes) -> None:
    """Check that a table after any replay can be counted and put into a snapshot."""
    table = LeaseTable()
    replay_lease(table, 7, raw)
    index = MemoryTopic().index
    table.entry(with_leases=True)
    table.settle(index, 0, with_leases=True)
    assert table.in_flight == table.ready(index) == len(table) == 0
    assert table.next_lease_id <= table.reserved_lease_id


BODIES: dict[str, tuple[Callable[[bytes], object], bytes]] = {
    "topic": (TopicChange.decode, TopicChange(name="topic", config=b'{"ttl_ms":1}').encode()),
    "delete": (
        Deletion.decode,
        Deletion(
            before_seq=9,
            match=Predicate(value="tag", is_prefix=True),
            seqs=np.array([1, 5], np.uint64),
            bound_head=12,
        ).encode(),
    ),
    "watermark": (Watermarks.decode, Watermarks(cap=1, earliest_seq=2, ttl=3, trim=4).encode()),
    "head": (read_head_watermark, bytes(8)),
    "lease": (_replayed, _body(lease_frame(LeaseEvent.CLAIMED, 1, JobState(7, 2, 3, 99, "w"), ts_ms=1))),
    "release": (_replayed, _body(lease_frame(LeaseEvent.RELEASED, 1, JobState(7, 2, 0, 99), ts_ms=1))),
    "reservation": (_replayed, _body(reservation_frame(1, 4096, ts_ms=1))),
    "dead letter": (_replayed, _body(dead_letter_frame(1, 7, 3, ts_ms=1))),
    "router": (
        lambda body: decode_created(7, body),
        encode_created(
            RouterEntry(
                id=7,
                name="r",
                source="from",
                source_id=1,
                dest="to",
                dest_id=2,
                bits=31,
                match=("tag", True),
                cursor=5,
                forwarded_total=3,
                dest_base=2,
            )
        ),
    ),
    "forward": (
        CopyFrame.decode,
        CopyFrame(
            router="r",
            router_id=7,
            source="from",
            source_id=1,
            bits=19,
            cursor=12,
            forwarded_total=9,
            first_seq=4,
            runs=(CopyRun(LOST_SOURCE, 2), CopyRun(5, 3, 1), CopyRun(9, 1, 8)),
        ).encode(),
    ),
}
LOG = (
    WAL.mark(0)
    + encode_control(FrameType.TOPIC_CREATE, 1, BODIES["topic"][1])
    + bytes(encoded([record("a b", tag="t", node="n", meta={"m": 1}), record("\u20ac/"), record(3)]).buffer)
    + WAL.mark(77)
)
edits = changes(
    ["flip", "cut", "insert", "double", "u32"], [2**16, 2**31, 2**32 - 1, 2**32 - 5, 38, 42], most=5
)


@pytest.mark.parametrize("kind", BODIES)
def test_bodies_of_control_frames_decode_or_are_corrupt(kind: str) -> None:
    decode, body = BODIES[kind]

    @settings(max_examples=300)
    @given(st.binary(max_size=60) | edits.map(lambda changes: mutated(body, changes)))
    def check(raw: bytes) -> None:
        try:
            decode(raw)
        except Corrupt:
            pass

    check()


@settings(max_examples=500)
@given(st.binary(max_size=300) | edits.map(lambda changes: mutated(LOG, changes)))
def test_a_scan_of_any_bytes_finds_the_same_frames_as_one_after_the_other(raw: bytes) -> None:
    view = memoryview(raw)
    ends, stopped = WAL.frame_ends(view, 0, len(raw))
    slow, slow_stopped = chase(WAL, view, 0, len(raw))
    assert (ends.tolist(), stopped) == (slow.tolist(), slow_stopped)
    table = read_frames(view, 0, ends)
    assert len(table.index_rows()) == 20 * len(ends)
    for place, start in enumerate([0, *ends[:-1].tolist()][: len(ends)]):
        frame = view[start : int(ends[place])]
        assert bytes(frame) in LOG or frame.nbytes >= 46
        WAL.read_mark(frame)
        table.body(place)
    list(table.tags())


def test_no_single_bit_flip_in_the_log_is_believed() -> None:
    whole = len(WAL.frame_ends(memoryview(LOG), 0, len(LOG))[0])
    for bit in range(8 * len(LOG)):
        flipped = bytearray(LOG)
        flipped[bit // 8] ^= 1 << bit % 8
        ends, stopped = WAL.frame_ends(memoryview(flipped), 0, len(flipped))
        assert len(ends) < whole
        assert stopped <= bit // 8


def test_no_single_bit_flip_in_a_segment_is_delivered() -> None:
    topic = MemoryTopic()
    topic.write([record("a b", tag="t", node="n", meta={"m": 1}), record(2)])
    topic.promote(topic.segment_of(2))
    stored = topic.index.runs[0].source
    assert isinstance(stored, StoredSegment)
    request = DiffRequest.of(include_tags=True, nodes=["other"])
    good = topic.read(request).fragments
    for bit in range(8 * len(stored.data)):
        stored.data[bit // 8] ^= 1 << bit % 8
        try:
            fragments = topic.read(request).fragments
            assert fragments == good[: len(fragments)]
            assert len(fragments) < 2
        except Corrupt:
            pass
        stored.data[bit // 8] ^= 1 << bit % 8
    assert topic.read(request).fragments == good


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=5)
    | st.sampled_from(["tag", "Eq", "Glob", "a*"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)


@settings(max_examples=300)
@given(json_values)
def test_any_json_is_a_predicate_or_invalid_input(value: object) -> None:
    try:
        predicate = parse_match(value)
    except InvalidInput:
        return
    assert parse_match(list(canonical(predicate))) == predicate
