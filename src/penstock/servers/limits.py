"""How much one key may have under way, or open, at once."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.http import Principal
from penstock.topics import Throttled


class RequestLimiter:
    """Bounds the requests under way per key; 0 sets no bound."""

    __slots__ = ("_cap", "total")

    def __init__(self, cap: int) -> None:
        self._cap = cap
        self.total = 0

    def enter(self, principal: Principal) -> None:
        """Raises `Throttled` when the key has as many requests under way as it may."""
        if self._cap and principal.in_flight >= self._cap:
            raise Throttled(f"this key has {self._cap} requests under way, which is its cap")
        principal.in_flight += 1
        self.total += 1

    def leave(self, principal: Principal) -> None:
        principal.in_flight -= 1
        self.total -= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLimits:
    """Limits of long-lived responses; 0 sets no bound."""

    sessions_max: int = 10_000
    """Watch sessions, with and without a stream."""
    connections_max: int = 10_000
    """Streams and WebSockets, over all keys."""
    connections_per_key_max: int = 1000
    heartbeat_ms_min: int = 1000
    """What a watch may ask for at least; below a second only in tests."""


class StreamLimiter:
    """Bounds the streams and WebSockets that are open. Check first, and count when the response has begun."""

    __slots__ = ("_limits", "total")

    def __init__(self, limits: StreamLimits) -> None:
        self._limits = limits
        self.total = 0

    def check(self, principal: Principal) -> None:
        """Raises `Throttled` when one more would be too many."""
        limits = self._limits
        if limits.connections_max and self.total >= limits.connections_max:
            raise Throttled(f"{self.total} streams are open, which is the cap")
        if limits.connections_per_key_max and principal.streams >= limits.connections_per_key_max:
            raise Throttled(f"this key has {principal.streams} streams open, which is its cap")

    def enter(self, principal: Principal) -> None:
        principal.streams += 1
        self.total += 1

    def leave(self, principal: Principal) -> None:
        principal.streams -= 1
        self.total -= 1
