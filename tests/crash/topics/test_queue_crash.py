"""A fault at every file call of a queue at work, and a power cut at every instant (I10).

The worker below claims, acks, gives back, extends and lets jobs die, with checkpoints in between, and notes
what it was told. Whenever the power goes, afterwards every job is in the queue, acked, or among the dead
letters; nothing acked comes back; no lease number that was given out is given out again; and a queue that
keeps its leases still knows the holders. `PENSTOCK_SOAK=1` strikes at every call instead of every few.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest
from tests.crash.fault_kinds import fault_name, spread
from tests.unit.topics.engine_doubles import World, read_all, rec, run_until_power_cut

from penstock.errors import PenstockError
from penstock.testing.clock import ManualClock
from penstock.testing.disk import DiskFault, FakeDisk, PlannedFault, Survival
from penstock.topics import ClaimedJob, Engine, TopicConfig

pytestmark = [pytest.mark.crash, pytest.mark.timeout(1800 if os.environ.get("PENSTOCK_SOAK") else 180)]

SOAK = bool(os.environ.get("PENSTOCK_SOAK"))
CRASHES = [DiskFault.CRASH_BEFORE, DiskFault.CRASH_AFTER]
FAULTS = [fault for fault in DiskFault if fault not in CRASHES]
CONFIG = {"wal_file_bytes": 1400, "segment_max_events": 4, "segment_max_age_ms": 0}
LEASE_MS = 60_000
JOBS = 9


@dataclass
class Notes:
    """What was asked and what was answered."""

    written: set[int] = field(default_factory=set)
    acking: set[int] = field(default_factory=set)
    acked: set[int] = field(default_factory=set)
    lease_ids: set[str] = field(default_factory=set)
    held: dict[int, ClaimedJob] = field(default_factory=dict)
    """Claims that were answered and not given up since."""


class Worker:
    """Drives a queue and keeps the notes. An error is noted and lived with, as a real worker does."""

    def __init__(self, world: World, config: TopicConfig) -> None:
        self.world = world
        self.config = config
        self.notes = Notes()

    async def attempt(self, call: Callable[[], Awaitable[object]]) -> bool:
        try:
            await call()
        except PenstockError:
            return False
        return True

    async def write(self) -> None:
        result = await self.world.engine.write("q", [rec("a"), rec("b"), rec("c")])
        self.notes.written |= set(range(result.first_seq, result.last_seq + 1))

    async def claim(self, most: int) -> list[int]:
        jobs: list[ClaimedJob] = []

        async def ask() -> None:
            jobs.extend((await self.world.engine.claim("q", "w", max=most)).jobs())

        await self.attempt(ask)
        for job in jobs:
            assert job.lease_id not in self.notes.lease_ids
            self.notes.lease_ids.add(job.lease_id)
            self.notes.held[job.seq] = job
        return [job.seq for job in jobs]

    async def ack(self, seqs: list[int]) -> None:
        self.notes.acking |= set(seqs)
        if await self.attempt(lambda: self.world.engine.ack("q", "w", seqs)):
            self.notes.acked |= set(seqs)
        for seq in seqs:
            self.notes.held.pop(seq, None)

    async def nack(self, seqs: list[int]) -> None:
        for seq in seqs:
            self.notes.held.pop(seq, None)
        await self.attempt(lambda: self.world.engine.nack("q", "w", seqs))

    async def work(self) -> None:
        if not await self.attempt(self.world.open):
            return
        engine = self.world.engine
        if not await self.attempt(lambda: engine.put_topic("q", self.config)):
            return
        for _ in range(3):
            await self.attempt(self.write)
        first = await self.claim(4)
        await self.ack(first[:1])
        await self.nack(first[1:3])
        await self.attempt(engine.checkpoint)
        second = await self.claim(3)
        await self.ack(second[-1:])
        await self.attempt(lambda: engine.extend("q", "w", first[3:], lease_ms=2 * LEASE_MS))
        await self.attempt(engine.checkpoint)
        await self.ack((await self.claim(2))[:1])
        await self.attempt(engine.close)


async def check(engine: Engine, worker: Worker) -> None:
    notes = worker.notes
    assert engine.problems == []
    if not engine.exists("q"):
        assert not notes.written
        return
    left = set(await read_all(engine, "q"))
    dead = await sources_of_letters(engine)
    assert not left & notes.acked, "an acked job came back"
    assert notes.written - notes.acking <= left | set(dead), "a job is lost"
    state = engine.state("q").queue
    assert state is not None
    assert state.dead_lettered <= len(dead), "counted and not written"
    assert state.dead_lettered == len(set(dead) - left), "gone to the dead letters and not counted"
    assert state.ready + state.in_flight == len(left)
    if worker.config.leases_durable:
        kept = {seq for seq in notes.held if seq in left}
        taken = {job.seq for job in (await engine.claim("q", "v", max=100)).jobs()}
        assert not kept & taken, "a job has two holders"
        fenced = [notes.held[seq].lease_id for seq in sorted(kept)]
        assert (await engine.ack("q", "w", sorted(kept), fenced)).acked == len(kept)
    else:
        assert state.in_flight == 0
    for job in (await engine.claim("q", "v", max=100)).jobs():
        assert job.lease_id not in notes.lease_ids, "a lease number is used twice"


async def sources_of_letters(engine: Engine) -> list[int]:
    """The sequence numbers that the dead letters had in the queue."""
    if not engine.exists("dead"):
        return []
    records = (await engine.diff("dead", limit=1000)).records()
    return [int(json.loads(bytes(record.meta or b"{}"))["$dead_letter_src_seq"]) for record in records]


async def verify(disk: FakeDisk, worker: Worker) -> None:
    world = World(disk=disk, clock=worker.world.clock, **CONFIG)
    first = (await world.open()).topics()[0]
    engine = await world.kill()
    assert engine.topics()[0] == first, "recovering again is recovering once"
    await check(engine, worker)
    await engine.close()


def run_with(plan: PlannedFault | None, *, leases_durable: bool) -> tuple[FakeDisk, Worker]:
    clock = ManualClock()
    config = TopicConfig(
        type="queue",
        durable=True,
        lease_ms=LEASE_MS,
        leases_durable=leases_durable,
        max_deliveries=1,
        dead_letter="dead",
    )
    worker = Worker(World(disk=FakeDisk(plan=plan, clock=clock), clock=clock, **CONFIG), config)
    run_until_power_cut(worker.work())
    return worker.world.disk, worker


def verify_all(disk: FakeDisk, worker: Worker, why: str) -> None:
    for how, rng in (
        (Survival.NOTHING, None),
        (Survival.EVERYTHING, None),
        (Survival.RANDOM, random.Random(1)),
    ):
        try:
            asyncio.run(verify(disk.crash(how, rng), worker))
        except BaseException as error:
            raise AssertionError(f"{why}, {how.name}: {error!r}") from error


@pytest.mark.parametrize("leases_durable", [False, True])
def test_without_a_fault_the_work_is_done(leases_durable: bool) -> None:
    disk, worker = run_with(None, leases_durable=leases_durable)
    assert (worker.notes.written, len(worker.notes.acked)) == (set(range(1, JOBS + 1)), 3)
    verify_all(disk, worker, "no fault")


@pytest.mark.parametrize("leases_durable", [False, True])
@pytest.mark.parametrize("kind", spread([*CRASHES, *FAULTS]), ids=fault_name)
def test_a_fault_at_any_call_loses_no_job_and_doubles_no_holder(
    kind: DiskFault, leases_durable: bool
) -> None:
    total = len(run_with(None, leases_durable=leases_durable)[0].calls)
    every = 1 if SOAK else 7
    for call in range(list(DiskFault).index(kind) % every, total, every):
        disk, worker = run_with(PlannedFault(call=call, kind=kind), leases_durable=leases_durable)
        verify_all(disk, worker, f"{kind.name} at call {call} of {total}")
