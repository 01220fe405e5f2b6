"""Limits on the requests in progress and the open streams of each key."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.http import Principal
from penstock.topics import Throttled


class RequestLimiter:
    """Limits the requests in progress per key; 0 means no limit."""

    __slots__ = ("_cap", "total")

    def __init__(self, cap: int) -> None:
        self._cap = cap
        self.total = 0

    def enter(self, principal: Principal) -> None:
        """Count a request. Raise `Throttled` if the key has reached its limit."""
        if self._cap and principal.in_flight >= self._cap:
            raise Throttled(f"this key has {self._cap} requests in progress, which is its limit")
        principal.in_flight += 1
        self.total += 1

    def leave(self, principal: Principal) -> None:
        principal.in_flight -= 1
        self.total -= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLimits:
    """Limits of long-lived responses; 0 means no limit."""

    sessions_max: int = 10_000
    """Watch sessions, with or without an open stream."""
    connections_max: int = 10_000
    """Open streams and WebSockets, over all keys."""
    connections_per_key_max: int = 1000
    heartbeat_ms_min: int = 1000
    """The shortest heartbeat interval of a watch; below a second only in tests."""


class StreamLimiter:
    """Limits the open streams and WebSockets. Call `check` first, and `enter` when the response has begun."""

    __slots__ = ("_limits", "total")

    def __init__(self, limits: StreamLimits) -> None:
        self._limits = limits
        self.total = 0

    def check(self, principal: Principal) -> None:
        """Raise `Throttled` if one more stream would exceed a limit."""
        limits = self._limits
        if limits.connections_max and self.total >= limits.connections_max:
            raise Throttled(f"{self.total} streams are open, which is the limit")
        if limits.connections_per_key_max and principal.streams >= limits.connections_per_key_max:
            raise Throttled(f"this key has {principal.streams} open streams, which is its limit")

    def enter(self, principal: Principal) -> None:
        principal.streams += 1
        self.total += 1

    def leave(self, principal: Principal) -> None:
        principal.streams -= 1
        self.total -= 1
