"""Interruptions: closing while other threads work, subscribers that leave, and forgotten bundles."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.quiver.ack_doubles import CORE as BOOK_CORE
from tests.unit.quiver.ack_doubles import Core
from tests.unit.quiver.bundles import batch, sealed_of
from tests.unit.quiver.engine_doubles import CORE, StepClock, config, open_quiver, rows

from penstock.clock import SYSTEM_CLOCK
from penstock.errors import PenstockError, StorageFull, Unavailable
from penstock.metrics import Registry
from penstock.quiver import AsyncQuiver, Quiver
from penstock.quiver.delivery.subscription import DeliverySettings
from penstock.quiver.errors import Closed
from penstock.quiver.offsets.external import ExternalAck, commit_offset
from penstock.quiver.retention.shared_quota import SharedQuota
from penstock.quiver.segments.store import SegmentStore
from penstock.quiver.segments.writer import SegmentWriter
from penstock.testing.disk import FakeDisk, Survival

pytestmark = pytest.mark.unit


def failing_writer() -> SegmentWriter:
    store = SegmentStore.open(FakeDisk(), "/q/segments", "/q/quarantine")

    def refuse(*_: object) -> None:
        raise Unavailable("the disk is away")

    store.write = refuse  # type: ignore[method-assign, assignment]
    return SegmentWriter(
        store,
        next_seq=1,
        on_written=lambda info: None,
        clock=SYSTEM_CLOCK,
        rng=random.Random(1),
        registry=Registry(),
    )


def outcome_of(call: Callable[[], object]) -> tuple[threading.Thread, list[BaseException | None]]:
    """Make the call on a thread. Return the thread and its later outcome."""
    went: list[BaseException | None] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            went.append(error)
        else:
            went.append(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, went


def test_a_wait_for_segments_ends_when_the_writer_stops() -> None:
    segment_writer = failing_writer()
    segment_writer.start()
    segment_writer.submit(sealed_of(batch(1)))
    while segment_writer.last_error is None:
        time.sleep(0.001)
    started = threading.Event()
    work = segment_writer._work
    hurry = work._hurry

    def noted() -> int:
        # Pretend that more attempts were made before, so that the next failure does not end the wait.
        attempts = hurry() + 1_000_000
        started.set()
        return attempts

    work._hurry = noted  # type: ignore[method-assign]
    thread, went = outcome_of(segment_writer.drain)
    assert started.wait(5)
    segment_writer.stop()
    thread.join(5)
    assert went
    assert isinstance(went[0], Unavailable)


def test_a_writer_that_stopped_writes_nothing_more() -> None:
    store = SegmentStore.open(FakeDisk(), "/q/segments", "/q/quarantine")
    segment_writer = SegmentWriter(
        store,
        next_seq=1,
        on_written=lambda info: None,
        clock=SYSTEM_CLOCK,
        rng=random.Random(1),
        registry=Registry(),
    )
    segment_writer.start()
    segment_writer.stop()
    segment_writer.submit(sealed_of(batch(1)))
    assert not segment_writer.step()
    with pytest.raises(Unavailable):
        segment_writer.drain()
    assert store.infos() == []


def test_closed_offsets_write_nothing_more() -> None:
    core = Core().open()
    core.subscribe("lake")
    core.add(1)
    core.offsets.close()
    files = sorted(core.disk.list_files(f"{BOOK_CORE}/ack"))
    core.ack("lake", 1, 0, 1)
    for write in (core.offsets.sync, core.offsets.checkpoint):
        with pytest.raises(Closed):
            write()
    assert sorted(core.disk.list_files(f"{BOOK_CORE}/ack")) == files
    core.offsets.close()


def test_a_subscriber_that_registers_while_it_leaves_starts_over() -> None:
    core = Core().open()
    core.subscribe("lake", "keeper")
    core.add(1)
    assert core.refs("lake") == [(1, 0), (1, 1)]
    sync = core.offsets.sync

    def back_meanwhile() -> None:
        core.offsets.sync = sync  # type: ignore[method-assign]
        core.subscribe("lake")
        sync()

    core.offsets.sync = back_meanwhile  # type: ignore[method-assign]
    core.deliveries.unregister("lake")
    assert core.refs("lake") == [(1, 0), (1, 1)]


async def test_a_forgotten_bundle_frees_in_flight_capacity_for_a_waiter() -> None:
    core = Core(delivery=DeliverySettings(max_in_flight=1)).open()
    core.subscribe("lake")
    core.add(1)
    claim = core.take("lake")
    waiting = asyncio.create_task(core.deliveries.take_async("lake", None))
    await asyncio.sleep(0)
    core.deliveries.abandon(claim)
    core.deliveries.expire()
    taken = await asyncio.wait_for(waiting, 5)
    assert taken is not None
    assert taken.ref.bundle == 1


def test_a_reader_that_was_unregistered_is_not_registered_again_by_its_old_note() -> None:
    disk, clock = FakeDisk(), StepClock()
    quiver = open_quiver(disk, clock)
    commit_offset(disk, CORE, ExternalAck(subscriber="spark", through=3))
    quiver.maintain()
    assert [each.name for each in quiver.subscribers()] == ["spark"]
    quiver.unregister("spark")
    quiver.close()
    again = open_quiver(disk.crash(Survival.NOTHING), clock)
    again.maintain()
    assert again.subscribers() == []


def test_a_reader_that_keeps_writing_notes_is_not_an_orphan() -> None:
    disk, clock = FakeDisk(), StepClock()
    quiver = open_quiver(disk, clock, config(subscribers={"orphan_timeout": "10s"}))
    commit_offset(disk, CORE, ExternalAck(subscriber="spark", through=0))
    quiver.maintain()
    quiver.orphans(["lake"])
    quiver.ingest(rows(0))
    quiver.flush()
    commit_offset(disk, CORE, ExternalAck(subscriber="spark", through=1))
    quiver.maintain()
    clock.step(11)
    quiver.maintain()
    assert [each.name for each in quiver.subscribers()] == ["spark"]


def test_a_shared_quota_can_be_read_after_close() -> None:
    disk = FakeDisk()
    disk.make_dirs("/data")
    quota = SharedQuota(disk, "/data", core_id=0, cores=2, cap_bytes=1000, target_bytes=10)
    limit = quota.limit()
    quota.close()
    assert quota.limit() == limit
    quota.close()


async def test_a_cancelled_read_returns_its_bundle(tmp_path: Path) -> None:
    async with await AsyncQuiver.open(
        str(tmp_path), config(delivery={"claim_timeout": "1h"}), registry=Registry(), maintenance=False
    ) as quiver:
        await quiver.register("lake")
        await quiver.activate("lake")
        await quiver.ingest(rows(0))
        await quiver.flush()
        reading = asyncio.Event()

        async def never(call: object) -> None:
            reading.set()
            await asyncio.Event().wait()

        run, quiver._run = quiver._run, never  # type: ignore[method-assign, assignment]
        task = asyncio.create_task(quiver.next_bundle("lake", 5))
        await reading.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        quiver._run = run  # type: ignore[method-assign]
        bundle = await quiver.next_bundle("lake", 5)
        assert bundle is not None
        assert bundle.ack()


def test_closing_quiver_releases_a_blocked_writer(tmp_path: Path) -> None:
    small = config(
        segment={"target_size": 3000},
        wal={"max_size": 8192},
        retention={"size_cap": 20_000},
        ingest={"block_timeout": "1h"},
    )
    quiver = Quiver.open(str(tmp_path), small, registry=Registry())
    quiver.register("nobody")
    held = threading.Event()
    reclaim = quiver.core.space._reclaim

    def noted(byte_count: int) -> bool:
        if reclaim(byte_count):
            return True
        held.set()
        return False

    quiver.core.space._reclaim = noted  # type: ignore[method-assign]

    def fill() -> None:
        for n in range(10_000):
            quiver.ingest(rows(n * 100, 20))

    thread, went = outcome_of(fill)
    assert held.wait(20)
    quiver.close()
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    thread.join(5)
    assert went
    assert isinstance(went[0], PenstockError)
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == files


def test_repeated_maintenance_failures_are_logged_at_intervals(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quick = config(maintenance_interval="1ms")
    with Quiver.open(str(tmp_path), quick, registry=Registry()) as quiver:
        tries: list[int] = []

        def fail() -> None:
            tries.append(1)
            raise Unavailable("the disk is away")

        run, quiver.core.maintenance.run = quiver.core.maintenance.run, fail  # type: ignore[method-assign]
        while len(tries) < 20:
            time.sleep(0.001)
        quiver.core.maintenance.run = run  # type: ignore[method-assign]
    warnings = [record for record in caplog.records if "maintenance" in record.getMessage()]
    assert len(warnings) == 1


def test_one_commit_may_bring_more_schemas_than_may_be_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.quiver.segments.memtable.STREAMS_MAX", 5)
    disk, clock = FakeDisk(), StepClock()
    quiver = open_quiver(disk, clock, config(segment={"max_stream_count": 3}))
    quiver.register("lake")
    quiver.ingest({slot: rows(slot) for slot in (10, 30, 40, 50, 51, 52, 63)})
    quiver.flush()
    assert sum(info.bundle_count for info in quiver.core.store.infos()) == 7


def test_a_failing_read_returns_its_bundle() -> None:
    disk, clock = FakeDisk(), StepClock()
    quiver = open_quiver(disk, clock)
    quiver.register("lake")
    quiver.activate("lake")
    quiver.ingest(rows(0))
    quiver.flush()
    read = quiver.core.store.read

    def broken(*_: object) -> None:
        raise MemoryError

    quiver.core.store.read = broken  # type: ignore[method-assign, assignment]
    with pytest.raises(MemoryError):
        quiver.next_bundle("lake")
    quiver.core.store.read = read  # type: ignore[method-assign]
    quiver.maintain()
    clock.step(60)
    assert quiver.next_bundle("lake") is not None


def test_segments_that_cannot_be_written_on_a_full_disk_do_not_prevent_deletions() -> None:
    disk, clock = FakeDisk(), StepClock()
    small = config(
        segment={"target_size": 3000},
        wal={"max_size": 8192},
        retention={"size_cap": 1_000_000, "min_free": 1000, "size_cap_policy": "drop_oldest"},
    )
    quiver = open_quiver(disk, clock, small)
    quiver.register("nobody")
    quiver.ingest(rows(0, 20))
    quiver.flush()
    free, is_full = [10_000_000], [True]
    disk.free_bytes = lambda path: free[0]  # type: ignore[method-assign]
    write, remove = quiver.core.store.write, quiver.core.segments.remove

    def write_if_possible(*arguments: object) -> object:
        if is_full[0]:
            raise StorageFull("no space left on device")
        return write(*arguments)  # type: ignore[arg-type]

    def make_space(seq: int) -> None:
        remove(seq)
        free[0], is_full[0] = 10_000_000, False

    quiver.core.store.write = write_if_possible  # type: ignore[method-assign, assignment]
    quiver.core.segments.remove = make_space  # type: ignore[method-assign]
    with contextlib.suppress(PenstockError):
        for n in range(100):
            quiver.ingest(rows(1000 + n * 100, 20))
    free[0] = 0
    clock.step(5)
    quiver.ingest(rows(100_000, 20))


def test_a_blocked_writer_does_not_spin_while_quiver_closes() -> None:
    disk, clock = FakeDisk(), StepClock()
    quiver = open_quiver(disk, clock, config(ingest={"block_timeout": "1h"}))
    tries: list[int] = []

    def no_room(byte_count: int) -> bool:
        tries.append(byte_count)
        return False

    quiver.core.space._reclaim = no_room  # type: ignore[method-assign]
    quiver.core.maintenance.stop()
    with pytest.raises(Closed):
        quiver.core.space.reclaim(10)
    assert len(tries) <= 2


def test_maintenance_does_nothing_after_close() -> None:
    disk, clock = FakeDisk(), StepClock()
    quiver = open_quiver(disk, clock)
    quiver.close()
    calls = len(disk.calls)
    with pytest.raises(Closed):
        quiver.core.maintenance.run()
    assert len(disk.calls) == calls


def test_a_subscriber_that_left_has_no_lag() -> None:
    core = Core().open()
    core.subscribe("lake")
    core.add(1)
    core.take("lake")
    core.deliveries.measure()
    assert core.registry.value("quiver.subscriber.lag_segments", subscriber="lake") == 1
    core.deliveries.unregister("lake")
    core.deliveries.measure()
    for name in ("lag_segments", "lag_seconds", "gap_segments", "in_flight", "deferred"):
        assert core.registry.value(f"quiver.subscriber.{name}", subscriber="lake") == 0
