"""One topic with writes, eviction, expiry, deletions, checkpoints and reads, against a naive model.

After every step, counts, bytes, the first live record and the floor are exact. Floors never decrease, and
only involuntary loss moves them. Every page equals that of a scan over the model.
"""

from __future__ import annotations

import json

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.unit.topics.log_doubles import MemoryTopic, Model, StoredSegment, record

from penstock.topics.log.frame_scan import WalFormat, read_frames
from penstock.topics.model import Predicate
from penstock.topics.read.page import DiffRequest
from penstock.topics.segments.columns import Columns
from penstock.topics.segments.tags import TagTable
from penstock.topics.topic.watermarks import tombstone_for

NODES = ["n", "node-2", ""]
TAGS = ["a", "ab", "b", "\u00e9", ""]
values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text('ab"\\\u20ac, :m\n/', max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["d", "m", "k"]), inner, max_size=3)
    ),
    max_leaves=6,
)
records = st.builds(
    record,
    values,
    tag=st.none() | st.sampled_from(TAGS),
    node=st.none() | st.sampled_from(NODES),
    meta=st.none() | st.dictionaries(st.sampled_from(["d", "m", "x"]), values, max_size=2),
)
plain = st.builds(record, st.text("abc ", max_size=8))
batches = st.lists(records, min_size=1, max_size=5) | st.lists(plain, min_size=1, max_size=60)


class TopicMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.topic = MemoryTopic()
        self.model = Model()
        self.begun: Columns | None = None
        self.floor_before = 1

    @rule(batch=batches, node=st.none() | st.sampled_from(NODES))
    def write(self, batch: list, node: str | None) -> None:
        self.topic.write(batch, node)
        self.model.write(batch, node, self.topic.now_ms)

    @rule(ms=st.integers(0, 500))
    def time_passes(self, ms: int) -> None:
        self.topic.now_ms += ms

    @rule(cap=st.integers(0, 40))
    def evict_to_count(self, cap: int) -> None:
        self.topic.evict(count=cap)
        self.model.evict(count=cap)

    @rule(cap=st.integers(0, 400))
    def evict_to_bytes(self, cap: int) -> None:
        self.topic.evict(size=cap)
        self.model.evict(size=cap)

    @rule(ttl_ms=st.integers(0, 800))
    def expire(self, ttl_ms: int) -> None:
        self.topic.expire(ttl_ms)
        self.model.expire(self.topic.now_ms, ttl_ms)

    @rule(back=st.integers(-3, 60))
    def delete_prefix(self, back: int) -> None:
        before = max(self.model.head - back, 0)
        floor = self.topic.floors.floor
        removed = self.topic.index.delete_prefix(before)
        assert removed.records == self.model.delete(range(1, min(before, self.model.head + 1)))
        assert self.topic.floors.floor == floor

    @rule(seqs=st.lists(st.integers(0, 80), max_size=12))
    def delete_some(self, seqs: list[int]) -> None:
        wanted = [max(self.model.head + 3 - seq, 0) for seq in seqs]
        assert self.topic.index.delete_seqs(wanted).records == self.model.delete(set(wanted))

    @rule(back=st.integers(0, 30))
    def delete_one(self, back: int) -> None:
        seq = max(self.model.head - back, 0)
        assert self.topic.index.delete_one(seq) == bool(self.model.delete([seq]))

    @rule(value=st.sampled_from(TAGS), is_prefix=st.booleans())
    def delete_by_tag(self, value: str, is_prefix: bool) -> None:
        predicate = Predicate(value=value, is_prefix=is_prefix)
        tables = [self._table(run) for run in self.topic.index.runs if run.segment]
        found = self.topic.tags.find(predicate, tables)
        wanted = self.model.matching(predicate)
        assert set(wanted) <= set(found.tolist())
        assert found[self.topic.index.are_live(found)].tolist() == wanted
        assert self.topic.index.delete_seqs(found).records == self.model.delete(wanted)

    def _table(self, run: Columns) -> TagTable:
        assert isinstance(run.source, StoredSegment)
        rows: dict[str, list[int]] = {}
        for place in range(run.count):
            offset, length, _, flags, _ = run.row(place)
            if flags & 1 and length:
                frame = bytes(run.source.data[offset : offset + length])
                node, tag = int.from_bytes(frame[21:23], "little"), int.from_bytes(frame[23:25], "little")
                rows.setdefault(frame[29 + node : 29 + node + tag].decode(), []).append(place)
        return TagTable.of(run.first_seq, rows)

    @rule(count=st.integers(0, 9))
    def skip_numbers(self, count: int) -> None:
        self.topic.index.skip_to(self.model.head + count)
        self.model.head += count

    @precondition(lambda self: self.begun is None)
    @rule(share=st.integers(1, 100))
    def begin_checkpoint(self, share: int) -> None:
        first, head = self.topic.index.first_log_seq, self.topic.index.head_seq
        if first <= head:
            self.begun = self.topic.index.copy(first, first + (head - first) * share // 100)

    @precondition(lambda self: self.begun is not None)
    @rule(cold=st.booleans())
    def finish_checkpoint(self, cold: bool) -> None:
        assert self.begun is not None
        segment = self.topic.segment_of(0, self.begun)
        assert isinstance(segment.source, StoredSegment)
        segment.source.cold = cold
        self.topic.promote(segment)
        self.begun = None

    @precondition(lambda self: self.begun is None)
    @rule(share=st.integers(0, 100))
    def extend_the_last_segment(self, share: int) -> None:
        segments = [run for run in self.topic.index.runs if run.segment]
        head = self.topic.index.head_seq
        if segments and segments[-1].end_seq <= head:
            end = segments[-1].end_seq
            self.topic.promote(self.topic.extended(segments[-1], end + (head - end) * share // 100))

    @rule()
    def drop_dead_runs(self) -> None:
        dropped = self.topic.index.drop_dead_runs()
        assert all(not run.live for run in dropped)
        assert all(run.live for run in self.topic.index.runs)

    @rule()
    def tags_are_compacted(self) -> None:
        self.topic.tags.keep(self.topic.index.are_live)

    @rule(
        back=st.integers(-2, 90),
        limit=st.integers(1, 30),
        max_batch_bytes=st.integers(1, 300),
        nodes=st.lists(st.sampled_from(NODES), max_size=2),
        include_tags=st.booleans(),
        include_meta=st.booleans(),
        ttl_ms=st.sampled_from([0, 0, 300]),
    )
    def read(
        self,
        back: int,
        limit: int,
        max_batch_bytes: int,
        nodes: list[str],
        include_tags: bool,
        include_meta: bool,
        ttl_ms: int,
    ) -> None:
        request = DiffRequest.of(
            max(self.model.head - back, 0),
            limit=limit,
            max_batch_bytes=max_batch_bytes,
            nodes=nodes,
            include_tags=include_tags,
            include_meta=include_meta,
        )
        page = self.topic.read(request, ttl_ms)
        shown, cursor = self.model.read(request, self.topic.now_ms, ttl_ms)
        assert [json.loads(fragment) for fragment in page.fragments] == shown
        assert [list(json.loads(fragment)) for fragment in page.fragments] == [list(one) for one in shown]
        assert page.next_from_seq == cursor
        assert (page.head_seq, page.earliest_seq) == (self.model.head, self.model.earliest)
        tombstone = tombstone_for(self.topic.floors, request.from_seq, self.model.earliest, self.model.head)
        assert page.tombstone == tombstone
        assert (tombstone is None) == (self.model.floor <= request.from_seq + 1 <= self.model.head + 1)
        if not any("meta" in one for one in shown):
            assert [one.seq for one in page.records()] == [one["$seq"] for one in shown]

    @rule()
    def rows_can_be_found_again_in_the_log(self) -> None:
        index = self.topic.index
        for number, content in self.topic.files.items():
            start = 13 if number > 1 else 0
            view = memoryview(bytes(content))
            ends, stopped = WalFormat().frame_ends(view, start, len(view))
            table = read_frames(view, start, ends)
            assert stopped == max(len(view), start)
            rows = np.frombuffer(table.index_rows(), np.uint8).reshape(-1, 20)
            for seq, row in zip(table.heads["seq"].tolist(), rows, strict=True):
                found = index.locate(seq)
                if found is not None and not found[0].segment:
                    assert found[0].part(seq, seq).index_rows().tobytes() == row.tobytes()

    @invariant()
    def numbers_are_exact(self) -> None:
        index = self.topic.index
        assert (index.live, index.live_bytes) == (len(self.model.live), self.model.bytes)
        assert (index.head_seq, index.earliest_seq) == (self.model.head, self.model.earliest)
        assert sum(run.live for run in index.runs) == index.live
        assert (self.topic.floors.cap, self.topic.floors.ttl) == (self.model.cap_floor, self.model.ttl_floor)

    @invariant()
    def the_floor_never_falls_and_never_passes_the_first_live_record(self) -> None:
        floor = self.topic.floors.floor
        assert self.floor_before <= floor <= self.topic.index.earliest_seq
        self.floor_before = floor


TopicMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestTopicMachine = TopicMachine.TestCase
