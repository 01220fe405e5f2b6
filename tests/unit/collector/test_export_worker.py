"""Delivery: several bundles at a time, each settled by its outcome, and a pause for a failed destination."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.collector_doubles import Bundle, MemoryStore

from penstock.collector.breaker import CircuitPolicy
from penstock.collector.dead_letters import DeadLetters
from penstock.collector.export_worker import ExportWorker, OwnSource, RoundRobin, SharedSource
from penstock.collector.outcome import Outcome, Verdict, delivered, refused, unreachable
from penstock.collector.payload import Payload
from penstock.errors import Corrupt, StorageFull
from penstock.metrics import Registry
from penstock.testing import ManualClock


class Scripted:
    """An exporter whose outcome is a function of the number of calls."""

    def __init__(self, answer: Callable[[int], Outcome]) -> None:
        self._answer = answer
        self.sent: list[bytes] = []
        self.at: list[float] = []
        self.under_way = self.most = 0
        self.clock: ManualClock | None = None
        self.takes_s = 0.0
        self.registry = Registry()

    async def start(self) -> None: ...

    async def send(self, payload: Payload) -> Outcome:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        self.sent.append(payload.otlp())
        if self.clock is not None:
            self.at.append(self.clock.monotonic())
        await (self.clock.sleep(self.takes_s) if self.clock is not None else asyncio.sleep(0))
        self.under_way -= 1
        return self._answer(len(self.sent))

    async def close(self) -> None: ...


def worker(
    store: MemoryStore,
    exporter: Scripted,
    path: Path,
    clock: ManualClock,
    *,
    concurrency: int = 5,
    join_bytes: int = 0,
) -> ExportWorker:
    exporter.clock = clock
    return ExportWorker(
        "out",
        OwnSource(store, "out"),
        exporter,
        dead_letters=DeadLetters(str(path / "dead"), clock=clock),
        policy=CircuitPolicy(initial_s=1, max_s=8),
        join_bytes=join_bytes,
        concurrency=concurrency,
        origin="01ARZ-core0",
        clock=clock,
        rng=random.Random(1),
        registry=exporter.registry,
    )


async def filled(count: int) -> MemoryStore:
    store = MemoryStore()
    for number in range(count):
        await store.ingest_raw(b"\x0a\x02%02d" % number, "traces")
    return store


async def until(condition: Callable[[], bool], clock: ManualClock, step_s: float = 0.05) -> None:
    for _ in range(4000):
        if condition():
            return
        await clock.advance(step_s)
        await asyncio.sleep(0)
    raise AssertionError("it never came true")


async def test_every_bundle_is_delivered_and_acknowledged(tmp_path: Path) -> None:
    store, exporter, clock = await filled(20), Scripted(lambda _: delivered()), ManualClock()
    task = worker(store, exporter, tmp_path, clock)
    task.stop()
    await task.run()
    assert store.outcomes("ack") == 20
    assert exporter.most == 5


async def test_a_refused_bundle_is_a_dead_letter_before_it_is_rejected(tmp_path: Path) -> None:
    store, clock = await filled(1), ManualClock()
    task = worker(store, Scripted(lambda _: refused("INVALID_ARGUMENT: no")), tmp_path, clock)
    task.stop()
    await task.run()
    assert store.outcomes("reject") == 1
    [letter] = DeadLetters(str(tmp_path / "dead")).letters()
    assert letter.reason == "INVALID_ARGUMENT: no"
    assert letter.signal == "traces"
    assert letter.size == 4


async def test_a_refused_bundle_that_cannot_be_stored_is_retried(tmp_path: Path) -> None:
    store, clock = await filled(1), ManualClock()
    (tmp_path / "dead").write_text("a file where the directory should be")
    task = worker(store, Scripted(lambda _: refused("no")), tmp_path, clock, concurrency=1)
    running = asyncio.create_task(task.run())
    await asyncio.wait_for(_seen(store, "nack"), 5)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert store.outcomes("reject") == 0


async def _seen(store: MemoryStore, what: str) -> None:
    while not store.outcomes(what):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_a_destination_that_is_down_gets_one_bundle_at_a_time(tmp_path: Path) -> None:
    store, clock = await filled(50), ManualClock()
    exporter = Scripted(lambda count: unreachable("no connection") if count < 9 else delivered())
    exporter.takes_s = 0.2
    task = worker(store, exporter, tmp_path, clock)
    running = asyncio.create_task(task.run())
    await until(lambda: store.outcomes("ack") == 50, clock)
    task.stop()
    await asyncio.wait_for(running, 5)
    first, probes = exporter.at[:5], exporter.at[5:9]
    assert first == [0.0] * 5, "those in progress when it went down"
    gaps = [later - earlier for earlier, later in itertools.pairwise(probes)]
    assert all(gap >= 0.5 for gap in gaps), gaps
    assert gaps == sorted(gaps), "each wait is longer than the one before"


async def test_a_retry_delay_postpones_the_next_attempt(tmp_path: Path) -> None:
    store, clock = await filled(3), ManualClock()
    busy = Outcome(verdict=Verdict.RETRY, reason="busy", retry_after_s=3, is_down=True)
    exporter = Scripted(lambda count: busy if count == 1 else delivered())
    task = worker(store, exporter, tmp_path, clock, concurrency=1)
    running = asyncio.create_task(task.run())
    await until(lambda: store.outcomes("ack") == 3, clock)
    task.stop()
    await asyncio.wait_for(running, 5)
    assert exporter.at[1] - exporter.at[0] >= 3
    assert ("nack", "busy", 3) in [(entry[0], entry[2], entry[3]) for entry in store.log]


async def test_a_fault_of_one_request_does_not_open_the_circuit(tmp_path: Path) -> None:
    store, clock = await filled(10), ManualClock()
    aborted = Outcome(verdict=Verdict.RETRY, reason="ABORTED")
    task = worker(store, Scripted(lambda count: aborted if count == 1 else delivered()), tmp_path, clock)
    task.stop()
    await task.run()
    assert store.outcomes("ack") == 10


async def test_a_bug_in_an_exporter_loses_nothing(tmp_path: Path) -> None:
    def answer(count: int) -> Outcome:
        if count == 1:
            raise ZeroDivisionError
        return delivered()

    store, clock = await filled(2), ManualClock()
    task = worker(store, Scripted(answer), tmp_path, clock, concurrency=1)
    task.stop()
    await task.run()
    assert (store.outcomes("nack"), store.outcomes("ack")) == (1, 2)


async def test_bundles_in_progress_at_a_stop_are_returned(tmp_path: Path) -> None:
    class Stuck(Scripted):
        async def send(self, payload: Payload) -> Outcome:
            self.under_way += 1
            await asyncio.Event().wait()
            raise AssertionError

    store, clock = await filled(2), ManualClock()
    exporter = Stuck(lambda _: delivered())
    running = asyncio.create_task(worker(store, exporter, tmp_path, clock).run())
    while exporter.under_way < 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert store.outcomes("defer") == 2


def test_round_robin_skips_names_that_are_not_ready() -> None:
    turns = RoundRobin(["a", "b", "c"])
    assert [turns.pick(["a", "b", "c"]) for _ in range(4)] == ["a", "b", "c", "a"]
    assert turns.pick(["a", "c"]) == "c"
    assert turns.pick([]) is None


async def test_a_shared_subscriber_is_distributed_in_turn() -> None:
    store = await filled(6)
    shared = SharedSource(store, "keep", ["a", "b"])
    a, b = shared.of("a"), shared.of("b")
    pairs = [await asyncio.gather(a.next(1), b.next(1)) for _ in range(3)]
    numbers = [[pair[0].ref, pair[1].ref] for pair in pairs if pair[0] and pair[1]]
    assert len(numbers) == 3
    assert len({(ref.segment_seq, ref.bundle) for pair in numbers for ref in pair}) == 6
    assert await a.next(0.01) is None


async def test_a_shared_subscriber_serves_a_destination_that_does_not_wait() -> None:
    """A stopping collector takes bundles without waiting, and must still get all that can be delivered."""
    store = await filled(2)
    source = SharedSource(store, "keep", ["a"]).of("a")
    assert await source.next(0.0) is not None
    assert await source.next(0.0) is not None
    assert await source.next(0.0) is None


async def test_waiting_bundles_are_sent_together_and_each_is_acknowledged(tmp_path: Path) -> None:
    store, exporter, clock = await filled(20), Scripted(lambda _: delivered()), ManualClock()
    for number in range(20):
        await store.ingest_raw(b"\x0a\x02%02d" % number, "logs")
    task = worker(store, exporter, tmp_path, clock, concurrency=1, join_bytes=10_000)
    task.stop()
    await task.run()
    assert store.outcomes("ack") == 40
    assert exporter.sent == [b"".join(b"\x0a\x02%02d" % number for number in range(20))] * 2


async def test_only_the_faulty_one_of_bundles_sent_together_is_rejected(tmp_path: Path) -> None:
    store, clock = await filled(6), ManualClock()
    exporter = Scripted(lambda _: refused("no") if b"03" in exporter.sent[-1] else delivered())
    task = worker(store, exporter, tmp_path, clock, concurrency=1, join_bytes=10_000)
    task.stop()
    await task.run()
    assert (store.outcomes("ack"), store.outcomes("reject")) == (5, 1)
    [letter] = DeadLetters(str(tmp_path / "dead")).letters()
    assert letter.size == 4


async def test_a_joined_request_that_must_be_retried_returns_all_its_bundles(tmp_path: Path) -> None:
    store, clock = await filled(4), ManualClock()
    exporter = Scripted(lambda count: Outcome(verdict=Verdict.RETRY) if count == 1 else delivered())
    task = worker(store, exporter, tmp_path, clock, concurrency=1, join_bytes=10_000)
    task.stop()
    await task.run()
    assert (store.outcomes("nack"), store.outcomes("ack")) == (4, 4)


async def test_a_probe_is_a_single_bundle(tmp_path: Path) -> None:
    store, clock = await filled(8), ManualClock()
    exporter = Scripted(lambda count: unreachable("down") if count == 1 else delivered())
    task = worker(store, exporter, tmp_path, clock, concurrency=1, join_bytes=10_000)
    running = asyncio.create_task(task.run())
    await until(lambda: store.outcomes("ack") == 8, clock)
    task.stop()
    await asyncio.wait_for(running, 5)
    assert [len(data) for data in exporter.sent] == [32, 4, 28]


async def test_items_that_were_refused_without_a_reason_are_counted(tmp_path: Path) -> None:
    store, exporter, clock = await filled(1), Scripted(lambda _: delivered(rejected_items=7)), ManualClock()
    task = worker(store, exporter, tmp_path, clock)
    task.stop()
    await task.run()
    assert store.outcomes("ack") == 1
    assert exporter.registry.value("collector.exporter.rejected_items", exporter="out") == 7


async def test_a_probe_that_ends_in_our_own_error_is_not_the_last_one(tmp_path: Path) -> None:
    class Failing(MemoryStore):
        fails = True

        async def next_bundle(self, subscriber: str, timeout: float | None = None) -> Bundle | None:
            found = await super().next_bundle(subscriber, timeout)
            if found is not None and exporter.sent and self.fails:
                self.fails = False
                self.pending.appendleft(found)
                raise ZeroDivisionError
            return found

    store, clock = Failing(), ManualClock()
    await store.ingest_raw(b"\x0a\x0201", "traces")
    exporter = Scripted(lambda count: unreachable("away") if count == 1 else delivered())
    task = worker(store, exporter, tmp_path, clock, concurrency=1)
    running = asyncio.create_task(task.run())
    await until(running.done, clock)
    assert isinstance(running.exception(), ExceptionGroup), "its caller restarts it"
    running = asyncio.create_task(task.run())
    await until(lambda: store.outcomes("ack") == 1, clock)
    task.stop()
    await asyncio.wait_for(running, 5)


async def test_an_ack_that_cannot_be_written_during_a_probe_closes_the_circuit(tmp_path: Path) -> None:
    store, clock = await filled(1), ManualClock()
    exporter = Scripted(lambda count: unreachable("away") if count == 1 else delivered())
    bundle = store.pending[0]
    tries = []

    def ack() -> bool:
        tries.append(1)
        if len(tries) == 1:
            bundle.defer(0.0)
            raise StorageFull("no room for the ack")
        return Bundle.ack(bundle)

    bundle.ack = ack  # type: ignore[method-assign]
    task = worker(store, exporter, tmp_path, clock, concurrency=1)
    running = asyncio.create_task(task.run())
    await until(lambda: store.outcomes("ack") == 1, clock)
    task.stop()
    await asyncio.wait_for(running, 5)


async def test_the_rest_of_a_group_is_not_tried_when_the_destination_went_down(tmp_path: Path) -> None:
    store, clock = await filled(10), ManualClock()

    def answer(count: int) -> Outcome:
        if count == 1:
            return refused("one of them")
        return unreachable("away") if count == 2 else delivered()

    exporter = Scripted(answer)
    task = worker(store, exporter, tmp_path, clock, concurrency=1, join_bytes=10_000)
    task.stop()
    await task.run()
    assert len(exporter.sent) == 2, "all together, then only the first of them"
    assert store.outcomes("nack") == 1
    assert store.outcomes("defer") == 9


async def test_a_read_error_reaches_every_destination_of_a_shared_subscriber() -> None:
    class Broken(MemoryStore):
        async def next_bundle(self, subscriber: str, timeout: float | None = None) -> Bundle | None:
            raise Corrupt("a segment is damaged")

    source = SharedSource(Broken(), "keep", ["a", "b"])
    with pytest.raises(Corrupt, match="damaged"):
        await source.of("a").next(1.0)


async def test_a_bundle_is_not_given_to_a_destination_that_has_left() -> None:
    store = MemoryStore()
    source = SharedSource(store, "keep", ["a", "b"])
    leaving = asyncio.create_task(source.of("a").next(5.0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await store.ingest_raw(b"\x0a\x0201", "traces")
    found = await source.of("b").next(1.0)
    assert found is store.stored[0]
    assert store.outcomes("defer") == 0
