"""Who takes data out of Quiver: names, states, and what can be said about one.

    registered ──► active ◄──► inactive          orphaned: known from before, but nobody asked for it since

Every state keeps the data that the subscriber has not resolved. Only `unregister` lets go of it.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field
from typing import Final

from penstock.errors import InvalidInput
from penstock.quiver.ack_record import Outcome
from penstock.quiver.progress import Progress

__all__ = ["SUBSCRIBERS_MAX", "Subscriber", "SubscriberEntry", "SubscriberState", "check_name"]

SUBSCRIBERS_MAX: Final = 65_536
"""A subscriber's index is stored in two bytes."""

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_RESERVED: Final = frozenset(
    {"con", "prn", "aux", "nul"} | {f"{kind}{digit}" for kind in ("com", "lpt") for digit in range(1, 10)}
)


class SubscriberState(enum.IntEnum):
    """Numbers are stable on disk."""

    REGISTERED = 0
    ACTIVE = 1
    INACTIVE = 2
    ORPHANED = 3


def check_name(name: str) -> str:
    """The name itself. Raises `InvalidInput` when no subscriber may be called so."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise InvalidInput(
            f"{str(name)[:80]!r} is not a subscriber name: up to 64 letters, digits, '_' and '-'"
        )
    if name.lower() in _RESERVED:
        raise InvalidInput(f"{name!r} is not a subscriber name: Windows keeps it for a device")
    return name


@dataclass(slots=True, eq=False)
class SubscriberEntry:
    """A subscriber as the book keeps it."""

    index: int
    name: str
    state: SubscriberState
    progress: Progress
    counters: list[int] = field(default_factory=lambda: [0] * len(Outcome))
    """Bundles by outcome."""
    orphaned_ns: int = 0
    """Since when nobody asked for it; 0 when somebody did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscriber:
    """A subscriber as it was when somebody asked."""

    name: str
    state: SubscriberState
    hwm: int
    """Everything in this segment and before it is resolved."""
    pending_segments: int
    gap_segments: int
    """Segments beyond the mark of which something is resolved."""
    acked: int
    nacked: int
    dropped: int
    expired: int
    rejected: int
    in_flight: int = 0
    deferred: int = 0
    oldest_pending_ns: int | None = None
    """When the oldest data that it has not resolved came in."""
