"""The group committer: every entry is delivered once, in order, with its outcome."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from tests.unit.storage.log_doubles import DIRECTORY, TINY, bodies, frame

from penstock.errors import StorageFull, Unavailable
from penstock.storage import (
    AppendLog,
    Entry,
    GroupCommitter,
    LogPosition,
    OsFileSystem,
    QueueFull,
    commit_entries,
    scan,
)
from penstock.storage.fs import Buffer
from penstock.testing.disk import DiskFault, FakeDisk, PlannedFault

PATIENCE_S = 30


class Gate:
    """Records delivered entries, and can block the committer inside a delivery."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.batches: list[int] = []
        self.open = threading.Event()
        self.open.set()
        self._changed = threading.Condition()

    def deliver(self, entries: list[Entry]) -> None:
        with self._changed:
            self.entries += entries
            self.batches.append(len(entries))
            self._changed.notify_all()
        assert self.open.wait(PATIENCE_S)

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.entries) >= count, PATIENCE_S)


def entry(n: int, *, sync: bool = True) -> Entry:
    data = frame(b"%d" % n)
    return Entry([data], len(data), 1, sync, context=n)


def numbers(entries: list[Entry]) -> list[object]:
    return [done.context for done in entries]


def until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(PATIENCE_S * 1000):
        if condition():
            return
        pause.wait(0.001)
    raise AssertionError("it did not happen")


@pytest.fixture
def disk() -> FakeDisk:
    return FakeDisk()


@pytest.fixture
def log(disk: FakeDisk) -> AppendLog:
    return AppendLog.open(disk, DIRECTORY, TINY, file_bytes=1 << 16)


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def committer(log: AppendLog, gate: Gate) -> Iterator[GroupCommitter]:
    made = GroupCommitter(
        log, gate.deliver, queue_max=8, sync_interval_s=0.001, mark_after_s=0.001, quick_sync_s=0.0
    )
    yield made
    gate.open.set()
    made.close()


@pytest.fixture
def quick(log: AppendLog, gate: Gate) -> Iterator[GroupCommitter]:
    """Return a committer that treats every disk as quick."""
    made = GroupCommitter(log, gate.deliver, sync_interval_s=0.001, mark_after_s=0.001, quick_sync_s=60.0)
    yield made
    made.close()


def test_a_single_entry_is_delivered_durable(
    disk: FakeDisk, committer: GroupCommitter, gate: Gate, log: AppendLog
) -> None:
    committer.start()
    committer.submit(entry(1))
    gate.wait_for(1)
    done = gate.entries[0]
    assert done.error is None
    assert done.position is not None
    assert done.sync_s > 0
    assert bytes(log.view(done.position.file)[done.position.offset :][: done.byte_count]) == done.buffers[0]
    until(lambda: not log.wants_mark)
    assert bodies(scan(disk.crash(), DIRECTORY, TINY)) == [b"1"]


def test_entries_queued_during_a_commit_share_the_next_one(log: AppendLog, gate: Gate) -> None:
    # No mark during the check, because a mark is one more sync.
    committer = GroupCommitter(log, gate.deliver, queue_max=8, mark_after_s=60.0, quick_sync_s=0.0)
    committer.start()
    gate.open.clear()
    committer.submit(entry(0))
    gate.wait_for(1)
    for n in range(1, 7):
        committer.submit(entry(n, sync=n % 2 == 0))
    gate.open.set()
    gate.wait_for(7)
    assert numbers(gate.entries) == list(range(7))
    assert gate.batches == [1, 6]
    until(lambda: committer.stats().batches == 2)  # counted after the delivery
    stats = committer.stats()
    assert (stats.entries, stats.frames, stats.batches, stats.syncs) == (7, 7, 2, 2)
    assert stats.queue_peak == 6
    assert stats.queue_depth == 0
    committer.close()


def test_a_full_queue_refuses_the_entry(committer: GroupCommitter, gate: Gate) -> None:
    committer.start()
    gate.open.clear()
    committer.submit(entry(0))
    gate.wait_for(1)
    for n in range(1, 9):
        committer.submit(entry(n))
    with pytest.raises(QueueFull, match="8 writes wait"):
        committer.submit(entry(99))
    gate.open.set()
    gate.wait_for(9)
    committer.submit(entry(9))
    gate.wait_for(10)
    assert numbers(gate.entries) == list(range(10))
    assert committer.stats().submit_full == 1


def test_entries_without_sync_are_synced_and_marked_in_the_background(
    log: AppendLog, committer: GroupCommitter, gate: Gate
) -> None:
    committer.start()
    committer.submit(entry(1, sync=False))
    gate.wait_for(1)
    assert gate.entries[0].sync_s == 0
    until(lambda: log.is_durable and log.syncs >= 2 and not log.wants_mark)


def test_after_a_failure_everything_fails_until_resume(
    disk: FakeDisk, log: AppendLog, committer: GroupCommitter, gate: Gate
) -> None:
    committer.start()
    committer.submit(entry(0))
    gate.wait_for(1)
    until(lambda: not log.wants_mark)
    disk.plan = PlannedFault(call=len(disk.calls), kind=DiskFault.NO_SPACE)
    committer.submit(entry(1))
    gate.wait_for(2)
    assert isinstance(gate.entries[1].error, StorageFull)
    disk.plan = None
    committer.submit(entry(2))
    gate.wait_for(3)
    assert gate.entries[2].error is gate.entries[1].error, "it was built on the one that failed"
    assert committer.generation == 0
    assert committer.resume() == 1
    committer.submit(entry(3))
    gate.wait_for(4)
    assert gate.entries[3].error is None
    assert gate.entries[3].generation == 1
    committer.close()
    assert bodies(scan(disk, DIRECTORY, TINY)) == [b"0", b"3"]
    assert committer.stats().failures == 1


def test_of_a_mixed_queue_only_the_old_generation_fails(
    disk: FakeDisk, log: AppendLog, committer: GroupCommitter, gate: Gate
) -> None:
    committer.start()
    gate.open.clear()
    disk.plan = PlannedFault(call=len(disk.calls), kind=DiskFault.FAIL_ONCE)
    committer.submit(entry(0))
    gate.wait_for(1)
    committer.submit(entry(1))
    committer.resume()
    committer.submit(entry(2))
    gate.open.set()
    gate.wait_for(3)
    assert [done.error is None for done in gate.entries] == [False, False, True]
    assert bodies(scan(disk, DIRECTORY, TINY)) == [b"2"]


def test_a_failed_background_sync_is_repaired_and_nothing_is_lost(
    disk: FakeDisk, log: AppendLog, committer: GroupCommitter, gate: Gate
) -> None:
    struck = len(disk.calls) + 1
    disk.plan = PlannedFault(call=struck, kind=DiskFault.FAIL_ONCE)
    committer.start()
    committer.submit(entry(1, sync=False))
    gate.wait_for(1)
    until(lambda: committer.stats().failures == 1 and log.is_durable)
    assert disk.calls[struck] == "datasync"
    assert gate.entries[0].error is None
    committer.close()
    assert bodies(scan(disk.crash(), DIRECTORY, TINY)) == [b"1"]


def test_closing_commits_submitted_entries(disk: FakeDisk, committer: GroupCommitter, gate: Gate) -> None:
    committer.start()
    for n in range(6):
        committer.submit(entry(n, sync=False))
    committer.close()
    committer.close()
    assert numbers(gate.entries) == list(range(6))
    with pytest.raises(Unavailable, match="closed"):
        committer.submit(entry(7))
    assert bodies(scan(disk.crash(), DIRECTORY, TINY)) == [b"%d" % n for n in range(6)]


def test_closing_before_starting_commits_too(disk: FakeDisk, committer: GroupCommitter, gate: Gate) -> None:
    committer.submit(entry(1))
    committer.close()
    assert numbers(gate.entries) == [1]


def test_a_delivery_that_raises_does_not_stop_the_others(
    log: AppendLog, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[object] = []

    def deliver(entries: list[Entry]) -> None:
        seen.extend(numbers(entries))
        raise ZeroDivisionError

    committer = GroupCommitter(log, deliver)
    committer.start()
    with caplog.at_level(logging.ERROR):
        for n in range(3):
            committer.submit(entry(n))
        committer.close()
    assert seen == [0, 1, 2]
    assert "could not be delivered" in caplog.text


def test_a_defect_in_a_commit_fails_only_its_entries(
    log: AppendLog, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    committer = GroupCommitter(log, gate.deliver)
    committer.start()
    with caplog.at_level(logging.ERROR):
        committer.submit(Entry([None], 20, 1, True, context="broken"))  # type: ignore[list-item]
        gate.wait_for(1)
    committer.resume()
    committer.submit(entry(1))
    gate.wait_for(2)
    committer.close()
    assert [isinstance(done.error, Unavailable) for done in gate.entries] == [True, False]


def test_with_slow_syncs_a_commit_waits_for_more_entries(disk: FakeDisk, log: AppendLog, gate: Gate) -> None:
    committer = GroupCommitter(log, gate.deliver, window_max_s=0.002)
    committer._usual_sync_s = 1.0
    committer._last_size = 10
    committer.start()
    committer.submit(entry(0))
    committer.submit(entry(1))
    gate.wait_for(2)
    committer.close()
    assert numbers(gate.entries) == [0, 1]


def test_each_sync_is_measured(log: AppendLog, gate: Gate) -> None:
    measured: list[float] = []
    committer = GroupCommitter(log, gate.deliver, on_sync=measured.append)
    committer.start()
    committer.submit(entry(1))
    gate.wait_for(1)
    committer.close()
    assert len(measured) == 1
    assert measured[0] == gate.entries[0].sync_s


def test_one_commit_of_many_entries_is_one_sync_per_file(disk: FakeDisk) -> None:
    log = AppendLog.open(disk, DIRECTORY, TINY, file_bytes=1024)
    entries = [entry(n) for n in range(100)]
    assert commit_entries(log, entries) is None
    assert log.syncs == log.rotations + 1
    assert [done.position for done in entries] == sorted(done.position for done in entries if done.position)
    assert bodies(scan(disk, DIRECTORY, TINY)) == [b"%d" % n for n in range(100)]


def test_a_commit_that_fails_half_way_keeps_the_files_before(disk: FakeDisk) -> None:
    log = AppendLog.open(disk, DIRECTORY, TINY, file_bytes=1024)
    disk.plan = PlannedFault(call=len(disk.calls) + 1, kind=DiskFault.NO_SPACE)
    entries = [entry(n) for n in range(100)]
    failure = commit_entries(log, entries)
    assert isinstance(failure, StorageFull)
    kept = [done for done in entries if done.error is None]
    assert 0 < len(kept) < 100
    assert kept == entries[: len(kept)]
    assert bodies(scan(disk, DIRECTORY, TINY)) == [b"%d" % n for n in range(len(kept))]
    disk.plan = None
    assert commit_entries(log, [entry(100)]) is None
    assert bodies(scan(disk, DIRECTORY, TINY))[-1] == b"100"


def test_on_a_real_disk_the_next_file_is_prepared(tmp_path: Path, gate: Gate) -> None:
    log = AppendLog.open(OsFileSystem(), str(tmp_path), TINY, file_bytes=4096)
    committer = GroupCommitter(log, gate.deliver)
    committer.start()
    for n in range(300):
        committer.submit(entry(n))
        gate.wait_for(n + 1)
    committer.close()
    log.close()
    assert committer.stats().rotations >= 2
    assert bodies(scan(OsFileSystem(), str(tmp_path), TINY)) == [b"%d" % n for n in range(300)]


def test_held_entries_are_committed_together_on_flush(committer: GroupCommitter, gate: Gate) -> None:
    committer.start()
    for n in range(3):
        committer.submit(entry(n), hold=True)
    assert committer.stats().queue_depth == 3
    committer.flush()
    committer.flush()
    gate.wait_for(3)
    assert numbers(gate.entries) == [0, 1, 2]
    assert gate.batches == [3]


def test_held_entries_fail_with_those_they_build_on(
    disk: FakeDisk, committer: GroupCommitter, gate: Gate
) -> None:
    disk.plan = PlannedFault(call=len(disk.calls), kind=DiskFault.FAIL_ONCE)
    committer.start()
    committer.submit(entry(0))
    committer.submit(entry(1), hold=True)
    gate.wait_for(1)
    committer.resume()
    committer.flush()
    gate.wait_for(2)
    assert [done.error is None for done in gate.entries] == [False, False]
    committer.submit(entry(2))
    gate.wait_for(3)
    assert gate.entries[-1].error is None


def test_where_syncs_are_quick_a_single_entry_is_committed_by_its_submitter(
    quick: GroupCommitter, gate: Gate, log: AppendLog
) -> None:
    quick.start()
    quick.submit(entry(0))  # the committer measures a sync with it
    gate.wait_for(1)
    until(lambda: quick.stats().entries == 1 and not log.wants_mark)
    quick.submit(entry(1))
    assert numbers(gate.entries) == [0, 1]
    assert quick.stats().entries == 2
    until(lambda: not log.wants_mark)  # the thread marks it, although it never received the entry


def stall(log: AppendLog, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Make every later append take at least this long."""
    append = log.append

    def stalled(
        buffers: Sequence[Buffer], byte_count: int, frame_count: int, *, sync: bool, urgent: bool = False
    ) -> LogPosition:
        threading.Event().wait(seconds)
        return append(buffers, byte_count, frame_count, sync=sync, urgent=urgent)

    monkeypatch.setattr(log, "append", stalled)


def test_after_a_stall_only_the_thread_waits_for_the_disk(
    quick: GroupCommitter, gate: Gate, log: AppendLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick.start()
    quick.submit(entry(0))
    gate.wait_for(1)
    until(lambda: quick.stats().entries == 1 and not log.wants_mark)
    stall(log, monkeypatch, 0.02)
    quick.submit(entry(1))
    monkeypatch.undo()
    gate.open.clear()
    quick.submit(entry(2))  # would not return if this thread made the delivery
    gate.open.set()
    gate.wait_for(3)
    assert numbers(gate.entries) == [0, 1, 2]


def test_a_disk_is_as_slow_as_its_first_sync(
    log: AppendLog, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    committer = GroupCommitter(log, gate.deliver, mark_after_s=0.001, quick_sync_s=0.002)
    stall(log, monkeypatch, 0.004)
    committer.start()
    committer.submit(entry(0))
    gate.wait_for(1)
    until(lambda: committer.stats().entries == 1 and not log.wants_mark)
    gate.open.clear()
    committer.submit(entry(1))  # would not return if this thread made the delivery
    gate.open.set()
    gate.wait_for(2)
    committer.close()


def test_in_a_wider_window_a_commit_waits_while_more_entries_arrive(log: AppendLog, gate: Gate) -> None:
    coming = [1, 2, 3]

    def pause(seconds: float) -> None:
        if coming:
            committer.submit(entry(coming.pop(0)))

    committer = GroupCommitter(log, gate.deliver, quick_sync_s=0.0, pause=pause)
    committer.widen(60.0)
    committer.start()
    committer.submit(entry(0))
    gate.wait_for(4)
    assert gate.batches == [4]
    assert all(done.held_s > 0 for done in gate.entries)
    committer.widen(0.0)
    committer.submit(entry(4))
    gate.wait_for(5)
    assert gate.entries[-1].held_s == 0.0
    committer.close()


def test_where_syncs_are_quick_no_commit_waits_for_more_entries(log: AppendLog, gate: Gate) -> None:
    pauses: list[float] = []
    committer = GroupCommitter(log, gate.deliver, quick_sync_s=60.0, pause=pauses.append)
    committer.widen(60.0)
    committer.start()
    for n in range(3):
        committer.submit(entry(n))
        gate.wait_for(n + 1)
    committer.close()
    assert pauses == []
    assert [done.held_s for done in gate.entries] == [0.0, 0.0, 0.0]


def test_the_order_is_kept_by_any_committing_thread(quick: GroupCommitter, gate: Gate) -> None:
    rng = random.Random(7)
    quick.start()
    for n in range(2000):
        quick.submit(entry(n, sync=rng.random() < 0.8), hold=rng.random() < 0.5)
        if rng.random() < 0.01:
            gate.wait_for(n // 2)
    quick.flush()
    gate.wait_for(2000)
    assert numbers(gate.entries) == list(range(2000))
    positions = [done.position for done in gate.entries if done.position is not None]
    assert positions == sorted(positions)
    assert len(positions) == 2000


def test_one_by_one_no_entry_shares_its_sync(log: AppendLog, gate: Gate) -> None:
    committer = GroupCommitter(log, gate.deliver, quick_sync_s=0.0, one_by_one=True)
    for n in range(5):
        committer.submit(entry(n), hold=True)
    committer.flush()
    committer.start()
    gate.wait_for(5)
    assert gate.batches == [1] * 5
    assert numbers(gate.entries) == list(range(5))
    assert log.syncs >= 5
    committer.close()


def test_a_rotation_happens_between_two_commits(log: AppendLog, gate: Gate) -> None:
    committer = GroupCommitter(log, gate.deliver)
    committer.start()
    committer.submit(entry(0))
    gate.wait_for(1)
    before = log.end.file
    committer.rotate()
    committer.submit(entry(1))
    gate.wait_for(2)
    positions = [done.position.file for done in gate.entries if done.position is not None]
    assert positions == [before, log.end.file]
    assert log.end.file > before
    committer.close()
