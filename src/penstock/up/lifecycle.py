"""The lifecycle of one part: its state, how events change it, and when it is restarted. Pure.

A part that ends unexpectedly is restarted with exponential backoff and full jitter, after at most a minute.
The failure count is reset once the part has been ready for a while. An exit code for which a restart does
not help makes the part `failed`. After a wrong setting, it is retried slowly, because the setting may be
corrected. After fencing or damage, it is not restarted.
"""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass, replace
from typing import Final

from penstock.child_process import Exit
from penstock.retry import RetryPolicy
from penstock.units import format_duration
from penstock.up.status import PartState

BACKOFF: Final = RetryPolicy(floor_s=0.5, ceiling_s=60.0)
HEALTHY_S: Final = 60.0
"""The failure count is reset after this time in the state ready."""
WRONG_AGAIN_S: Final = 60.0
"""The delay before a part with wrong settings is retried."""
SILENT_MAX_S: Final = 60.0
"""A part that was ready is killed if it does not respond for this long."""
MUTE_MAX_S: Final = 300.0
"""A part without a probe is killed if its heartbeat stops for this long.

This is longer than for a probe, because Spark's driver may pause for garbage collection.
"""
STARTING_MAX_S: Final = 1800.0
"""A part that is not ready after this time, and reports no progress, is killed. Spark may have to download
packages before it starts, and a database may have much to recover."""
NOT_READY_AFTER: Final = 2
"""How many consecutive probes must fail; a single one may fail on a busy machine."""

_REJECTED: Final = 2
_FENCED: Final = 4
_CORRUPT: Final = 5
_FAILED: Final = {
    _REJECTED: "its settings or its request are wrong",
    _FENCED: "another process has taken over",
    _CORRUPT: "stored bytes are damaged",
}
_RUNNING: Final = frozenset({PartState.STARTING, PartState.READY, PartState.NOT_READY})


class ProbeResult(enum.Enum):
    """The result of a probe."""

    READY = "ready"
    NOT_READY = "not_ready"
    """The part responds that it is not ready."""
    SILENT = "silent"
    """The part does not respond."""


class Action(enum.Enum):
    """The next action of the runner for a part."""

    NOTHING = "nothing"
    START = "start"
    KILL = "kill"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """The state of a part's process. Times are seconds of a monotonic clock."""

    state: PartState
    since_s: float
    started_s: float | None = None
    ready_s: float | None = None
    """The start of the current uninterrupted ready time."""
    silent_s: float | None = None
    """The time since which it has not responded, after it was ready."""
    begun_s: float | None = None
    """When it was started or last reported that it is not ready; None once it is ready."""
    heard_s: float | None = None
    """The time of its last heartbeat, if it sends heartbeats."""
    misses: int = 0
    """Consecutive failed probes."""
    failures: int = 0
    """Consecutive unexpected exits."""
    restarts: int = 0
    next_start_s: float | None = None
    """The time of its next start, if one is due."""

    @property
    def is_running(self) -> bool:
        return self.state in _RUNNING

    @property
    def is_over(self) -> bool:
        """Whether it has ended and will not be started again."""
        return self.state in (PartState.STOPPED, PartState.DISABLED)


def initial_state(now_s: float, *, enabled: bool = True) -> ProcessState:
    """Return the initial state of a part: due to start now, or disabled."""
    if not enabled:
        return ProcessState(state=PartState.DISABLED, since_s=now_s)
    return ProcessState(state=PartState.STARTING, since_s=now_s, next_start_s=now_s)


def on_start(process: ProcessState, now_s: float) -> ProcessState:
    """Return the state after its process was started."""
    return replace(
        _moved_to(process, PartState.STARTING, now_s),
        started_s=now_s,
        ready_s=None,
        silent_s=None,
        begun_s=now_s,
        heard_s=None,
        misses=0,
        next_start_s=None,
        restarts=process.restarts + (process.started_s is not None),
    )


def on_ready(process: ProcessState, now_s: float) -> ProcessState:
    """Return the state after it reported that it is ready."""
    return on_probe(process, ProbeResult.READY, now_s)


def on_heartbeat(process: ProcessState, now_s: float) -> ProcessState:
    """Return the state after a heartbeat, which does not mean that it is ready."""
    if not process.is_running:
        return process
    return replace(process, heard_s=now_s, begun_s=None if process.begun_s is None else now_s)


def on_trouble(process: ProcessState, now_s: float) -> ProcessState:
    """Return the state after it reported an error and its own restart."""
    if not process.is_running:
        return process
    process = replace(process, begun_s=now_s, heard_s=None)
    if process.state is PartState.STARTING:
        return process
    return replace(_moved_to(process, PartState.NOT_READY, now_s), ready_s=None)


def excuse_silence(process: ProcessState, now_s: float) -> ProcessState:
    """Restart the silence timeout: this process itself was suspended."""
    return replace(process, heard_s=None if process.heard_s is None else now_s)


def on_probe(process: ProcessState, answer: ProbeResult, now_s: float) -> ProcessState:
    """Return the state after a probe."""
    if not process.is_running:
        return process
    if answer is ProbeResult.READY:
        ready_s = process.ready_s if process.ready_s is not None else now_s
        process = replace(process, ready_s=ready_s, silent_s=None, begun_s=None, misses=0)
        return _moved_to(excuse_silence(process, now_s), PartState.READY, now_s)
    if process.state is PartState.STARTING:
        return replace(process, begun_s=now_s) if answer is ProbeResult.NOT_READY else process
    silent_s = None
    if answer is ProbeResult.SILENT:
        silent_s = process.silent_s if process.silent_s is not None else now_s
    process = replace(process, misses=process.misses + 1, silent_s=silent_s)
    if process.misses < NOT_READY_AFTER:
        return process
    return replace(_moved_to(process, PartState.NOT_READY, now_s), ready_s=None)


def on_exit(process: ProcessState, how: Exit, now_s: float, rng: random.Random) -> ProcessState:
    """Return the state after its process has ended."""
    if process.state in (PartState.STOPPING, PartState.STOPPED):
        return replace(_moved_to(process, PartState.STOPPED, now_s), ready_s=None, next_start_s=None)
    healthy = process.ready_s is not None and now_s - process.ready_s >= HEALTHY_S
    failures = 1 if healthy else process.failures + 1
    process = replace(process, failures=failures, ready_s=None, silent_s=None, misses=0)
    if how.code in _FAILED:
        again_s = now_s + WRONG_AGAIN_S if how.code == _REJECTED else None
        return replace(_moved_to(process, PartState.FAILED, now_s), next_start_s=again_s)
    wait_s = BACKOFF.wait_s(failures - 1, rng)
    return replace(_moved_to(process, PartState.RESTARTING, now_s), next_start_s=now_s + wait_s)


def on_stop_request(process: ProcessState, now_s: float) -> ProcessState:
    """Return the state after a stop request; the part is not restarted."""
    if process.state is PartState.DISABLED or process.state is PartState.STOPPED:
        return process
    running = process.is_running and process.next_start_s is None
    state = PartState.STOPPING if running or process.state is PartState.STOPPING else PartState.STOPPED
    return replace(_moved_to(process, state, now_s), next_start_s=None)


def try_again(process: ProcessState, now_s: float) -> ProcessState:
    """Start the part now if it waits for a restart or has failed."""
    if process.state in (PartState.RESTARTING, PartState.FAILED):
        return replace(process, next_start_s=now_s, failures=0)
    return process


def next_action(process: ProcessState, now_s: float) -> Action:
    """Return the next action of the runner."""
    if process.next_start_s is not None and now_s >= process.next_start_s:
        return Action.START
    return Action.KILL if hang_reason(process, now_s) else Action.NOTHING


def hang_reason(process: ProcessState, now_s: float) -> str:
    """Return why the part is considered hung and must be killed; empty if it is not."""
    if not process.is_running:
        return ""
    if process.silent_s is not None and now_s - process.silent_s >= SILENT_MAX_S:
        return "no longer responds and is killed"
    if process.begun_s is not None:
        is_late = now_s - process.begun_s >= STARTING_MAX_S
        return f"is not ready after {format_duration(STARTING_MAX_S)} and is killed" if is_late else ""
    if process.heard_s is not None and now_s - process.heard_s >= MUTE_MAX_S:
        return f"has been silent for {format_duration(MUTE_MAX_S)} and is killed"
    return ""


def failure_reason(how: Exit) -> str:
    """Return why a restart does not help after this exit; empty if it may help."""
    return _FAILED.get(how.code, "") if how.code is not None else ""


def _moved_to(process: ProcessState, state: PartState, now_s: float) -> ProcessState:
    return process if process.state is state else replace(process, state=state, since_s=now_s)
