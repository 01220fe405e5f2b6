"""Looking at a data directory of Quiver, as its files tell it, beside the process that writes it."""

from __future__ import annotations

import os
import shutil
import threading
from dataclasses import dataclass
from typing import Final

from penstock.errors import NotFound
from penstock.quiver import LocalSegments, SegmentInfo, SubscriberLook, core_directories, look_at_progress
from penstock.storage import OsFileSystem
from penstock.up import QuiverPlace

__all__ = ["QuiverReading", "read_quiver"]

_FILES_MAX: Final = 200_000
_READERS: Final = threading.local()
"""What each thread knows of the directories it reads. A source reads in a thread of its own, so that is one
for each source, which nobody else touches and which goes with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuiverReading:
    """A directory at one moment: behind its writer by what is not synced."""

    segments: tuple[SegmentInfo, ...]
    damaged: tuple[str, ...]
    subscribers: tuple[tuple[int, SubscriberLook], ...]
    """(core, subscriber)."""
    disk_bytes: int
    free_bytes: int

    @property
    def items(self) -> int:
        return sum(info.item_count for info in self.segments)


def read_quiver(place: QuiverPlace) -> QuiverReading:
    """Blocking. Raises `NotFound` while there is no directory, and what a damaged file raises.

    The description of a segment is read once in a thread, however often it is looked at there.
    """
    root = os.path.abspath(place.path)
    if not os.path.isdir(root):
        raise NotFound(f"there is no directory {place.path} yet")
    fs = OsFileSystem()
    source = _segments_of(root)
    infos = source.infos()
    subscribers = [
        (core, look)
        for core, directory in core_directories(fs, root)
        for look in look_at_progress(fs, directory, [info for info in infos if info.core_id == core])
    ]
    return QuiverReading(
        segments=tuple(infos),
        damaged=tuple(sorted(source.damaged)),
        subscribers=tuple(subscribers),
        disk_bytes=_disk_bytes(root),
        free_bytes=shutil.disk_usage(root).free,
    )


def _segments_of(root: str) -> LocalSegments:
    """The segments below a directory; the one of the last look reads only the sidecars that came since."""
    known: dict[str, LocalSegments] = _READERS.__dict__.setdefault("segments", {})
    if root not in known:
        known[root] = LocalSegments(root)
    return known[root]


def _disk_bytes(root: str) -> int:
    """What the files take on the disk; one that goes meanwhile counts as nothing."""
    total = seen = 0
    for folder, _, names in os.walk(root):
        for name in names:
            seen += 1
            if seen > _FILES_MAX:
                return total
            try:
                total += os.stat(os.path.join(folder, name)).st_blocks * 512
            except OSError:
                continue
    return total
