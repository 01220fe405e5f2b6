"""The manifest queue is linearizable: every recorded history has a sequential explanation.

Appends, reads, dequeues and takeovers run concurrently on storage that loses replies, delivers writes late
and reports wrong conflicts. A call without a reply stays open: it may take effect at any time, or never.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter

import pytest

from penstock.buffer.append import ManifestAppender
from penstock.buffer.dequeue import Dequeuer
from penstock.buffer.errors import BufferError, FencedError, OutcomeUnknown
from penstock.buffer.instruments import Instruments
from penstock.buffer.manifest import NewEntry
from penstock.buffer.manifest_file import ManifestFile
from penstock.metrics import Registry
from penstock.objects import MemoryStore
from penstock.retry import RetryPolicy
from penstock.testing import (
    DEFAULT_RATES,
    FaultKind,
    FaultPlan,
    FaultyStore,
    History,
    Operation,
    QueueModel,
    Simulation,
    check,
    run_simulation,
)
from penstock.testing.queue_model import Append, Bump, Dequeue, Done, Peek, QueueRequest, QueueResponse

HISTORIES = int(os.environ.get("PENSTOCK_SEEDS", "2400")) // 8
CHUNKS = 6
WRITES_MAX = 60
UNKNOWN_KINDS = (
    FaultKind.FAILED_BEFORE,
    FaultKind.APPLIED_THEN_LOST,
    FaultKind.LATE_LANDING,
    FaultKind.THROTTLED,
    FaultKind.OWN_CONFLICT,
)
RATES = {**DEFAULT_RATES, FaultKind.APPLIED_THEN_LOST: 0.05, FaultKind.LATE_LANDING: 0.05}
QueueHistory = History[QueueRequest, QueueResponse]


class Batch:
    """A stored batch that never becomes stale, because this test covers only the queue."""

    def __init__(self, location: str) -> None:
        self.location = location

    def entry(self) -> NewEntry:
        return NewEntry(location=self.location, metadata=())

    def is_stale(self, floor_ms: int) -> bool:
        return False

    async def reupload(self, floor_ms: int) -> None:
        raise AssertionError("nothing is stale here")


class Recorder:
    """Actors that record their requests and responses."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.history: QueueHistory = History()
        self.plan = FaultPlan.random(RATES, stall_s=(1.0, 20.0), late_s=(0.01, 3.0))
        self.shared = MemoryStore(clock=sim.clock())

    def _file(self, name: str) -> ManifestFile:
        rng = self.sim.child_rng(f"store of {name}")
        return ManifestFile(
            FaultyStore(self.shared, clock=self.sim.clock(), rng=rng, plan=self.plan), "q/manifest"
        )

    async def append(self, name: str, count: int) -> None:
        rng = self.sim.child_rng(name)
        queue = ManifestAppender(
            self._file(name),
            policy=RetryPolicy(deadline_s=rng.choice([0.05, 1.0, 60.0])),
            manifest_bytes_max=1 << 20,
            clock=self.sim.clock(),
            rng=rng,
            instruments=Instruments(Registry()),
        )
        for number in range(count):
            await asyncio.sleep(rng.uniform(0, 0.5))
            call = self.history.call(name, Append(f"{name}/{number}"))
            try:
                landed = await queue.append([Batch(f"{name}/{number}")])
            except OutcomeUnknown:
                continue  # never returned: the checker may place it anywhere, or nowhere
            except BufferError:
                self.history.failed(call)
            else:
                self.history.returned(call, landed.first)

    async def consume(self, name: str, steps: int) -> None:
        rng = self.sim.child_rng(name)
        registry = Registry()
        queue = Dequeuer(
            self._file(name),
            policy=RetryPolicy(deadline_s=rng.choice([1.0, 60.0])),
            clock=self.sim.clock(),
            rng=rng,
            instruments=Instruments(registry),
        )
        if not await self._take_over(name, queue, registry):
            return
        for _ in range(steps):
            await asyncio.sleep(rng.uniform(0, 0.5))
            try:
                entries = await self._peek(name, queue)
                if entries:
                    await self._dequeue(name, queue, rng.choice(entries)[0], registry)
            except FencedError:
                return
            except BufferError:
                continue

    async def _take_over(self, name: str, queue: Dequeuer, registry: Registry) -> bool:
        # Each write of a take-over that gets no answer may move the epoch as well: one operation for each.
        calls = [self.history.call(name, Bump()) for _ in range(WRITES_MAX)]
        try:
            await queue.initialize()
        except BufferError:
            return False
        finally:
            for call in calls[max(1, int(registry.value("buffer.manifest_writes", role="consumer"))) :]:
                self.history.failed(call)
        self.history.returned(calls[0], queue.epoch)
        return True

    async def _peek(self, name: str, queue: Dequeuer) -> list[tuple[int, str]]:
        call = self.history.call(name, Peek(queue.epoch))
        try:
            entries = tuple((await queue.entries()).locations())
        except FencedError:
            self.history.returned(call, Done.FENCED)
            raise
        except BufferError:
            self.history.failed(call)
            raise
        self.history.returned(call, entries)
        return list(entries)

    async def _dequeue(self, name: str, queue: Dequeuer, through: int, registry: Registry) -> None:
        writes = registry.value("buffer.manifest_writes", role="consumer")
        call = self.history.call(name, Dequeue(queue.epoch, through))
        try:
            await queue.dequeue(through)
        except FencedError:
            # Fenced means stop. It means "had no effect" only if nothing was sent before that was learnt.
            if registry.value("buffer.manifest_writes", role="consumer") == writes:
                self.history.returned(call, Done.FENCED)
            raise
        self.history.returned(call, Done.OK)


async def record(sim: Simulation) -> tuple[list[Operation[QueueRequest, QueueResponse]], FaultPlan]:
    recorder = Recorder(sim)
    rng = sim.rng

    async def consumers() -> None:
        running = []
        for life in range(rng.randint(1, 4)):
            running.append(asyncio.create_task(recorder.consume(f"consumer{life}", rng.randint(3, 10))))
            await asyncio.sleep(rng.uniform(0.1, 3))
        await asyncio.gather(*running)

    appends = [recorder.append(f"producer{number}", rng.randint(2, 8)) for number in range(rng.randint(1, 6))]
    await asyncio.gather(consumers(), *appends)
    return recorder.history.operations(), recorder.plan


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_history_of_the_queue_is_linearizable(chunk: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(chunk, HISTORIES, CHUNKS):
        history, plan = run_simulation(record, seed=seed, horizon_s=7 * 24 * 3600.0)
        verdict = check(history, QueueModel())
        assert verdict.ok, f"seed {seed}: {verdict.explanation}"
        seen["operations"] += len(history)
        seen["unanswered"] += sum(operation.return_at is None for operation in history)
        seen["conditional"] += sum(call.op in ("put_if_absent", "put_if_match") for call in plan.calls)
        seen["unknown"] += sum(plan.injected[kind] for kind in UNKNOWN_KINDS)
    print(dict(seen))
    assert seen["unanswered"] > 0
    assert seen["unknown"] >= 0.05 * seen["conditional"], seen


def test_a_history_that_skips_or_repeats_is_rejected() -> None:
    """Slightly changed real histories have no explanation, so the checker can fail."""
    bent = 0
    for seed in range(20):
        history, _ = run_simulation(record, seed=seed, horizon_s=7 * 24 * 3600.0)
        appends = [op for op in history if isinstance(op.request, Append) and isinstance(op.response, int)]
        if len(appends) < 2:
            continue
        for victim in (appends[0], appends[-1]):
            assert isinstance(victim.response, int)
            wrong = Operation(
                process=victim.process,
                call_at=victim.call_at,
                return_at=victim.return_at,
                request=victim.request,
                response=victim.response + (1 if victim is appends[0] else -1),
            )
            assert not check([wrong if op is victim else op for op in history], QueueModel()).ok
            bent += 1
    assert bent > 20
