"""What to delete, what to drop and when to hold writers up. Decisions only: nothing here touches a disk.

In this order:

1. Steady state: what everybody has processed goes, oldest first, but for the headroom. Nothing is lost.
2. Age: what came in too long ago goes, processed or not. An explicit bound of the operator, under any policy.
3. Size: over the cap the headroom goes too. After that `backpressure` holds writers up and keeps every
   segment, and `drop_oldest` drops the oldest segment of which nobody holds a bundle.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from penstock.quiver.model import SegmentInfo

__all__ = ["Candidate", "Policy", "Retention"]

Policy: TypeAlias = Literal["backpressure", "drop_oldest"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A segment that might go, and what that frees."""

    seq: int
    byte_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """The rules of one core."""

    policy: Policy = "backpressure"
    max_age_s: float | None = None
    headroom_bytes: int = 0
    """Processed segments that may stay while there is room."""

    def steady(self, finished: Sequence[Candidate]) -> list[int]:
        """Processed segments that go now; `finished` is oldest first."""
        kept = sum(candidate.byte_count for candidate in finished)
        gone: list[int] = []
        for candidate in finished:
            if kept <= self.headroom_bytes:
                break
            gone.append(candidate.seq)
            kept -= candidate.byte_count
        return gone

    def expiry_ns(self, now_ns: int) -> int | None:
        """What came in before this moment is too old; None when nothing ever is."""
        return None if self.max_age_s is None else now_ns - round(self.max_age_s * 1e9)

    def expired(self, infos: Iterable[SegmentInfo], now_ns: int, claimed: Collection[int]) -> list[int]:
        """Segments that are too old, by when their last bundle came in, not by the time of the file.

        One of which somebody holds a bundle stays until that ends.
        """
        before_ns = self.expiry_ns(now_ns)
        if before_ns is None:
            return []
        return [info.seq for info in infos if info.ingest_ns_max < before_ns and info.seq not in claimed]

    def evict(self, finished: Iterable[Candidate], excess_bytes: int) -> list[int]:
        """Processed segments that go because there is too much, headroom or not; oldest first."""
        return _enough(finished, excess_bytes, lambda seq: True)

    def drop(
        self, candidates: Iterable[Candidate], excess_bytes: int, held: Callable[[int], bool]
    ) -> list[int]:
        """Unprocessed segments to give up, oldest first; none under `backpressure`.

        `held` tells which must stay: somebody has a bundle of it, or there is no copy of it elsewhere yet.
        """
        if self.policy != "drop_oldest":
            return []
        return _enough(candidates, excess_bytes, lambda seq: not held(seq))


def _enough(candidates: Iterable[Candidate], excess_bytes: int, may_go: Callable[[int], bool]) -> list[int]:
    gone: list[int] = []
    for candidate in candidates:
        if excess_bytes <= 0:
            break
        if may_go(candidate.seq):
            gone.append(candidate.seq)
            excess_bytes -= candidate.byte_count
    return gone
