"""A fault at every file call of routers at work, and a power cut at every instant.

Topics of every class are joined by routers and a chain of two; records are written, copied, read, deleted and
evicted; direct writes go between copies; checkpoints come in between; a source goes. Whatever fails and
whenever the power goes: what was read at a destination is there again under its number, as far as its class
promises, nothing is there twice, nothing that the source still has is missing, and recovering twice is
recovering once.

`PENSTOCK_SOAK=1` strikes at every call instead of every few.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Callable, Coroutine, Iterator

import pytest
from tests.crash.fault_kinds import fault_name, spread
from tests.unit.topics.engine_doubles import World, run_until_power_cut, settle
from tests.unit.topics.routers.router_notes import ROUTES, SOURCES, Notes, attempt

from penstock.errors import PenstockError
from penstock.testing.clock import ManualClock
from penstock.testing.disk import DiskFault, FakeDisk, PlannedFault, PowerCut, Survival
from penstock.topics import Engine

SOAK = bool(os.environ.get("PENSTOCK_SOAK"))
pytestmark = [pytest.mark.crash, pytest.mark.timeout(3600 if SOAK else 180)]
CRASHES = [DiskFault.CRASH_BEFORE, DiskFault.CRASH_AFTER]
FAULTS = [fault for fault in DiskFault if fault not in CRASHES]
CONFIG = {"wal_file_bytes": 4000, "segment_max_events": 4, "segment_max_age_ms": 0, "wal_shards": 2}


async def work(world: World, notes: Notes) -> None:
    try:
        engine = await world.open()
    except PenstockError:
        return
    await attempt(notes.make(engine))

    async def write(topic: str, count: int = 1) -> None:
        await attempt(notes.write(engine, topic, count))

    async def look(*dests: str) -> None:
        for dest in dests:
            await attempt(notes.look(engine, dest))

    for source in SOURCES:
        await write(source, 2)
    await look(*ROUTES)
    await write("f2f")
    await write("cap", 4)
    await look("cap2f", "f2f", "f2f2f")
    world.committers.tend()
    await write("d", 3)
    await look("d2f")
    await attempt(engine.checkpoint())
    await write("f", 2)
    await write("e")
    await write("m", 2)
    await look("f2f", "e2f", "m2d")
    await attempt(notes.delete(engine, "f", 4))
    await write("f2d")
    await look("f2d", "d2d", "f2f2f")
    await attempt(notes.delete(engine, "f2f", 2))
    await write("f")
    world.committers.hold()
    held = [asyncio.ensure_future(write(topic)) for topic in ("f", "f2f", "d", "cap")]
    await settle()
    world.committers.release()
    await asyncio.gather(*held)
    await attempt(engine.checkpoint())
    await write("f", 2)
    await look("f2f", "f2d")
    await write("cap", 3)
    await look("cap2f")
    world.disk.plan = None
    await notes.make(engine)
    for source in SOURCES:
        await notes.write(engine, source)
    await look(*ROUTES)


async def work_and_close(world: World, notes: Notes) -> None:
    await work(world, notes)
    if hasattr(world, "engine"):
        await world.engine.close()


async def verify(disk: FakeDisk, notes: Notes, clock: ManualClock, *, power_cut: bool) -> None:
    world = World(disk=disk, clock=clock, **CONFIG)
    engine = await world.open()
    await notes.check(engine, power_cut=power_cut)
    before = await notes.picture(engine)
    world.committers.tend()
    engine = await world.crash(Survival.EVERYTHING)
    assert await notes.picture(engine) == before, "recovering again is recovering once"
    assert engine.problems == []
    await notes.make(engine)
    for source in SOURCES:
        await notes.write(engine, source)
    for dest in ROUTES:
        await notes.look(engine, dest)
    await notes.check(engine, power_cut=False)
    await engine.checkpoint()
    engine = await world.crash(Survival.NOTHING)
    await notes.check(engine, power_cut=True)
    await engine.close()


def copied(notes: Notes) -> Notes:
    return Notes(
        notes.count,
        {topic: list(values) for topic, values in notes.acked.items()},
        {topic: list(values) for topic, values in notes.tried.items()},
        {topic: dict(values) for topic, values in notes.seen.items()},
        {topic: set(values) for topic, values in notes.maybe_deleted.items()},
        set(notes.made),
        set(notes.late),
    )


def run_with(
    plan: PlannedFault | None, run: Callable[[World, Notes], Coroutine[object, None, None]] = work
) -> tuple[FakeDisk, Notes, ManualClock]:
    clock = ManualClock()
    world = World(disk=FakeDisk(plan=plan, clock=clock), clock=clock, **CONFIG)
    notes = Notes()
    run_until_power_cut(run(world, notes))
    return world.disk, notes, clock


def cuts(disk: FakeDisk) -> Iterator[tuple[str, FakeDisk, bool]]:
    yield "nothing survived", disk.crash(Survival.NOTHING), True
    yield "only the process died", disk.crash(Survival.EVERYTHING), False
    for seed in range(8 if SOAK else 1):
        yield f"seed {seed}", disk.crash(Survival.RANDOM, random.Random(seed)), True


def verify_all(disk: FakeDisk, notes: Notes, clock: ManualClock, why: str) -> None:
    for how, after, power_cut in cuts(disk):
        try:
            asyncio.run(verify(after, copied(notes), clock, power_cut=power_cut))
        except BaseException as error:
            raise AssertionError(f"{why}, {how}: {error!r}") from error


def some(total: int, kind: DiskFault, every: int) -> range:
    """Every call, or in a short run every few: other ones for each kind of fault."""
    return range(total) if SOAK else range(list(DiskFault).index(kind) % every, total, every)


def test_without_a_fault_everything_is_there() -> None:
    for run in (work, work_and_close):
        verify_all(*run_with(None, run), "no fault")


@pytest.mark.parametrize("kind", spread(CRASHES), ids=fault_name)
def test_a_crash_at_any_call_keeps_what_was_read_and_copies_nothing_twice(kind: DiskFault) -> None:
    total = len(run_with(None, work_and_close)[0].calls)
    for call in some(total, kind, 131):
        disk, notes, clock = run_with(PlannedFault(call=call, kind=kind), work_and_close)
        verify_all(disk, notes, clock, f"{kind.name} at call {call} ({disk.calls[-1]})")


@pytest.mark.parametrize("kind", spread(FAULTS), ids=fault_name)
def test_a_fault_at_any_call_loses_no_copy(kind: DiskFault) -> None:
    total = len(run_with(None)[0].calls)
    for call in some(total, kind, 263):
        disk, notes, clock = run_with(PlannedFault(call=call, kind=kind))
        verify_all(disk, notes, clock, f"{kind.name} at call {call} ({disk.calls[call]})")


@pytest.mark.parametrize("kind", spread([*CRASHES, DiskFault.FAIL_ONCE]), ids=fault_name)
def test_a_fault_at_any_call_of_a_recovery_changes_nothing(kind: DiskFault) -> None:
    """Crash while it was working; start, with a fault at a call of the start; start again."""
    total = len(run_with(None, work_and_close)[0].calls)
    for call in range(total // 3, total, total // (20 if SOAK else 2)):
        disk, notes, clock = run_with(PlannedFault(call=call, kind=DiskFault.CRASH_BEFORE), work_and_close)

        async def seen(disk: FakeDisk, notes: Notes = notes, clock: ManualClock = clock) -> dict[int, object]:
            world = World(disk=disk, clock=clock, **CONFIG)
            engine: Engine = await world.open()
            await notes.check(engine, power_cut=True)
            kept: dict[int, object] = await notes.picture(engine)  # type: ignore[assignment]
            world.committers.tend()
            return kept

        def survivor(disk: FakeDisk = disk) -> FakeDisk:
            return disk.crash(Survival.RANDOM, random.Random(1))

        whole = survivor()
        wanted = asyncio.run(seen(whole))
        for step in some(len(whole.calls), kind, 67):
            again = survivor()
            again.plan = PlannedFault(call=step, kind=kind)
            # What cannot be committed now is not copied yet: only what comes after is held against the notes.
            with contextlib.suppress(PowerCut, PenstockError, AssertionError):
                asyncio.run(seen(again))
            again.plan = None
            after = again.crash(Survival.EVERYTHING)
            assert asyncio.run(seen(after)) == wanted, (
                f"crash at call {call}, {kind.name} at {step} of a start"
            )
