"""The life of one part: what happens to it, the state it is in, and when it is started again. Pure.

A part that ends by itself is started again after a wait that grows with every failure in a row, up to a
minute, drawn with full jitter. One that has been ready for a while begins a new count. An exit code that
says that starting again changes nothing makes it `failed`: after a wrong setting it is tried again at a slow
pace, as the setting may be corrected; after it was fenced, or has found damage, it is left alone.
"""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass, replace
from typing import Final

from penstock.retry import RetryPolicy
from penstock.units import format_duration
from penstock.up.status import PartState

__all__ = [
    "BACKOFF",
    "Act",
    "Answer",
    "Exit",
    "Life",
    "answered",
    "ask_to_stop",
    "ended",
    "excused",
    "new_life",
    "next_act",
    "started",
    "told_alive",
    "told_ready",
    "told_trouble",
    "try_again",
    "why_failed",
    "why_killed",
]

BACKOFF: Final = RetryPolicy(floor_s=0.5, ceiling_s=60.0)
HEALTHY_S: Final = 60.0
"""Ready for so long, it is not failing in a row."""
WRONG_AGAIN_S: Final = 60.0
"""How soon a part is tried again whose settings were wrong."""
SILENT_MAX_S: Final = 60.0
"""A part that was ready and answers nothing for so long hangs, and is killed."""
MUTE_MAX_S: Final = 300.0
"""A part without a probe that has told that it lives, and then does not for so long, hangs.

Longer than for a probe: Spark's driver may stand still for a while to collect garbage.
"""
STARTING_MAX_S: Final = 1800.0
"""A part that is not ready after so long, and has not said that it is at it, hangs. Spark may have packages
to fetch before it starts, and a database much to read."""
NOT_READY_AFTER: Final = 2
"""Probes in a row that must fail: one may be lost to a busy moment."""

_REJECTED: Final = 2
_FENCED: Final = 4
_CORRUPT: Final = 5
_FAILED: Final = {
    _REJECTED: "its settings or its request are wrong",
    _FENCED: "another process has taken its place",
    _CORRUPT: "stored bytes are damaged",
}
_RUNNING: Final = frozenset({PartState.STARTING, PartState.READY, PartState.NOT_READY})


class Answer(enum.Enum):
    """What a probe found."""

    READY = "ready"
    NOT_READY = "not_ready"
    """It answers that it is not."""
    SILENT = "silent"
    """Nothing answers."""


class Act(enum.Enum):
    """What is to be done about a part."""

    NOTHING = "nothing"
    START = "start"
    KILL = "kill"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How a process ended. `signal` is the number that killed it."""

    code: int | None = None
    signal: int | None = None

    @classmethod
    def of(cls, returncode: int) -> Exit:
        """From the number that Python gives, which is negative for a signal."""
        return cls(signal=-returncode) if returncode < 0 else cls(code=returncode)

    def __str__(self) -> str:
        return f"killed by signal {self.signal}" if self.signal is not None else f"exit code {self.code}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """Where a part is in its life. Times are of a monotonic clock, in seconds."""

    state: PartState
    since_s: float
    started_s: float | None = None
    ready_s: float | None = None
    """Since when it is ready without a break."""
    silent_s: float | None = None
    """Since when it has answered nothing, after it was ready."""
    begun_s: float | None = None
    """When it last said that it is not ready yet, or else was started; None once it is ready."""
    heard_s: float | None = None
    """When it last told by itself that it lives, if it does that."""
    misses: int = 0
    """Probes that failed in a row."""
    failures: int = 0
    """How often in a row it has ended by itself."""
    restarts: int = 0
    next_start_s: float | None = None
    """When it is to be started, if it is to be."""

    @property
    def is_running(self) -> bool:
        return self.state in _RUNNING

    @property
    def is_over(self) -> bool:
        """Whether nothing runs and nothing is going to."""
        return self.state in (PartState.STOPPED, PartState.DISABLED)


def new_life(now_s: float, *, enabled: bool = True) -> Life:
    """A part that is to be started now, or never."""
    if not enabled:
        return Life(state=PartState.DISABLED, since_s=now_s)
    return Life(state=PartState.STARTING, since_s=now_s, next_start_s=now_s)


def started(life: Life, now_s: float) -> Life:
    """Its process runs."""
    return replace(
        _in(life, PartState.STARTING, now_s),
        started_s=now_s,
        ready_s=None,
        silent_s=None,
        begun_s=now_s,
        heard_s=None,
        misses=0,
        next_start_s=None,
        restarts=life.restarts + (life.started_s is not None),
    )


def told_ready(life: Life, now_s: float) -> Life:
    """It said itself that it does its work."""
    return answered(life, Answer.READY, now_s)


def told_alive(life: Life, now_s: float) -> Life:
    """It said itself that it lives, which is not to say that it is ready."""
    if not life.is_running:
        return life
    return replace(life, heard_s=now_s, begun_s=None if life.begun_s is None else now_s)


def told_trouble(life: Life, now_s: float) -> Life:
    """It said itself that something is in its way, and that it begins anew."""
    if not life.is_running:
        return life
    life = replace(life, begun_s=now_s, heard_s=None)
    if life.state is PartState.STARTING:
        return life
    return replace(_in(life, PartState.NOT_READY, now_s), ready_s=None)


def excused(life: Life, now_s: float) -> Life:
    """What it has not told up to now is not its silence: it had not to, or nobody has listened."""
    return replace(life, heard_s=None if life.heard_s is None else now_s)


def answered(life: Life, answer: Answer, now_s: float) -> Life:
    """A probe came back."""
    if not life.is_running:
        return life
    if answer is Answer.READY:
        ready_s = life.ready_s if life.ready_s is not None else now_s
        life = replace(life, ready_s=ready_s, silent_s=None, begun_s=None, misses=0)
        return _in(excused(life, now_s), PartState.READY, now_s)
    if life.state is PartState.STARTING:
        return replace(life, begun_s=now_s) if answer is Answer.NOT_READY else life
    silent_s = None
    if answer is Answer.SILENT:
        silent_s = life.silent_s if life.silent_s is not None else now_s
    life = replace(life, misses=life.misses + 1, silent_s=silent_s)
    if life.misses < NOT_READY_AFTER:
        return life
    return replace(_in(life, PartState.NOT_READY, now_s), ready_s=None)


def ended(life: Life, how: Exit, now_s: float, rng: random.Random) -> Life:
    """Its process is gone."""
    if life.state in (PartState.STOPPING, PartState.STOPPED):
        return replace(_in(life, PartState.STOPPED, now_s), ready_s=None, next_start_s=None)
    healthy = life.ready_s is not None and now_s - life.ready_s >= HEALTHY_S
    failures = 1 if healthy else life.failures + 1
    life = replace(life, failures=failures, ready_s=None, silent_s=None, misses=0)
    if how.code in _FAILED:
        again_s = now_s + WRONG_AGAIN_S if how.code == _REJECTED else None
        return replace(_in(life, PartState.FAILED, now_s), next_start_s=again_s)
    wait_s = BACKOFF.wait_s(failures - 1, rng)
    return replace(_in(life, PartState.RESTARTING, now_s), next_start_s=now_s + wait_s)


def ask_to_stop(life: Life, now_s: float) -> Life:
    """It is to end, and stays so."""
    if life.state is PartState.DISABLED or life.state is PartState.STOPPED:
        return life
    running = life.is_running and life.next_start_s is None
    state = PartState.STOPPING if running or life.state is PartState.STOPPING else PartState.STOPPED
    return replace(_in(life, state, now_s), next_start_s=None)


def try_again(life: Life, now_s: float) -> Life:
    """Start it now if it waits for that, or was left alone."""
    if life.state in (PartState.RESTARTING, PartState.FAILED):
        return replace(life, next_start_s=now_s, failures=0)
    return life


def next_act(life: Life, now_s: float) -> Act:
    """What is to be done now."""
    if life.next_start_s is not None and now_s >= life.next_start_s:
        return Act.START
    return Act.KILL if why_killed(life, now_s) else Act.NOTHING


def why_killed(life: Life, now_s: float) -> str:
    """What is said of a part that hangs; empty for one that does not."""
    if not life.is_running:
        return ""
    if life.silent_s is not None and now_s - life.silent_s >= SILENT_MAX_S:
        return "answers nothing any more, and is killed"
    if life.begun_s is not None:
        is_late = now_s - life.begun_s >= STARTING_MAX_S
        return f"is not ready after {format_duration(STARTING_MAX_S)}, and is killed" if is_late else ""
    if life.heard_s is not None and now_s - life.heard_s >= MUTE_MAX_S:
        return f"has told nothing for {format_duration(MUTE_MAX_S)}, and is killed"
    return ""


def why_failed(how: Exit) -> str:
    """A few words on an end that starting again does not change; empty for any other."""
    return _FAILED.get(how.code, "") if how.code is not None else ""


def _in(life: Life, state: PartState, now_s: float) -> Life:
    return life if life.state is state else replace(life, state=state, since_s=now_s)
