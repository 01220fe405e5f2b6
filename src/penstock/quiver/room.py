"""How much room bundles have and take: the arithmetic that settings, budget and admission share."""

from __future__ import annotations

from typing import Final

__all__ = ["FRAME_BYTES", "largest_bundle", "least_cap", "least_of_core", "most_of_core", "taken_by"]

FRAME_BYTES: Final = 2048
"""About what a segment has besides its bundles: schema, footer and sidecar."""
_ACK_LOG_SHARE: Final = 16
"""This part of the cap is left to the log of answers, which is never empty."""


def least_cap(*, wal_bytes: int, target_bytes: int) -> int:
    """What one core needs at least: its log, the segment that is written and one more."""
    return wal_bytes + 2 * target_bytes


def least_of_core(cap_bytes: int, cores: int) -> int:
    """What one of several cores may use whatever the others do: half of its share."""
    return cap_bytes // cores // 2


def most_of_core(cap_bytes: int, cores: int, target_bytes: int) -> int:
    """What one core may use when the others use nothing."""
    if cores == 1:
        return cap_bytes
    least = least_of_core(cap_bytes, cores)
    return max(least, cap_bytes - target_bytes * cores - least * (cores - 1))


def taken_by(byte_count: int, *, has_wal: bool) -> int:
    """What a bundle takes: it is in the log still when its segment is written."""
    return FRAME_BYTES + (2 * byte_count if has_wal else byte_count)


def largest_bundle(most_bytes: int, *, target_bytes: int, has_wal: bool) -> int:
    """The largest bundle for which a core has room below its soft cap when all that may go is gone."""
    below = most_bytes - target_bytes
    room = below - below // _ACK_LOG_SHARE - FRAME_BYTES
    return room // 2 if has_wal else room
