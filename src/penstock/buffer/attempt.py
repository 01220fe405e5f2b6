"""Did my append land? The decision after a conditional write whose reply did not settle it.

Two different requests can carry the same batch: one that timed out and is still on its way, and the one
sent after it. So every attempt is remembered until a fresh manifest shows that it can no longer land,
and its location is looked for before anything is appended again.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.buffer import manifest
from penstock.objects import Version

__all__ = ["Attempt", "Fate", "judge", "judge_by_ledger"]


class Fate(enum.Enum):
    """What a fresh manifest says about an earlier attempt."""

    LANDED = "landed"
    LOST = "lost"
    """It is not in the queue and its base is gone: it can never land."""
    OPEN = "open"
    """It is not in the queue, but a slow request may still match. The next append has the same
    base, so at most one of the two can win."""
    DEQUEUED = "dequeued"
    """Its number was handed out and is gone from the manifest: only the ledger can tell whose it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One conditional write of one or more batches, which land together or not at all."""

    base: Version | None
    first: int
    locations: tuple[str, ...]
    refused: bool = False
    """Whether the store said for certain that this write was not applied."""

    @property
    def last(self) -> int:
        return self.first + len(self.locations) - 1


def judge(attempt: Attempt, raw: bytes, version: Version | None) -> Fate:
    """Judge by the last batch of the attempt: the one that is dequeued last."""
    if manifest.locate(raw, attempt.locations[-1]) is not None:
        return Fate.LANDED
    footer = manifest.read_footer(raw)
    if footer.next_sequence <= attempt.last:
        return Fate.OPEN if version == attempt.base else Fate.LOST
    if manifest.first_sequence(raw) <= attempt.last:
        return Fate.LOST
    return Fate.DEQUEUED


def judge_by_ledger(attempt: Attempt, dequeued: Mapping[int, str]) -> Fate:
    """Settle `Fate.DEQUEUED` with the consumer's ledger.

    Still DEQUEUED when the ledger does not reach back far enough.
    """
    location = dequeued.get(attempt.last)
    if location is None:
        return Fate.DEQUEUED
    return Fate.LANDED if location == attempt.locations[-1] else Fate.LOST
