"""Rows of the log become segments: the active one grows, and as many follow as their limits ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from penstock.topics.columns import DAMAGED, Columns
from penstock.topics.errors import Damaged
from penstock.topics.segment import SegmentEntry
from penstock.topics.segment_build import build, rows_that_fit
from penstock.topics.stored_bytes import StoredBytes
from penstock.topics.tier import TopicTier

__all__ = ["FramesLost", "Growth", "grow", "sealed"]


class FramesLost(Damaged):
    """Frames of the log are not what was written; nothing was stored of them yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """What there is to do for one topic."""

    topic_id: int
    segments: Sequence[SegmentEntry]
    rows: Columns
    now_ms: int
    events_max: int
    bytes_max: int


def grow(
    growth: Growth,
    tier: TopicTier,
    frames: Callable[[int], StoredBytes],
    *,
    give_up_lost: bool = False,
) -> list[SegmentEntry]:
    """All segments of the topic once the rows are in them, durably. `frames` gives the bytes of log files.

    Raises `FramesLost` when some of them are not what was written, unless those are to be given up: then
    their records are known to be lost from there on.
    """
    segments, rows = list(growth.segments), growth.rows
    at = rows.first_seq
    while at < rows.end_seq:
        active = _active(segments, at)
        fitting = rows_that_fit(
            rows.length[at - rows.first_seq :],
            events_left=growth.events_max - (active.count if active else 0),
            bytes_left=growth.bytes_max - (active.data_bytes if active else 0),
        )
        if not fitting and active is not None:
            segments[-1] = sealed(tier, active)
            continue
        part = rows.part(at, at + max(fitting, 1) - 1)
        built = build(part, frames, data_offset=active.data_bytes if active else 0)
        known = int(np.count_nonzero(part.flags & np.uint8(DAMAGED)))
        if len(built.lost) > known and not give_up_lost:
            raise FramesLost(f"records {built.lost[0]} to {built.lost[-1]} of the log cannot be read back")
        if active is None:
            segments.append(tier.start(built, growth.now_ms))
        else:
            try:
                segments[-1] = tier.append(active, built)
            except Damaged:
                # It is not what it was: leave it as it is, with what can be read of it.
                segments[-1] = msgspec.structs.replace(active, sealed=True)
                continue
        at = part.end_seq
    last = segments[-1]
    if not last.sealed and (last.count >= growth.events_max or last.data_bytes >= growth.bytes_max):
        segments[-1] = sealed(tier, last)
    return segments


def _active(segments: Sequence[SegmentEntry], next_seq: int) -> SegmentEntry | None:
    """The segment that takes the next record; one that ends elsewhere is as good as sealed."""
    if segments and not segments[-1].sealed and segments[-1].end_seq == next_seq:
        return segments[-1]
    return None


def sealed(tier: TopicTier, entry: SegmentEntry) -> SegmentEntry:
    """The segment as one that never grows again."""
    try:
        return tier.seal(entry)
    except Damaged:
        return msgspec.structs.replace(entry, sealed=True)  # readers are told what is wrong with it
