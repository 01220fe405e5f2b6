"""Seeded runs of the whole buffer on a virtual clock: stalls past the grace period, clocks an hour apart.

PENSTOCK_SEEDS sets the number of seeds. PENSTOCK_SEED selects one: the message of a failure names both.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter

import pytest
from _pytest.mark import ParameterSet
from tests.simulation.world import HOUR_MS, World

from penstock.testing import DEFAULT_RATES, FaultKind, FaultPlan, Simulation, run_simulation

SEEDS = int(os.environ.get("PENSTOCK_SEEDS", "2400"))
ONE_SEED = os.environ.get("PENSTOCK_SEED")
CHUNKS = 1 if ONE_SEED else 24
HORIZON_S = 30 * 24 * 3600.0
RATES = {**DEFAULT_RATES, FaultKind.STALL_BEFORE: 0.01, FaultKind.STALL_AFTER: 0.01}


async def live(sim: Simulation) -> tuple[str, World]:
    """Run a period with faults, then a period without."""
    rng = sim.rng
    plan = FaultPlan.random(RATES, stall_s=(20.0, 4000.0))
    world = World(sim, plan)

    def skew() -> int:
        return rng.choice([0, 0, -HOUR_MS, HOUR_MS, rng.randint(-HOUR_MS, HOUR_MS)])

    async def producers(name: str) -> None:
        for life in range(rng.randint(1, 3)):
            await asyncio.sleep(rng.uniform(0, 60))
            await world.produce(f"{name}{life}", skew(), rng.randint(1, 5))

    async def consumers() -> None:
        # Some end before the next starts, some are fenced by it.
        running: list[asyncio.Task[None]] = []
        for life in range(rng.randint(1, 4)):
            until_s = sim.loop.time() + rng.choice([rng.uniform(5, 60), rng.uniform(60, 1200)])
            running.append(asyncio.create_task(world.consume(f"consumer{life}", skew(), until_s)))
            await asyncio.sleep(rng.uniform(1, 150))
        await asyncio.gather(*running)

    async def queries() -> None:
        own = sim.child_rng("queries")
        await asyncio.sleep(own.uniform(0, 60))
        await world.transact("query", own.choice([0, -HOUR_MS, HOUR_MS]), own.randint(0, 3))

    names = ["alpha", "beta", "gamma"][: rng.randint(1, 3)]
    await asyncio.gather(consumers(), queries(), *(producers(name) for name in names))
    plan.quiet()
    for store in world.stores:
        await store.settle()
    await world.consume("last", 0, None)
    world.check_totals()
    return sim.trace_hash(), world


def run(seed: int) -> tuple[str, World]:
    # Re-uploading what waited long is politeness towards other collectors. Every other seed goes without it,
    # so that the floor alone has to carry the promise.
    with pytest.MonkeyPatch.context() as patch:
        if seed % 2:
            patch.setattr("penstock.buffer.upload.STALE_AFTER_S", float("inf"))
        return run_simulation(live, seed=seed, horizon_s=HORIZON_S)


def test_the_same_seed_gives_the_same_trace() -> None:
    for seed in range(5):
        assert run(seed)[0] == run(seed)[0]
    assert run(1)[0] != run(2)[0]


def chunks() -> list[ParameterSet]:
    """Return the chunks of seeds. Half of them are for the long tests."""
    return [pytest.param(one, marks=pytest.mark.long if one % 2 else ()) for one in range(CHUNKS)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("chunk", chunks())
def test_nothing_is_lost_duplicated_or_leaked_on_any_seed(chunk: int) -> None:
    seen: Counter[str] = Counter()
    seeds = [int(ONE_SEED)] if ONE_SEED else range(chunk, SEEDS, CHUNKS)
    for seed in seeds:
        try:
            _, world = run(seed)
        except BaseException as error:
            error.add_note(f"replay: PENSTOCK_SEED={seed} pytest tests/simulation -k any_seed")
            raise
        seen["runs"] += 1
        seen["acked"] += len(world.acked)
        seen["unknown"] += len(world.unknown)
        seen["refused"] += len(world.refused)
        seen["fenced"] += world.fenced
        seen["committed"] += world.committed
        seen["repeated"] += world.repeated
        seen["reuploads"] += int(world.reuploads)
        seen["collected"] += int(world.collected)
        for kind, count in world.plan.injected.items():
            seen[f"fault {kind}"] += count
    print(dict(seen))
    if not ONE_SEED and len(seeds) >= 50:
        # A run in which nothing interesting happens shows nothing.
        assert all(seen[name] for name in ("acked", "fenced", "reuploads", "collected", "repeated")), seen
