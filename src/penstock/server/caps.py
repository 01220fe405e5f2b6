"""How much one key may have under way at once."""

from __future__ import annotations

from penstock.server.auth import Principal
from penstock.topics.errors import Throttled

__all__ = ["InFlight"]


class InFlight:
    """Requests under way per key, as a gate around each of them; 0 sets no bound."""

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
