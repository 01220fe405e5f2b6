"""The circuit breaker of an exporter: send, pause, or probe with a single bundle. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from penstock.errors import ConfigError


class CircuitState(enum.StrEnum):
    """Closed: everything is sent. Open: nothing is, until a time. Probing: one bundle is under way."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


@dataclass(frozen=True, slots=True, kw_only=True)
class CircuitPolicy:
    """The wait between probes: `initial_s`, doubled with every failed probe, up to `max_s`."""

    initial_s: float = 1.0
    max_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 < self.initial_s <= self.max_s:
            raise ConfigError(
                f"the wait between probes starts at {self.initial_s} s and may reach {self.max_s} s: "
                "the first must be above 0 and at most the second"
            )


class CircuitBreaker:
    """Limits a destination that failed to one bundle at a time until one arrives.

    Times and the draw for jitter (0 to 1) come from the caller. Not thread-safe: one loop owns it.
    """

    __slots__ = ("_failures", "_policy", "due_s", "state")

    def __init__(self, policy: CircuitPolicy) -> None:
        self._policy = policy
        self._failures = 0
        self.state = CircuitState.CLOSED
        self.due_s = 0.0
        """The time at which an open circuit may be probed."""

    def try_acquire(self, now_s: float) -> bool:
        """Return whether a bundle may be sent now. Report its end to `succeeded`, `failed` or `release`."""
        if self.state is CircuitState.CLOSED:
            return True
        if self.state is CircuitState.OPEN and now_s >= self.due_s:
            self.state = CircuitState.PROBING
            return True
        return False

    def succeeded(self) -> None:
        """Record that the destination responded."""
        self._failures = 0
        self.state = CircuitState.CLOSED

    def failed(self, now_s: float, draw: float, retry_after_s: float | None = None) -> None:
        """Record that the destination is unreachable. It is left alone for `retry_after_s` at least."""
        wait_s = min(self._policy.max_s, self._policy.initial_s * 2.0 ** min(self._failures, 30))
        wait_s = max(wait_s * (0.5 + draw / 2), retry_after_s or 0.0)
        due_s = now_s + wait_s
        if self.state is CircuitState.OPEN:
            # Others that were under way when the first failed say nothing new, but may ask for more.
            self.due_s = max(self.due_s, now_s + (retry_after_s or 0.0))
            return
        self._failures += 1
        self.state = CircuitState.OPEN
        self.due_s = due_s

    @property
    def is_probing(self) -> bool:
        """Right after `try_acquire`: whether this is the probe."""
        return self.state is CircuitState.PROBING

    def release(self, *, was_probe: bool) -> None:
        """End without having sent anything. Only the end of the probe itself lets another one start."""
        if was_probe and self.state is CircuitState.PROBING:
            self.state = CircuitState.OPEN
