"""Simulation of whole programs on a seeded loop and a virtual clock: the same seed gives the same run."""

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
    """A machine's clock: virtual time with an error of `skew_ms`, which may change during the run."""

    def __init__(self, loop: SimLoop, *, base_ms: int = _BASE_MS, skew_ms: int = 0) -> None:
        self._loop = loop
        self._base_ms = base_ms
        self.skew_ms = skew_ms

    def now_ms(self) -> int:
        # Round by microseconds: the sum of many short sleeps must not lose a millisecond.
        return self._base_ms + round(self._loop.time() * 1e6) // 1000 + self.skew_ms

    def monotonic(self) -> float:
        return self._loop.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Simulation:
    """The environment of a simulated program: randomness, clocks, the loop and a trace."""

    def __init__(self, loop: SimLoop) -> None:
        self.loop = loop
        self.rng = random.Random(f"{loop.seed}/program")
        self.events: list[tuple[float, str]] = []

    @property
    def seed(self) -> int | str:
        return self.loop.seed

    def clock(self, skew_ms: int = 0) -> SimClock:
        """Create the clock of a machine. Wall time is a fixed date plus virtual time plus the skew."""
        return SimClock(self.loop, skew_ms=skew_ms)

    def child_rng(self, name: str) -> random.Random:
        """Create a random stream for one actor, which is independent of the draws of others."""
        return random.Random(f"{self.loop.seed}/{name}")

    def trace(self, event: str) -> None:
        """Record an event at the current virtual time."""
        self.events.append((self.loop.time(), event))

    def trace_hash(self) -> str:
        """Return the digest of the trace and the number of steps so far. Equal seeds give equal digests."""
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
    """Run `main(sim)` on a fresh `SimLoop` and return its result.

    Cancel remaining tasks, oldest first, and close the loop. This must not be called from inside an event
    loop.

    Raise the error of `main` with a note that names the seed. Raise `Deadlock` if it cannot finish, and
    `HorizonReached` if it takes too long. Raise an `ExceptionGroup` if `main` succeeds but the error of a
    task or callback was never retrieved.
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
        raise BaseExceptionGroup(f"seed {seed}: errors that were never retrieved", loop.unhandled)
    return result


async def _as_coroutine(main: Callable[[Simulation], Awaitable[_T]], sim: Simulation) -> _T:
    return await main(sim)


def _cancel_leftovers(loop: SimLoop) -> None:
    """Cancel tasks until none is left. The cleanup of a task may start others, which are cancelled too."""
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
    """Wait for cancelled tasks, and pass their errors to the loop's handler as asyncio.run does."""
    # `gather` keeps the given order; `wait` would iterate over a set, whose order may differ.
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    for task, outcome in zip(tasks, outcomes, strict=True):
        if isinstance(outcome, Exception):
            asyncio.get_running_loop().call_exception_handler(
                {"message": f"error while {task.get_name()} was being cancelled", "exception": outcome}
            )
