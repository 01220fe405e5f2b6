"""One exporter's view of its destination: reachable, left alone, or tried with a single bundle. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from penstock.errors import ConfigError


class CircuitState(enum.StrEnum):
    """Closed: everything goes. Open: nothing does, until a time. Probing: one is on its way."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


@dataclass(frozen=True, slots=True, kw_only=True)
class CircuitPolicy:
    """How long a destination is left alone: `initial_s`, doubled with every failing probe, up to `max_s`."""

    initial_s: float = 1.0
    max_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 < self.initial_s <= self.max_s:
            raise ConfigError(
                f"the wait between probes starts at {self.initial_s} s and may reach {self.max_s} s: "
                "the first must be above 0 and at most the second"
            )


class CircuitBreaker:
    """After a destination failed as a whole it gets one bundle at a time until one arrives.

    Times and the draw for jitter (0 to 1) come from the caller. Not thread-safe: one loop owns it.
    """

    __slots__ = ("_failures", "_policy", "due_s", "state")

    def __init__(self, policy: CircuitPolicy) -> None:
        self._policy = policy
        self._failures = 0
        self.state = CircuitState.CLOSED
        self.due_s = 0.0
        """When an open circuit may be probed."""

    def enter(self, now_s: float) -> bool:
        """Whether one more bundle may go out now. Who was let in tells `succeeded`, `failed` or `left`."""
        if self.state is CircuitState.CLOSED:
            return True
        if self.state is CircuitState.OPEN and now_s >= self.due_s:
            self.state = CircuitState.PROBING
            return True
        return False

    def succeeded(self) -> None:
        """The destination answered something sensible."""
        self._failures = 0
        self.state = CircuitState.CLOSED

    def failed(self, now_s: float, draw: float, hint_s: float | None = None) -> None:
        """The destination is out of reach. A hint is a floor under the wait."""
        wait_s = min(self._policy.max_s, self._policy.initial_s * 2.0 ** min(self._failures, 30))
        wait_s = max(wait_s * (0.5 + draw / 2), hint_s or 0.0)
        due_s = now_s + wait_s
        if self.state is CircuitState.OPEN:
            # Others that were under way when the first failed: they say nothing new, but may ask for more.
            self.due_s = max(self.due_s, now_s + (hint_s or 0.0))
            return
        self._failures += 1
        self.state = CircuitState.OPEN
        self.due_s = due_s

    @property
    def is_probing(self) -> bool:
        """Right after `enter`: whether who was let in is the probe."""
        return self.state is CircuitState.PROBING

    def left(self, *, was_probe: bool) -> None:
        """Who was let in had nothing to send after all. Only the probe itself makes room for another one."""
        if was_probe and self.state is CircuitState.PROBING:
            self.state = CircuitState.OPEN
