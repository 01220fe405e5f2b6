"""The circuit breaker of an exporter, which decides whether to send, pause, or probe. It does no I/O."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from penstock.errors import ConfigError


class CircuitState(enum.StrEnum):
    """The states. Closed: bundles are sent. Open: none is sent for a time. Probing: one bundle is being
    sent.
    """

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


@dataclass(frozen=True, slots=True, kw_only=True)
class CircuitPolicy:
    """The wait between probes. It starts at `initial_s` and doubles with each failed probe, up to `max_s`."""

    initial_s: float = 1.0
    max_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 < self.initial_s <= self.max_s:
            raise ConfigError(
                f"the wait between probes starts at {self.initial_s} s and may reach {self.max_s} s: "
                "the first must be above 0 and at most the second"
            )


class CircuitBreaker:
    """Limits a failed destination to one bundle at a time until one is delivered.

    Times and the random number for jitter (0 to 1) come from the caller. Not thread-safe: use it on one event
    loop.
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
        """Record that the destination is unreachable. Pause for at least `retry_after_s`."""
        wait_s = min(self._policy.max_s, self._policy.initial_s * 2.0 ** min(self._failures, 30))
        wait_s = max(wait_s * (0.5 + draw / 2), retry_after_s or 0.0)
        due_s = now_s + wait_s
        if self.state is CircuitState.OPEN:
            # Failures of concurrent bundles are not new information, but may request a longer wait.
            self.due_s = max(self.due_s, now_s + (retry_after_s or 0.0))
            return
        self._failures += 1
        self.state = CircuitState.OPEN
        self.due_s = due_s

    @property
    def is_probing(self) -> bool:
        """Whether the bundle just acquired is the probe. Read it right after `try_acquire`."""
        return self.state is CircuitState.PROBING

    def release(self, *, was_probe: bool) -> None:
        """Release a bundle that was not sent. Only releasing the probe itself allows another probe."""
        if was_probe and self.state is CircuitState.PROBING:
            self.state = CircuitState.OPEN
