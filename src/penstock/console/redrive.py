"""Redrives of dead letters from the console. Each runs the command in a child process, one per pipeline."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from penstock.clock import Clock
from penstock.console.app import Call, json_answer, read_body
from penstock.console.live import LiveHub
from penstock.console.pipelines_panel import position_of
from penstock.console.sources import Sources
from penstock.errors import Conflict, InvalidInput
from penstock.http import Response
from penstock.up import CommandOutcome, run_command

_POSITIONS_MAX: Final = 1000
_REASON_MAX: Final = 1000
_JOBS_KEPT: Final = 20
_LINES_KEPT: Final = 50
_RESULT: Final = msgspec.json.Decoder(dict[str, object])


class _Order(msgspec.Struct, forbid_unknown_fields=True):
    confirm: bool = False
    positions: list[str] | None = None
    reason: str | None = None


_ORDER: Final = msgspec.json.Decoder(_Order)


@dataclass(slots=True, kw_only=True)
class Job:
    """A redrive that was started in the console."""

    id: int
    pipeline: str
    started_ms: int
    positions: Sequence[str]
    state: str = "running"
    ended_ms: int | None = None
    result: dict[str, object] | None = None
    error: str | None = None
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_LINES_KEPT))

    def fields(self) -> dict[str, object]:
        """Return the job as the API shows it."""
        return {
            "id": self.id,
            "pipeline": self.pipeline,
            "state": self.state,
            "started_ms": self.started_ms,
            "ended_ms": self.ended_ms,
            "positions": list(self.positions),
            "result": self.result,
            "error": self.error,
            "lines": list(self.lines),
        }


def redrive_arguments(file: str, positions: Sequence[str], reason: str | None) -> list[str]:
    """Return the command line. A value is never mistaken for an option. Pure."""
    selected = [f"--position={position}" for position in positions]
    filters = [] if reason is None else [f"--reason={reason}"]
    return ["redrive", "--json", *selected, *filters, "--", file]


def why_failed(outcome: CommandOutcome) -> str:
    """Return the error of a redrive. The output of a killed command is not the reason. Pure."""
    code = outcome.exit_code
    if code < 0:
        return f"the command was killed by signal {-code}; the next redrive finishes its work"
    return outcome.errors or f"the command ended with exit code {code}"


class RedrivePanel:
    """Handlers for redrives, and the jobs that they have started."""

    def __init__(self, sources: Sources, live: LiveHub) -> None:
        self._sources = sources
        self._clock: Clock = sources.clock
        self._live = live
        self._jobs: dict[str, deque[Job]] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._begun = 0

    async def close(self) -> None:
        """Stop the running jobs. The next redrive finishes an interrupted one."""
        for task in list(self._running.values()):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def index(self, call: Call) -> Response:
        self._sources.refresh()
        self._sources.pipeline(call.name)
        return json_answer([job.fields() for job in self._jobs.get(call.name, ())])

    async def begin(self, call: Call) -> Response:
        self._sources.refresh()
        place = self._sources.pipeline(call.name).place
        order = read_body(call, _ORDER)
        if not order.confirm:
            raise InvalidInput("a redrive changes the queue: send confirm: true to proceed")
        positions = order.positions or []
        if order.positions is not None and not 1 <= len(positions) <= _POSITIONS_MAX:
            raise InvalidInput(f"positions: expected 1 to {_POSITIONS_MAX}, or none for all letters")
        for position in positions:
            if (position_of(position or "-") or (0, 0, -1))[2] < 0:
                raise InvalidInput(f"{position[:60]!r} is a gap in the queue: there is no record to redrive")
        if order.reason is not None and not 1 <= len(order.reason) <= _REASON_MAX:
            raise InvalidInput(f"reason: expected 1 to {_REASON_MAX} characters")
        if "\0" in (order.reason or ""):
            raise InvalidInput("reason: NUL characters are not allowed")
        if place.name in self._running:
            raise Conflict(f"a redrive of {place.name} is running; wait for its end")
        self._begun += 1
        job = Job(id=self._begun, pipeline=place.name, started_ms=self._clock.now_ms(), positions=positions)
        self._jobs.setdefault(place.name, deque(maxlen=_JOBS_KEPT)).appendleft(job)
        arguments = redrive_arguments(place.file, positions, order.reason)
        task = asyncio.get_running_loop().create_task(self._run(job, arguments))
        self._running[place.name] = task
        self._live.push("redrive", job.fields())
        return json_answer(job.fields(), 202)

    async def _run(self, job: Job, arguments: Sequence[str]) -> None:
        def on_line(line: str) -> None:
            job.lines.append(line[:500])
            self._live.push("redrive", job.fields())

        try:
            outcome = await run_command(arguments, on_line, self._sources.environment)
            job.state = "done" if outcome.exit_code == 0 else "failed"
            if outcome.exit_code == 0:
                with contextlib.suppress(msgspec.MsgspecError):
                    job.result = _RESULT.decode(outcome.output.strip())
            else:
                job.error = why_failed(outcome)
        except BaseException as error:
            job.state, job.error = "failed", str(error) or "it was interrupted; the next redrive finishes it"
            raise
        finally:
            job.ended_ms = self._clock.now_ms()
            del self._running[job.pipeline]
            self._live.push("redrive", job.fields())
