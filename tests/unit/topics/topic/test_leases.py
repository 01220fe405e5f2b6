"""The lease table alone: states, counts, timers, the log and snapshots."""

from __future__ import annotations

import pytest

from penstock.errors import Corrupt
from penstock.topics.log.frame import HEADER_BYTES
from penstock.topics.queues.claims import round_robin
from penstock.topics.segments.columns import pack_row
from penstock.topics.topic.index import TopicIndex
from penstock.topics.topic.lease_log import (
    LeaseEvent,
    dead_letter_frame,
    lease_frame,
    replay_lease,
    reservation_frame,
)
from penstock.topics.topic.leases import JobState, LeaseTable, Selection, Term


def jobs(count: int) -> TopicIndex:
    index = TopicIndex()
    index.append_rows(pack_row(0, 50, 1, 0, 40) * count, file=1)
    return index


def claim(table: LeaseTable, index: TopicIndex, count: int, until_ms: int = 1000) -> list[JobState]:
    return [table.lease(seq, "w", Term.of(0, until_ms)) for seq in table.select(index, count).seqs]


def body(frame: bytes) -> bytes:
    return frame[HEADER_BYTES:-8]


@pytest.mark.parametrize(
    ("seqs", "wants", "hands"),
    [
        ([], [3], [[]]),
        ([1, 2, 3], [2], [[1, 2]]),
        ([1, 2, 3, 4, 5], [2, 2], [[1, 3], [2, 4]]),
        ([1, 2, 3, 4, 5], [5, 1, 5], [[1, 4], [2], [3, 5]]),
        ([1, 2], [1, 1, 1], [[1], [2], []]),
        ([1, 2], [0, 2], [[], [1, 2]]),
    ],
)
def test_jobs_are_distributed_round_robin(seqs: list[int], wants: list[int], hands: list[list[int]]) -> None:
    assert round_robin(seqs, wants) == hands


def test_fresh_jobs_have_no_entry_until_they_are_delivered() -> None:
    table, index = LeaseTable(), jobs(100_000)
    table.refresh(index, 0)
    assert (len(table), table.ready(index)) == (0, 100_000)
    claim(table, index, 10)
    assert (len(table), table.ready(index), table.in_flight) == (10, 99_990, 10)


def test_the_fresh_cursor_skips_dead_records() -> None:
    table, index = LeaseTable(), jobs(5000)
    index.delete_seqs(range(2, 4900))
    table.refresh(index, 0)
    assert [lease.seq for lease in claim(table, index, 3)] == [1, 4900, 4901]
    assert [lease.seq for lease in claim(table, index, 1)] == [4902]
    assert table.cursor == 4903


def test_an_empty_queue_has_nothing_to_select() -> None:
    assert LeaseTable().select(TopicIndex(), 5) == Selection([], [])


def test_timers_of_ended_leases_are_discarded() -> None:
    table, index = LeaseTable(), jobs(1)
    claim(table, index, 1, until_ms=10**9)
    job = table.leased(1, "w")
    assert job is not None
    for until_ms in range(10**9, 10**9 + 5000):
        table.extend(1, job, Term.of(0, until_ms))
        table.refresh(index, 0)
    assert len(table._timers) < 2000
    table.refresh(index, 10**9 + 4999)
    assert table.in_flight == 1
    table.refresh(index, 10**9 + 5000)
    assert table.in_flight == 0


def test_a_lease_that_was_shortened_ends_at_the_new_time_and_not_again_at_the_old() -> None:
    table, index = LeaseTable(), jobs(1)
    claim(table, index, 1, until_ms=1000)
    job = table.leased(1, "w")
    assert job is not None
    table.extend(1, job, Term.of(0, 100))
    table.refresh(index, 101)
    assert table.ready(index) == 1
    claim(table, index, 1, until_ms=5000)
    table.refresh(index, 1001)
    assert table.in_flight == 1


def test_a_snapshot_stores_every_state_and_leaving_jobs_as_leased() -> None:
    table, index = LeaseTable(), jobs(6)
    claim(table, index, 5)
    held = {seq: table.leased(seq, "w") for seq in range(1, 6)}
    for seq, job in held.items():
        assert job is not None
        if seq == 1:
            table.release(seq, job)
        elif seq == 2:
            table.release(seq, job, Term.of(0, 700))
        elif seq == 3:
            table.leave(seq, job)
    table.dead_lettered = 4
    entry = table.entry(with_leases=True)
    assert [(job.seq, job.lease_id, job.until_ms) for job in entry.jobs] == [
        (1, 0, 0),
        (2, 0, 700),
        (3, 3, 1000),
        (4, 4, 1000),
        (5, 5, 1000),
    ]
    other = LeaseTable()
    other.restore(entry)
    other.settle(index, 0, with_leases=True)
    assert (other.ready(index), other.in_flight, other.dead_lettered) == (2, 3, 4)
    assert [lease.seq for lease in claim(other, index, 9)] == [1, 6]
    assert other.next_lease_id > 6
    deliveries = table.entry(with_leases=False).jobs
    assert [(job.seq, job.deliveries, job.lease_id, job.until_ms, job.node) for job in deliveries] == [
        (seq, 1, 0, 0, "") for seq in range(1, 6)
    ]


def test_replaying_the_log_twice_equals_replaying_it_once() -> None:
    index = jobs(3)
    frames = [
        (1, lease_frame(LeaseEvent.CLAIMED, 7, JobState(1, 1, 1, 500, "é"), ts_ms=0)),
        (1, lease_frame(LeaseEvent.RELEASED, 7, JobState(1, 1, 0, 0), ts_ms=0)),
        (1, lease_frame(LeaseEvent.CLAIMED, 7, JobState(1, 2, 2, 900, "w"), ts_ms=0)),
        (1, lease_frame(LeaseEvent.RELEASED, 7, JobState(1, 2, 0, 0), ts_ms=0)),
        (2, lease_frame(LeaseEvent.EXTENDED, 7, JobState(2, 1, 3, 800, "w"), ts_ms=0)),
        (3, lease_frame(LeaseEvent.ACKED, 7, JobState(3, 1, 4, 800, "w"), ts_ms=0)),
        (0, reservation_frame(7, 4096, ts_ms=0)),
    ]
    for times in (1, 2):
        table = LeaseTable()
        for _ in range(times):
            for seq, frame in frames:
                replay_lease(table, seq, body(frame))
        table.settle(index, 0, with_leases=True)
        assert (table.ready(index), table.in_flight, table.next_lease_id) == (2, 1, 4096)
        first = claim(table, index, 9)
        assert [(lease.seq, lease.deliveries) for lease in first] == [(1, 3), (3, 1)]


def test_dead_letters_in_the_log_are_counted() -> None:
    table = LeaseTable()
    for seq in (1, 2):
        replay_lease(table, seq, body(dead_letter_frame(7, seq, 3, ts_ms=0)))
    assert table.dead_lettered == 2


@pytest.mark.parametrize("cut", [1, 5, 28, 30])
def test_a_truncated_lease_frame_is_corrupt(cut: int) -> None:
    whole = body(lease_frame(LeaseEvent.CLAIMED, 7, JobState(1, 1, 1, 500, "node"), ts_ms=0))
    with pytest.raises(Corrupt):
        replay_lease(LeaseTable(), 1, whole[:cut])
    with pytest.raises(Corrupt):
        replay_lease(LeaseTable(), 1, whole + b"x")
    with pytest.raises(Corrupt, match="unknown event"):
        replay_lease(LeaseTable(), 1, b"\x09" + whole[1:])
