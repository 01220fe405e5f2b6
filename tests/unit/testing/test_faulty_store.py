from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from penstock.errors import Conflict, NotFound, OutcomeUnknown, PenstockError, Unavailable
from penstock.objects.memory import MemoryStore
from penstock.objects.store import ByteRange, ObjectStore, Version
from penstock.testing import (
    FAULTS_OF,
    FaultKind,
    FaultPlan,
    FaultyStore,
    ListingJournal,
    ManualClock,
    Simulation,
    run_simulation,
)
from penstock.testing.faulty_store import StoreOp

NOTHING = Version(etag="no such version")


class Rig:
    """A faulty store over a memory store, holding the object `k` = b"old"."""

    def __init__(self, plan: FaultPlan) -> None:
        self.clock = ManualClock()
        self.inner = MemoryStore(clock=self.clock)
        self.store = FaultyStore(self.inner, clock=self.clock, rng=random.Random(1), plan=plan)

    async def seeded(self) -> Version:
        return await self.inner.put("k", b"old")

    async def now(self) -> bytes | None:
        """Return the stored bytes, regardless of the results that callers got."""
        try:
            return bytes((await self.inner.get("k")).data)
        except NotFound:
            return None


async def _put_if_match(rig: Rig) -> Version:
    return await rig.store.put_if_match("k", b"new", await rig.seeded())


async def _put_if_absent(rig: Rig) -> Version:
    return await rig.store.put_if_absent("k", b"new")


async def _put(rig: Rig) -> Version:
    return await rig.store.put("k", b"new")


CONDITIONAL = pytest.mark.parametrize("write", [_put_if_match, _put_if_absent])
Write = Callable[[Rig], Awaitable[Version]]


def test_the_faulty_store_is_an_object_store() -> None:
    assert isinstance(Rig(FaultPlan.none()).store, ObjectStore)


async def test_without_faults_every_call_passes_through_and_is_logged() -> None:
    rig = Rig(FaultPlan.none())
    version = await rig.store.put_if_absent("a/k", [b"he", b"llo"])
    blob = await rig.store.get("a/k")
    assert (bytes(blob.data), blob.version) == (b"hello", version)
    assert bytes((await rig.store.get("a/k", ByteRange(start=None, length=2))).data) == b"lo"
    assert await rig.store.get_if_changed("a/k", version) is None
    assert (await rig.store.head("a/k")).size == 5
    await rig.store.put_if_match("a/k", b"", version)
    assert [info.key for info in await rig.store.list("a")] == ["a/k"]
    assert await rig.store.delete_many(["a/k"]) == {}
    with pytest.raises(NotFound):
        await rig.store.head("a/k")
    assert [tuple(call) for call in rig.store.calls] == [
        (0, "put_if_absent", "a/k"),
        (1, "get", "a/k"),
        (2, "get", "a/k"),
        (3, "get_if_changed", "a/k"),
        (4, "head", "a/k"),
        (5, "put_if_match", "a/k"),
        (6, "list", "a"),
        (7, "delete_many", "a/k"),
        (8, "head", "a/k"),
    ]
    assert not rig.store.injected
    await rig.store.close()


@CONDITIONAL
@pytest.mark.parametrize(
    ("kind", "error", "applied"),
    [
        (FaultKind.REFUSED, Unavailable, False),
        (FaultKind.FAILED_BEFORE, OutcomeUnknown, False),
        (FaultKind.THROTTLED, OutcomeUnknown, False),
        (FaultKind.NOT_DECIDED, Conflict, False),
        (FaultKind.APPLIED_THEN_LOST, OutcomeUnknown, True),
        (FaultKind.OWN_CONFLICT, Conflict, True),
    ],
)
async def test_a_conditional_write_meets_a_fault(
    write: Write, kind: FaultKind, error: type[PenstockError], *, applied: bool
) -> None:
    rig = Rig(FaultPlan.at(0, kind))
    with pytest.raises(error, match=kind.value):
        await write(rig)
    assert (await rig.now() == b"new") is applied
    assert rig.store.injected == {kind: 1}


@pytest.mark.parametrize(
    ("kind", "applied"),
    [
        (FaultKind.FAILED_BEFORE, False),
        (FaultKind.THROTTLED, False),
        (FaultKind.APPLIED_THEN_LOST, True),
    ],
)
async def test_a_plain_put_is_unavailable_because_it_may_be_repeated(
    kind: FaultKind, *, applied: bool
) -> None:
    rig = Rig(FaultPlan.at(0, kind))
    with pytest.raises(Unavailable):
        await _put(rig)
    assert (await rig.now() == b"new") is applied


@pytest.mark.parametrize(
    ("kind", "applied"), [(FaultKind.FAILED_BEFORE, False), (FaultKind.APPLIED_THEN_LOST, True)]
)
async def test_a_delete_reports_each_key(kind: FaultKind, *, applied: bool) -> None:
    rig = Rig(FaultPlan.at(0, kind))
    await rig.seeded()
    failed = await rig.store.delete_many(["k", "other"])
    assert {key: type(error) for key, error in failed.items()} == {"k": Unavailable, "other": Unavailable}
    assert (await rig.now() is None) is applied


async def test_a_lost_response_hides_a_conflict_too() -> None:
    rig = Rig(FaultPlan.at(0, FaultKind.APPLIED_THEN_LOST))
    await rig.seeded()
    with pytest.raises(OutcomeUnknown):
        await rig.store.put_if_match("k", b"new", NOTHING)
    assert await rig.now() == b"old"


@CONDITIONAL
async def test_a_late_write_is_unknown_immediately_and_wins_without_a_competitor(write: Write) -> None:
    rig = Rig(FaultPlan.at(0, FaultKind.LATE_LANDING))
    with pytest.raises(OutcomeUnknown):
        await write(rig)
    assert await rig.now() != b"new"
    assert rig.store.under_way == 1
    await rig.clock.advance(30)
    assert await rig.now() == b"new"
    assert (rig.store.late_won, rig.store.late_lost, rig.store.under_way) == (1, 0, 0)


@CONDITIONAL
async def test_a_late_write_loses_against_an_earlier_write(write: Write) -> None:
    rig = Rig(FaultPlan.at(0, FaultKind.LATE_LANDING))
    with pytest.raises(OutcomeUnknown):
        await write(rig)
    await rig.inner.put("k", b"other")
    await rig.clock.advance(30)
    assert await rig.now() == b"other"
    assert (rig.store.late_won, rig.store.late_lost) == (0, 1)


async def test_a_late_write_carries_the_bytes_of_the_call() -> None:
    rig = Rig(FaultPlan.at(0, FaultKind.LATE_LANDING))
    buffer = bytearray(b"new")
    with pytest.raises(Unavailable):
        await rig.store.put("k", buffer)
    buffer[:] = b"xxx"
    settled = asyncio.create_task(rig.store.settle())
    await rig.clock.advance(30)
    await settled
    assert await rig.now() == b"new"


async def test_closing_cancels_late_writes() -> None:
    rig = Rig(FaultPlan.at(0, FaultKind.LATE_LANDING))
    with pytest.raises(Unavailable):
        await _put(rig)
    await rig.store.close()
    await rig.clock.advance(60)
    assert await rig.now() is None


@pytest.mark.parametrize(
    ("kind", "applied_meanwhile"), [(FaultKind.STALL_BEFORE, False), (FaultKind.STALL_AFTER, True)]
)
async def test_a_stalled_write_succeeds_in_the_end(kind: FaultKind, *, applied_meanwhile: bool) -> None:
    rig = Rig(FaultPlan.at(0, kind))
    write = asyncio.create_task(_put_if_absent(rig))
    await rig.clock.advance(59)
    assert not write.done()
    assert (await rig.now() == b"new") is applied_meanwhile
    await rig.clock.advance(7200)
    await write
    assert await rig.now() == b"new"


@pytest.mark.parametrize("kind", [FaultKind.FAILED_BEFORE, FaultKind.THROTTLED, FaultKind.CUT_SHORT])
async def test_a_failed_read_is_unavailable(kind: FaultKind) -> None:
    rig = Rig(FaultPlan.at(0, kind))
    await rig.seeded()
    with pytest.raises(Unavailable):
        await rig.store.get("k")
    assert bytes((await rig.store.get("k")).data) == b"old"


async def test_a_truncated_read_returns_only_the_first_bytes() -> None:
    for call in ("get", "get_if_changed"):
        rig = Rig(FaultPlan.at(0, FaultKind.TRUNCATED))
        await rig.seeded()
        blob = await (rig.store.get("k") if call == "get" else rig.store.get_if_changed("k", NOTHING))
        assert blob is not None
        assert len(blob.data) < 3
        assert b"old".startswith(bytes(blob.data))


async def test_a_stale_listing_lacks_new_keys_and_shows_deleted_ones() -> None:
    plan = FaultPlan.at(3, FaultKind.STALE_LIST)
    rig = Rig(plan)
    await rig.store.put("a/gone", b"1")
    await rig.clock.advance(plan.stale_window_s + 1)
    await rig.store.put("a/new", b"2")
    await rig.store.delete_many(["a/gone"])
    assert [info.key for info in await rig.store.list("a")] == ["a/gone"]
    assert [info.key for info in await rig.store.list("a")] == ["a/new"]


async def test_a_stale_listing_stays_within_its_prefix() -> None:
    rig = Rig(FaultPlan.at(2, FaultKind.STALE_LIST))
    await rig.inner.put("b/other", b"")
    await rig.store.put("a/new", b"")
    await rig.store.delete_many(["b/other"])
    assert await rig.store.list("a") == []


async def test_stores_sharing_a_journal_are_stale_about_each_other() -> None:
    clock, journal = ManualClock(), ListingJournal()
    inner = MemoryStore(clock=clock)
    writer = FaultyStore(inner, clock=clock, rng=random.Random(1), plan=FaultPlan.none(), journal=journal)
    reader = FaultyStore(
        inner,
        clock=clock,
        rng=random.Random(2),
        plan=FaultPlan.at(0, FaultKind.STALE_LIST),
        journal=journal,
    )
    await writer.put("a/new", b"")
    assert await reader.list("") == []


async def test_a_fault_that_does_not_apply_to_the_call_is_not_injected() -> None:
    rig = Rig(FaultPlan.at(0, FaultKind.OWN_CONFLICT))
    await _put(rig)
    assert not rig.store.injected


async def test_a_quiet_plan_injects_nothing_until_it_resumes() -> None:
    rig = Rig(FaultPlan.random({FaultKind.FAILED_BEFORE: 1.0}, latency_s=(0, 0)))
    with pytest.raises(Unavailable):
        await _put(rig)
    rig.store.plan.quiet()
    for _ in range(100):
        await _put(rig)
    rig.store.plan.resume()
    with pytest.raises(Unavailable):
        await _put(rig)
    assert rig.store.injected == {FaultKind.FAILED_BEFORE: 2}


def test_rates_must_be_probabilities() -> None:
    with pytest.raises(ValueError, match="add up"):
        FaultPlan.random({FaultKind.REFUSED: 0.6, FaultKind.THROTTLED: 0.6})
    with pytest.raises(ValueError, match="at least 0"):
        FaultPlan.random({FaultKind.REFUSED: -0.1})


@pytest.mark.parametrize("op", sorted(FAULTS_OF))
def test_random_faults_follow_their_rates_and_apply_to_the_call(op: StoreOp) -> None:
    rates = dict.fromkeys(FaultKind, 0.05)
    plan, rng = FaultPlan.random(rates), random.Random(5)
    for _ in range(4_000):
        plan.draw(op, "k", rng)
    assert set(plan.injected) == set(FAULTS_OF[op])
    assert all(120 < count < 280 for count in plan.injected.values())


@pytest.mark.parametrize("lands", [True, False])
async def test_a_write_of_a_cancelled_caller_may_land_later(*, lands: bool) -> None:
    rig = Rig(FaultPlan.random({}, latency_s=(10, 10), cancelled_lands=1.0 if lands else 0.0))
    write = asyncio.create_task(_put_if_absent(rig))
    await rig.clock.advance(0.001)
    write.cancel()
    await rig.clock.advance(60)
    assert write.cancelled()
    assert (await rig.now() == b"new") is lands


async def test_a_sweep_meets_a_fault_at_every_call() -> None:
    async def increment(store: ObjectStore) -> None:
        blob = await store.get("k")
        assert blob.version is not None
        await store.put_if_match("k", bytes(blob.data) + b"+", blob.version)

    dry = Rig(FaultPlan.none())
    await dry.seeded()
    await increment(dry.store)
    met = 0
    for call in dry.store.calls:
        for kind in set(FAULTS_OF[call.op]) - {FaultKind.STALL_BEFORE, FaultKind.STALL_AFTER}:
            rig = Rig(FaultPlan.at(call.number, kind))
            await rig.seeded()
            try:
                await increment(rig.store)
            except PenstockError:
                met += 1
            await rig.clock.advance(60)
            assert rig.store.injected == {kind: 1}
    assert met == 3 + 7


def _contended_counter(seed: int) -> tuple[str, int, int, int]:
    """Let ten tasks add to one object over a bad network, and compare their results with the stored value."""

    async def main(sim: Simulation) -> tuple[str, int, int, int]:
        clock = sim.clock()
        inner = MemoryStore(clock=clock)
        plan = FaultPlan.random()
        store = FaultyStore(inner, clock=clock, rng=sim.child_rng("store"), plan=plan)
        await inner.put("k", b"0")
        sure = unsure = 0

        async def add() -> None:
            nonlocal sure, unsure
            for _ in range(10):
                try:
                    blob = await store.get("k")
                    assert blob.version is not None
                    await store.put_if_match("k", str(int(bytes(blob.data)) + 1).encode(), blob.version)
                    sure += 1
                except (OutcomeUnknown, Conflict):
                    unsure += 1
                except Unavailable:
                    pass
                sim.trace(f"{sure} {unsure}")

        async with asyncio.TaskGroup() as group:
            for _ in range(10):
                group.create_task(add())
        await store.settle()
        final = int(bytes((await inner.get("k")).data))
        return sim.trace_hash(), sure, unsure, final

    return run_simulation(main, seed=seed, horizon_s=1e6)


@pytest.mark.parametrize("seed", range(10))
def test_a_simulation_over_a_faulty_store_repeats_exactly_and_loses_no_known_write(seed: int) -> None:
    first = _contended_counter(seed)
    _, sure, unsure, final = first
    assert sure <= final <= sure + unsure
    assert _contended_counter(seed) == first
