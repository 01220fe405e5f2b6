"""A fault at every file call of an engine, and a power cut at every instant.

The writer below takes an engine through everything that touches a disk: topics of every class come and go;
writes are committed alone and in groups; the log rotates; checkpoints append to segments, seal them, move
them to a cold directory and drop what is dead; records are deleted by prefix and by tag. It notes what it was
told. Whatever fails and whenever the power goes, afterwards the data directory holds what the notes ask for,
nothing that they forbid, and keeps working; and recovering it twice is recovering it once.

`PENSTOCK_SOAK=1` strikes at every call instead of every few.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field

import pytest
from tests.crash.fault_kinds import fault_name, spread
from tests.unit.topics.engine_doubles import COLD, World, read_all, rec, run_until_power_cut

from penstock.errors import PenstockError
from penstock.testing.clock import ManualClock
from penstock.testing.disk import DiskFault, FakeDisk, PlannedFault, PowerCut, Survival
from penstock.topics import Durability, Engine, Predicate, TopicConfig, TopicNotFound

pytestmark = [pytest.mark.crash, pytest.mark.timeout(1800 if os.environ.get("PENSTOCK_SOAK") else 180)]

SOAK = bool(os.environ.get("PENSTOCK_SOAK"))
CRASHES = [DiskFault.CRASH_BEFORE, DiskFault.CRASH_AFTER]
FAULTS = [fault for fault in DiskFault if fault not in CRASHES]
SEEDS = range(8) if SOAK else range(1)
CONFIG = {
    "wal_file_bytes": 1400,
    "segment_max_events": 4,
    "hot_retain_segments": 1,
    "cold_dir": COLD,
    "segment_max_age_ms": 0,
}
CLASSES = {
    "f": TopicConfig(durability=Durability.FSYNC),
    "d": TopicConfig(durability=Durability.DISK),
    "m": TopicConfig(durability=Durability.MEMORY),
    "e": TopicConfig(durability=Durability.EPHEMERAL),
    "cap": TopicConfig(durability=Durability.FSYNC, cap_records=3),
    "gone": TopicConfig(durability=Durability.FSYNC),
}


@dataclass
class Write:
    """One write: its values, and where it is once it was acknowledged."""

    values: list[str]
    tag: str | None = None
    first_seq: int = 0
    failed: bool = False

    @property
    def acked(self) -> dict[int, str]:
        return dict(enumerate(self.values, self.first_seq)) if self.first_seq else {}


@dataclass
class Life:
    """What was asked of one topic, and what was answered."""

    config: TopicConfig
    made: bool = False
    """Whether its creation was acknowledged."""
    leaving: bool = False
    left: bool = False
    writes: list[Write] = field(default_factory=list)
    maybe_deleted: set[int] = field(default_factory=set)
    deleted: set[int] = field(default_factory=set)

    @property
    def acked(self) -> dict[int, str]:
        return {seq: value for write in self.writes for seq, value in write.acked.items()}


class Writer:
    """Drives an engine and keeps the notes."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.lives: dict[str, Life] = {}
        self.count = 0

    @property
    def engine(self) -> Engine:
        return self.world.engine

    async def attempt(self, call: Callable[[], Awaitable[object]]) -> bool:
        try:
            await call()
        except PenstockError:
            return False
        return True

    async def make(self, name: str) -> None:
        life = self.lives[name] = Life(CLASSES[name])
        life.made = await self.attempt(lambda: self.engine.put_topic(name, life.config))

    async def write(self, name: str, count: int = 1, tag: str | None = None) -> None:
        self.count += 1
        life = self.lives[name]
        write = Write([f"{name}{self.count}.{place}" for place in range(count)], tag)
        life.writes.append(write)
        try:
            result = await self.engine.write(
                name, [rec(value, tag=tag) for value in write.values], create=False
            )
        except PenstockError:
            write.failed = True
            return
        write.first_seq = result.first_seq
        assert result.last_seq == result.first_seq + count - 1

    async def write_together(self, *names: str) -> None:
        """Several writes that are one commit."""
        self.world.committers.hold()
        tasks = [asyncio.ensure_future(self.write(name, 2)) for name in names]
        for _ in range(4):
            await asyncio.sleep(0)
        self.world.committers.release()
        await asyncio.gather(*tasks)

    async def delete(self, name: str, *, before_seq: int | None = None, tag: str | None = None) -> None:
        life = self.lives[name]
        if not life.made:
            return
        acked = [(seq, write.tag) for write in life.writes for seq in write.acked]
        wanted = {seq for seq, own in acked if (tag is None or own == tag) and seq < (before_seq or seq + 1)}
        life.maybe_deleted |= wanted
        match = None if tag is None else Predicate(value=tag)
        if await self.attempt(lambda: self.engine.delete(name, before_seq=before_seq, match=match)):
            life.deleted |= wanted

    async def remove(self, name: str) -> None:
        life = self.lives[name]
        life.leaving = True
        life.left = await self.attempt(lambda: self.engine.remove_topic(name))
        if not life.left:
            life.leaving = False  # the commit failed: nothing has happened

    async def checkpoint(self) -> None:
        await self.attempt(self.engine.checkpoint)


async def work(world: World, writer: Writer) -> None:
    try:
        await world.open()
    except PenstockError:
        return
    for name in CLASSES:
        await writer.make(name)
    for name in CLASSES:
        await writer.write(name, 2, tag="x" if name == "f" else None)
    await writer.write_together("f", "d", "m", "d", "f")
    world.committers.tend()
    await writer.write("cap", 3)
    await writer.write("d", 2)
    await writer.write("m")
    await writer.checkpoint()
    await writer.write("f", 2, tag="y")
    await writer.delete("f", before_seq=2)
    await writer.write_together("f", "cap", "d", "gone")
    await writer.delete("f", tag="x")
    await writer.checkpoint()
    await writer.remove("gone")
    for name in ("f", "d", "m", "e"):
        await writer.write(name, 3)
    await writer.delete("f", tag="y")
    await writer.checkpoint()
    if writer.lives["gone"].left:
        await writer.make("gone")
        await writer.write("gone")
    await writer.write("d", 3)
    await writer.write("f", 3)
    await writer.checkpoint()
    await writer.delete("d", before_seq=6)
    await writer.write("f")
    world.disk.plan = None
    for name, life in writer.lives.items():
        if not life.made:
            await writer.make(name)
        await writer.write(name)
        assert writer.lives[name].writes[-1].first_seq, "when the faults stop, everything continues"


async def work_and_close(world: World, writer: Writer) -> None:
    await work(world, writer)
    if hasattr(world, "engine"):
        await world.engine.close()


# ---- what must be there ------------------------------------------------------------------------------


async def check(engine: Engine, writer: Writer, *, power_cut: bool) -> None:
    assert engine.problems == []
    for name, life in writer.lives.items():
        there = engine.exists(name)
        assert there or not life.made or life.leaving, f"{name} is lost"
        assert not (there and life.left), f"{name} came back"
        if there:
            await check_topic(engine, name, life, power_cut=power_cut)


async def check_topic(engine: Engine, name: str, life: Life, *, power_cut: bool) -> None:
    found = await read_all(engine, name)
    state = engine.state(name)
    assert state.count == len(found)
    durability = life.config.durability
    acked = life.acked
    for seq, value in found.items():
        assert acked.get(seq, value) == value, f"{name} {seq} is {value}, acknowledged was {acked[seq]}"
        assert any(value in write.values for write in life.writes), f"{name} {seq} is a phantom: {value}"
    assert len(set(found.values())) == len(found), f"{name}: a record is there twice"
    assert list(found.values()) == sorted(found.values(), key=_number), f"{name} is out of order"
    assert not set(found) & life.deleted, f"{name}: deleted records came back"
    _check_whole(found, life, name)
    if durability is Durability.EPHEMERAL:
        assert found == {}
        return
    if durability is not Durability.MEMORY or not power_cut:
        assert state.head_seq >= max(acked, default=0), f"{name}: the head went back"
    else:
        assert state.head_seq <= sum(len(write.values) for write in life.writes)
    must = {seq for seq in acked if seq not in life.maybe_deleted}
    if life.config.cap_records:
        must = {seq for seq in must if seq > state.head_seq - life.config.cap_records}
        assert len(found) <= life.config.cap_records
    if durability is Durability.FSYNC or not power_cut:
        assert must <= set(found), f"{name}: lost {sorted(must - set(found))}"
    else:
        lost = [seq for seq in must if seq not in found]
        assert not lost or min(lost) > max((seq for seq in found if seq in acked), default=0), (
            f"{name}: a gap"
        )


def _number(value: object) -> tuple[int, int]:
    head, _, place = str(value).partition(".")
    return int(head.lstrip("abcdefghijklmnopqrstuvwxyz")), int(place)


def _check_whole(found: dict[int, object], life: Life, name: str) -> None:
    """A write is there as a whole, unless some of it was deleted or evicted."""
    if life.config.cap_records:
        return
    last = life.writes[-1] if life.writes else None
    for write in life.writes:
        seqs = [seq for seq, value in found.items() if value in write.values]
        if write.failed and seqs:
            assert write is last or not any(one.first_seq for one in _after(life.writes, write)), (
                f"{name}: a failed write came back"
            )
        if seqs and not set(range(min(seqs), max(seqs) + 2)) & life.maybe_deleted:
            assert len(seqs) == len(write.values) or set(_around(seqs, write)) & life.maybe_deleted, (
                f"{name}: half a write: {seqs}"
            )


def _around(seqs: list[int], write: Write) -> range:
    return range(min(seqs) - len(write.values), max(seqs) + len(write.values) + 1)


def _after(writes: list[Write], one: Write) -> list[Write]:
    return writes[writes.index(one) + 1 :]


async def picture(engine: Engine) -> dict[str, object]:
    """Everything that a reader can see."""
    seen: dict[str, object] = {}
    for state in engine.topics(limit=1000)[0]:
        name = state.topic
        cursors = {0, 1, 4, max(state.earliest_seq - 2, 0), state.head_seq, state.head_seq + 1}
        tombstones = [(await engine.diff(name, cursor)).tombstone for cursor in sorted(cursors)]
        numbers = (state.head_seq, state.earliest_seq, state.count, state.bytes, state.config)
        seen[name] = (numbers, await read_all(engine, name), tombstones)
    return seen


async def verify(disk: FakeDisk, writer: Writer, *, power_cut: bool) -> None:
    world = World(disk=disk, clock=writer.world.clock, **CONFIG)
    await check(await world.open(), writer, power_cut=power_cut)
    before = await picture(world.engine)
    engine = await world.kill()
    assert await picture(engine) == before, "recovering again is recovering once"
    assert engine.problems == []
    for name in before:
        life = writer.lives[name]
        result = await engine.write(name, [rec("alive")])
        if life.config.durability in (Durability.FSYNC, Durability.DISK):
            assert result.first_seq > max(life.acked, default=0), f"{name}: a sequence is used twice"
    await engine.checkpoint()
    after = await picture(engine)
    engine = await world.restart()
    assert engine.problems == []
    ephemeral = {"e"}
    assert {name: seen for name, seen in (await picture(engine)).items() if name not in ephemeral} == {
        name: seen for name, seen in after.items() if name not in ephemeral
    }
    await engine.close()


# ---- the sweeps --------------------------------------------------------------------------------------


def run_with(
    plan: PlannedFault | None,
    run: Callable[[World, Writer], Coroutine[object, None, None]] = work,
    *,
    is_quick: bool = False,
) -> tuple[FakeDisk, Writer]:
    clock = ManualClock()
    world = World(disk=FakeDisk(plan=plan, clock=clock), clock=clock, is_quick=is_quick, **CONFIG)
    writer = Writer(world)
    run_until_power_cut(run(world, writer))
    return world.disk, writer


def cuts(disk: FakeDisk) -> Iterator[tuple[str, FakeDisk, bool]]:
    yield "nothing survived", disk.crash(Survival.NOTHING), True
    yield "only the process died", disk.crash(Survival.EVERYTHING), False
    for seed in SEEDS:
        yield f"seed {seed}", disk.crash(Survival.RANDOM, random.Random(seed)), True


def verify_all(disk: FakeDisk, writer: Writer, why: str) -> None:
    for how, after, power_cut in cuts(disk):
        try:
            asyncio.run(verify(after, writer, power_cut=power_cut))
        except BaseException as error:
            raise AssertionError(f"{why}, {how}: {error!r}") from error


def some(total: int, kind: DiskFault, every: int) -> range:
    """Every call, or in a short run every few: other ones for each kind of fault."""
    return range(total) if SOAK else range(list(DiskFault).index(kind) % every, total, every)


@pytest.mark.parametrize("is_quick", [False, True])
def test_without_a_fault_everything_is_there(is_quick: bool) -> None:
    disk, writer = run_with(None, is_quick=is_quick)
    assert {"allocate", "write_at", "write_durably_at", "datasync", "rename", "unlink"} <= set(disk.calls)
    assert all(not write.failed for life in writer.lives.values() for write in life.writes)
    verify_all(disk, writer, "no fault")
    disk, writer = run_with(None, work_and_close, is_quick=is_quick)
    verify_all(disk, writer, "closed")


@pytest.mark.parametrize("is_quick", [False, True])
@pytest.mark.parametrize("kind", spread(CRASHES), ids=fault_name)
def test_a_crash_at_any_call_loses_nothing_and_invents_nothing(kind: DiskFault, is_quick: bool) -> None:
    total = len(run_with(None, work_and_close, is_quick=is_quick)[0].calls)
    for call in some(total, kind, 23):
        disk, writer = run_with(PlannedFault(call=call, kind=kind), work_and_close, is_quick=is_quick)
        verify_all(disk, writer, f"{kind.name} at call {call} ({disk.calls[-1]})")


@pytest.mark.parametrize("is_quick", [False, True])
@pytest.mark.parametrize("kind", spread(FAULTS), ids=fault_name)
def test_a_fault_at_any_call_fails_what_it_hits_and_nothing_comes_back(
    kind: DiskFault, is_quick: bool
) -> None:
    total = len(run_with(None, is_quick=is_quick)[0].calls)
    for call in some(total, kind, 29):
        disk, writer = run_with(PlannedFault(call=call, kind=kind), is_quick=is_quick)
        verify_all(disk, writer, f"{kind.name} at call {call} ({disk.calls[call]})")


@pytest.mark.parametrize("kind", spread([*CRASHES, *FAULTS]), ids=fault_name)
def test_a_fault_at_any_call_of_a_recovery_changes_nothing(kind: DiskFault) -> None:
    """Crash while it was working; start, with a fault at a call of the start; start again."""
    total = len(run_with(None, work_and_close)[0].calls)
    for call in range(total // 3, total, total // (20 if SOAK else 3)):
        disk, writer = run_with(PlannedFault(call=call, kind=DiskFault.CRASH_BEFORE), work_and_close)
        survivors = [lambda disk=disk: disk.crash(Survival.EVERYTHING)]
        survivors += [lambda disk=disk: disk.crash(Survival.RANDOM, random.Random(1))]
        for number, survivor in enumerate(survivors):
            why = f"crash at call {call}, way {number}, then {kind.name}"
            try:
                _sweep_recovery(survivor, writer, kind)
            except AssertionError as error:
                raise AssertionError(f"{why} {error}") from error


def _sweep_recovery(survivor: Callable[[], FakeDisk], writer: Writer, kind: DiskFault) -> None:
    clock = writer.world.clock

    async def opened(disk: FakeDisk) -> dict[str, object]:
        engine = await World(disk=disk, clock=clock, **CONFIG).open()
        assert engine.problems == []
        return await picture(engine)

    wanted = asyncio.run(opened(survivor()))
    whole = survivor()
    asyncio.run(opened(whole))
    for step in some(len(whole.calls), kind, 9):
        disk = survivor()
        disk.plan = PlannedFault(call=step, kind=kind)
        with contextlib.suppress(PowerCut, PenstockError):
            asyncio.run(opened(disk))
        disk.plan = None
        for survival in (Survival.EVERYTHING, Survival.NOTHING):
            again = disk.crash(survival)
            assert asyncio.run(opened(again)) == wanted, f"at call {step} of the start, {survival.name}"
            disk = again


def test_a_checkpoint_that_failed_with_an_unknown_outcome_harms_nothing_later() -> None:
    """1. the sync of a directory fails; 2. records are deleted; 3. the next checkpoint is cut off."""
    clean = run_with(None)[0].calls
    marks = [n for n, name in enumerate(clean) if name == "sync_dir" and clean[n - 1] == "rename"]
    for unknown in marks[:: 1 if SOAK else 8]:
        for later in range(1, 60, 1 if SOAK else 17):
            clock = ManualClock()
            world = World(disk=FakeDisk(clock=clock), clock=clock, **CONFIG)
            writer = Writer(world)
            world.disk.plan = PlannedFault(call=unknown, kind=DiskFault.FAIL_ONCE)
            second = PlannedFault(call=unknown + later, kind=DiskFault.CRASH_BEFORE)
            _switching(world.disk, unknown, second)
            run_until_power_cut(work(world, writer))
            verify_all(world.disk, writer, f"sync {unknown} failed, crash {later} later")


def _switching(disk: FakeDisk, first: int, second: PlannedFault) -> None:
    """Plan the second fault as soon as the first has struck."""
    inject = disk._inject

    def watched(plan: PlannedFault, number: int, name: str, path: str) -> None:
        if number == first:
            disk.plan = second
        inject(plan, number, name, path)

    disk._inject = watched  # type: ignore[method-assign]


def test_a_topic_that_is_not_there_is_not_there() -> None:
    async def look() -> None:
        engine = await World(**CONFIG).open()
        with pytest.raises(TopicNotFound):
            await engine.diff("f")
        await engine.close()

    asyncio.run(look())
