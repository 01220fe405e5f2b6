"""Runs all parts of a machine: starts and restarts them, and stops them in data-flow order."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.ids import SYSTEM_RNG
from penstock.up.log import LogBuffer
from penstock.up.parts import Plan, stage_of
from penstock.up.runner import Runner
from penstock.up.status import (
    FleetEvent,
    FleetMap,
    Level,
    LogLine,
    PartKind,
    PartState,
    PartStatus,
)

OWN_NAME: Final = "up"
"""The fleet's name in its own log."""
_TICK_S: Final = 1.0


class Fleet:
    """The parts of a plan, as processes. Implements `FleetView`.

    `command` runs a part's arguments. `disabled` gives the reason why a part does not run, and how to enable
    it. `own` reports a part that runs in this process.
    """

    def __init__(
        self,
        plan: Plan,
        command: Sequence[str],
        *,
        disabled: Mapping[str, str] | None = None,
        clock: Clock = SYSTEM_CLOCK,
        rng: random.Random = SYSTEM_RNG,
    ) -> None:
        self._plan = plan
        self._clock = clock
        self.log_buffer = LogBuffer(clock=clock, secrets=plan.secrets)
        self._own: dict[str, PartStatus] = {}
        self._runners = [
            Runner(
                part,
                command,
                self.log_buffer,
                clock=clock,
                rng=rng,
                topics_address=self._topics_address,
                disabled_why=(disabled or {}).get(part.name),
            )
            for part in plan.parts
        ]

    @property
    def map(self) -> FleetMap:
        """Implement `FleetView.map`."""
        return self._plan.map

    def parts(self) -> Sequence[PartStatus]:
        """Implement `FleetView.parts`."""
        return [*(runner.status for runner in self._runners), *self._own.values()]

    def log(self, after: int = 0, limit: int = 200) -> Sequence[LogLine]:
        """Implement `FleetView.log`."""
        return self.log_buffer.lines(after, limit)

    def subscribe(self, listener: Callable[[FleetEvent], None]) -> Callable[[], None]:
        """Implement `FleetView.subscribe`."""
        return self.log_buffer.subscribe(listener)

    def own(self, status: PartStatus) -> None:
        """Report the status of a part that runs in this process."""
        self._own[status.name] = status
        self.log_buffer.changed(status)

    def not_ready(self) -> list[PartStatus]:
        """Return the parts that should be ready and are not."""
        fine = (PartState.READY, PartState.DISABLED)
        return [part for part in self.parts() if part.state not in fine]

    def say(self, text: str, level: Level = Level.INFO) -> None:
        """Log a line of the fleet itself."""
        self.log_buffer.say(OWN_NAME, level, text)

    def try_again(self) -> None:
        """Start all parts that have failed or wait to be restarted."""
        self.say("restarting every part that has failed")
        for runner in self._runners:
            runner.try_again()

    async def run(self, stop: asyncio.Event, hurry: asyncio.Event) -> None:
        """Run every part until `stop`, then stop them stage by stage. `hurry` stops the rest immediately.

        No process is left running, even if this coroutine is cancelled.
        """
        for status in self.parts():
            self.log_buffer.changed(status)
        living = [asyncio.create_task(runner.live()) for runner in self._runners]
        ticking = asyncio.create_task(self._tick())
        stopping = asyncio.create_task(stop.wait())
        try:
            await self._until(stopping, living)
            self.say("stopping: no new data is accepted; accepted data is delivered as far as possible")
            await self._drain(hurry)
            await asyncio.gather(*living)
        finally:
            for task in [*living, ticking, stopping]:
                task.cancel()
            await asyncio.gather(*living, ticking, stopping, return_exceptions=True)
            self.log_buffer.report_omitted()

    async def _until(self, stopping: asyncio.Task[bool], living: Sequence[asyncio.Task[None]]) -> None:
        """Wait for the stop. Raise the error of a runner, which is a bug in this program."""
        waiting = {stopping, *living}
        while stopping not in (await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED))[0]:
            for task in [task for task in living if task in waiting and task.done()]:
                task.result()
                waiting.discard(task)

    async def _drain(self, hurry: asyncio.Event) -> None:
        hurrying = asyncio.create_task(self._stop_all(hurry))
        try:
            for stage in sorted({stage_of(runner.plan.kind) for runner in self._runners}):
                members = [runner for runner in self._runners if stage_of(runner.plan.kind) == stage]
                await asyncio.gather(*(runner.stop(hurry) for runner in members))
        finally:
            hurrying.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await hurrying

    async def _stop_all(self, hurry: asyncio.Event) -> None:
        await hurry.wait()
        self.say("stopping immediately: unfinished work is repeated after the next start", Level.WARNING)
        await asyncio.gather(*(runner.stop(hurry) for runner in self._runners))

    async def _tick(self) -> None:
        while True:
            await self._clock.sleep(_TICK_S)
            self.log_buffer.report_omitted()

    def _topics_address(self) -> str | None:
        topics = [runner for runner in self._runners if runner.plan.kind is PartKind.TOPICS]
        return topics[0].address if topics else None
