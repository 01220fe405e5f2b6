"""Whole programs on one seeded loop and one virtual clock: same seed, same run."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from penstock.testing.sim_loop import Deadlock, HorizonReached, SimLoop, SimulationError

__all__ = [
    "Deadlock",
    "HorizonReached",
    "SimClock",
    "SimLoop",
    "Simulation",
    "SimulationError",
    "run_simulation",
]

_T = TypeVar("_T")
_BASE_MS = 1_700_000_000_000
_CLEANUP_ROUNDS = 100
_CLEANUP_S = 86_400.0
_CLEANUP_STEPS = 1_000_000


class SimClock:
    """One machine's clock: virtual time, off by `skew_ms`, which may be changed during the run."""

    def __init__(self, loop: SimLoop, *, base_ms: int = _BASE_MS, skew_ms: int = 0) -> None:
        self._loop = loop
        self._base_ms = base_ms
        self.skew_ms = skew_ms

    def now_ms(self) -> int:
        # Through microseconds: the sum of many short sleeps must not fall one millisecond short.
        return self._base_ms + round(self._loop.time() * 1e6) // 1000 + self.skew_ms

    def monotonic(self) -> float:
        return self._loop.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Simulation:
    """What a simulated program gets: randomness, clocks, the loop and a trace."""

    def __init__(self, loop: SimLoop) -> None:
        self.loop = loop
        self.rng = random.Random(f"{loop.seed}/program")
        self.events: list[tuple[float, str]] = []

    @property
    def seed(self) -> int | str:
        return self.loop.seed

    def clock(self, skew_ms: int = 0) -> SimClock:
        """A new machine's clock. Wall time is a fixed date plus virtual time plus the skew."""
        return SimClock(self.loop, skew_ms=skew_ms)

    def child_rng(self, name: str) -> random.Random:
        """A stream of its own for one actor, so that what others draw does not change it."""
        return random.Random(f"{self.loop.seed}/{name}")

    def trace(self, event: str) -> None:
        """Note an event at the current virtual time."""
        self.events.append((self.loop.time(), event))

    def trace_hash(self) -> str:
        """A digest of the trace and the number of steps so far; equal for equal seeds."""
        digest = hashlib.sha256()
        for at_s, text in self.events:
            digest.update(f"{at_s!r} {text}\n".encode())
        digest.update(str(self.loop.steps).encode())
        return digest.hexdigest()


def run_simulation(
    main: Callable[[Simulation], Awaitable[_T]],
    *,
    seed: int | str,
    horizon_s: float,
    shuffle: bool = True,
    steps_max: int = 20_000_000,
) -> _T:
    """Run `main(sim)` to its end on a fresh `SimLoop` and return its result.

    Tasks that `main` leaves behind are cancelled, oldest first, and the loop is closed. Raises what
    `main` raises, with a note that names the seed; `Deadlock` or `HorizonReached` when it cannot
    finish or takes too long; and an `ExceptionGroup` when `main` succeeds although an error in a
    task or callback reached nobody.
    Must be called from plain code, not from inside an event loop.
    """
    loop = SimLoop(seed, shuffle=shuffle, horizon_s=horizon_s, steps_max=steps_max)
    try:
        loop.check_can_run()
        result = loop.run_until_complete(_as_coroutine(main, Simulation(loop)))
    except Exception as error:
        error.add_note(f"in the simulation with seed {seed!r}")
        raise
    finally:
        try:
            _cancel_leftovers(loop)
            loop.report_unheard()
        finally:
            loop.close()
    if loop.unhandled:
        raise BaseExceptionGroup(f"seed {seed}: errors that reached nobody", loop.unhandled)
    return result


async def _as_coroutine(main: Callable[[Simulation], Awaitable[_T]], sim: Simulation) -> _T:
    return await main(sim)


def _cancel_leftovers(loop: SimLoop) -> None:
    """Cancel until nothing is left; cleaning up may start new tasks, which are cancelled in turn."""
    loop.horizon_s = loop.time() + _CLEANUP_S
    loop.steps_max = loop.steps + _CLEANUP_STEPS
    for _ in range(_CLEANUP_ROUNDS):
        leftovers = loop.pending_tasks()
        if not leftovers and not loop.has_generators:
            return
        if not leftovers:
            loop.run_until_complete(loop.shutdown_asyncgens())
            continue
        for task in leftovers:
            task.cancel()
        loop.run_until_complete(_collect(leftovers))
    raise SimulationError(f"seed {loop.seed}: tasks keep starting others while being cancelled")


async def _collect(tasks: list[asyncio.Task[object]]) -> None:
    """Wait for cancelled tasks, handing their errors to the loop's handler as asyncio.run does."""
    # `gather` keeps the given order; `wait` would go through a set, whose order is not ours.
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    for task, outcome in zip(tasks, outcomes, strict=True):
        if isinstance(outcome, Exception):
            asyncio.get_running_loop().call_exception_handler(
                {"message": f"error while {task.get_name()} was being cancelled", "exception": outcome}
            )
