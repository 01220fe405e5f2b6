"""The segment writer: it keeps the order, retries failures, and never reports a segment too early."""

from __future__ import annotations

import logging
import random
import threading

import pytest
from tests.unit.quiver.bundles import batch, part, sealed, sealed_of

from penstock.clock import SYSTEM_CLOCK
from penstock.errors import Unavailable
from penstock.metrics import Registry
from penstock.quiver.model import SegmentInfo, Trigger
from penstock.quiver.segments.store import SegmentStore
from penstock.quiver.segments.writer import SegmentWriter
from penstock.testing.clock import ManualClock
from penstock.testing.disk import DiskFault, FakeDisk, PlannedFault

pytestmark = pytest.mark.unit


class Bench:
    def __init__(self, *, threaded: bool = False) -> None:
        self.disk = FakeDisk()
        self.clock = ManualClock()
        self.registry = Registry()
        self.store = SegmentStore.open(self.disk, "/q/segments", "/q/quarantine")
        self.written: list[SegmentInfo] = []
        self.notified = threading.Event()
        self.segment_writer = SegmentWriter(
            self.store,
            next_seq=1,
            on_written=self.on_written,
            clock=SYSTEM_CLOCK if threaded else self.clock,
            rng=random.Random(1),
            registry=self.registry,
        )

    def on_written(self, info: SegmentInfo) -> None:
        self.written.append(info)
        self.notified.set()

    def fail_next_call(self, kind: DiskFault = DiskFault.FAIL_ONCE) -> None:
        self.disk.plan = PlannedFault(call=len(self.disk.calls), kind=kind)


def test_segments_are_numbered_and_written_in_the_order_of_sealing() -> None:
    bench = Bench()
    numbers = [bench.segment_writer.submit(sealed_of(batch(n), first_seq=n)) for n in (1, 2, 3)]
    assert numbers == [1, 2, 3]
    bench.segment_writer.drain()
    assert [(info.seq, info.wal_seq_min) for info in bench.written] == [(1, 1), (2, 2), (3, 3)]
    assert bench.segment_writer.count == 0


def test_a_sealed_segment_holds_back_the_log_until_it_is_on_disk() -> None:
    bench = Bench()
    bench.segment_writer.submit(sealed_of(batch(1), first_seq=3))
    bench.segment_writer.submit(sealed_of(batch(2), first_seq=2))
    assert bench.segment_writer.lowest_wal_start() == 2000
    assert (bench.segment_writer.first_unwritten_seq, bench.segment_writer.next_seq) == (1, 3)
    assert bench.segment_writer.step()
    assert (bench.segment_writer.first_unwritten_seq, bench.segment_writer.next_seq) == (2, 3)
    assert bench.segment_writer.lowest_wal_start() == 2000
    assert bench.segment_writer.step()
    assert bench.segment_writer.lowest_wal_start() is None
    assert not bench.segment_writer.step()


async def test_a_write_that_fails_twice_is_kept_and_then_written(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.segment_writer.submit(sealed_of(batch(7), first_seq=1))
    bench.segment_writer.submit(sealed_of(batch(8), first_seq=2))
    with caplog.at_level(logging.ERROR):
        for failures in (1, 2):
            bench.fail_next_call()
            assert not bench.segment_writer.step()
            assert isinstance(bench.segment_writer.last_error, Unavailable)
            assert bench.segment_writer.lowest_wal_start() == 1000
            assert bench.registry.value("quiver.finalize.failures_total") == failures
            assert not bench.segment_writer.step(), "not before it is due"
            await bench.clock.advance(30)
    assert bench.segment_writer.step()
    assert bench.segment_writer.step()
    assert [(info.seq, info.wal_seq_min) for info in bench.written] == [(1, 1), (2, 2)]
    assert bench.segment_writer.last_error is None
    assert bench.store.read(1, 0).equals(batch(7))


def test_an_unexpected_error_is_retried_too(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.segment_writer.submit(sealed_of(batch(1)))
    write = bench.store.write

    def break_down(*_: object) -> SegmentInfo:
        raise MemoryError("no memory")

    bench.store.write = break_down  # type: ignore[method-assign]
    with pytest.raises(Unavailable, match="MemoryError"):
        bench.segment_writer.drain()
    bench.store.write = write  # type: ignore[method-assign]
    bench.segment_writer.drain()
    assert [info.seq for info in bench.written] == [1]
    assert "unexpectedly" in caplog.text


def test_drain_tries_immediately_and_raises_the_error() -> None:
    bench = Bench()
    bench.segment_writer.submit(sealed_of(batch(7)))
    bench.fail_next_call(DiskFault.FAIL_ALWAYS)
    for _ in range(2):
        with pytest.raises(Unavailable):
            bench.segment_writer.drain()
    assert bench.segment_writer.count == 1
    bench.disk.plan = None
    bench.segment_writer.drain()
    assert [info.seq for info in bench.written] == [1]


def test_a_failing_callback_does_not_undo_a_segment(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()

    def refuse(info: SegmentInfo) -> None:
        raise RuntimeError("no room at the inn")

    bench.segment_writer._on_written = refuse
    bench.segment_writer.submit(sealed_of(batch(1)))
    bench.segment_writer.drain()
    assert bench.store.read(1, 0).equals(batch(1))
    assert "callback failed" in caplog.text


def test_the_thread_writes_submitted_segments_and_drain_waits_for_them() -> None:
    bench = Bench(threaded=True)
    bench.segment_writer.start()
    for n in range(1, 6):
        bench.segment_writer.submit(sealed_of(batch(n), first_seq=n))
    bench.segment_writer.drain(timeout_s=30)
    assert [info.seq for info in bench.written] == [1, 2, 3, 4, 5]
    bench.segment_writer.stop()


def test_the_thread_tries_again_after_a_failure() -> None:
    bench = Bench(threaded=True)
    bench.fail_next_call()
    bench.segment_writer.submit(sealed_of(batch(1)))
    bench.segment_writer.start()
    assert bench.notified.wait(30)
    bench.segment_writer.stop()
    assert [info.seq for info in bench.written] == [1]


def test_drain_with_the_thread_raises_the_error() -> None:
    bench = Bench(threaded=True)
    bench.fail_next_call(DiskFault.FAIL_ALWAYS)
    bench.segment_writer.start()
    bench.segment_writer.submit(sealed_of(batch(1)))
    with pytest.raises(Unavailable):
        bench.segment_writer.drain(timeout_s=30)
    bench.segment_writer.stop()
    assert bench.segment_writer.count == 1


def test_bytes_and_triggers_are_counted() -> None:
    bench = Bench()
    bench.segment_writer.submit(sealed([part(batch(1), 1, size=70)], Trigger.AGE))
    assert bench.segment_writer.byte_count == 70
    bench.segment_writer.drain()
    assert bench.registry.value("quiver.finalize.trigger", trigger="age") == 1
    assert bench.registry.value("quiver.finalize.seconds") == 1
