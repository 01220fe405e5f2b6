"""What readers see: views, and the events that lead from one to the next."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from penstock.coordinator.durability import EpochRange

__all__ = ["FlushEvent", "FlushReason", "FreezeEvent", "Frozen", "View"]

D = TypeVar("D")
S = TypeVar("S")


class FlushReason(StrEnum):
    """What made the coordinator freeze a delta."""

    SIZE_THRESHOLD = "size_threshold"
    INTERVAL = "interval"
    EXPLICIT = "explicit"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen(Generic[D]):
    """A delta that takes no more writes and waits for its flush, or is in it."""

    delta: D
    epoch_range: EpochRange
    size: int
    reason: FlushReason
    frozen_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class View(Generic[D, S]):
    """One instant of the database, from the oldest data to the newest.

    `snapshot` holds everything up to `epoch`. `frozen` (newest first) and `current` are behind it. All but
    `current` stay as they are; `current` goes on changing and may be read between two awaits on the
    coordinator's loop only.
    """

    snapshot: S
    epoch: int
    last_flushed: D | None
    frozen: tuple[Frozen[D], ...]
    current: D


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushEvent(Generic[D, S]):
    """A delta has been flushed: the snapshot that shows it, the delta, and its epochs `(lo, hi]`.

    A cache that is at `epoch_range.lo` applies the delta and is at `epoch_range.hi`; any other one is rebuilt
    from the snapshot.
    """

    snapshot: S
    delta: D
    epoch_range: EpochRange
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FreezeEvent(Generic[D, S]):
    """A delta was frozen and will be flushed. `view` shows it as `view.frozen[0]`."""

    view: View[D, S]
    epoch_range: EpochRange
