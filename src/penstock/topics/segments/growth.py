"""The growth of segments from rows of the log, in this process or in a separate one.

The active segment grows, and new ones follow when it reaches its limits. Converting log frames to segment
frames is the largest work that does not serve requests. In a thread it would hold the interpreter lock; a
separate process uses another core.

The process holds a lock file of the data directory while it runs, and ends when its parent ends. A starting
engine waits for that lock, so that no two processes write the same segment.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Final

import msgspec
import numpy as np

from penstock.storage import FileSystem, OsFileSystem
from penstock.topics.errors import Damaged
from penstock.topics.segments.build import build, rows_that_fit
from penstock.topics.segments.columns import DAMAGED, Columns, StoredBytes
from penstock.topics.segments.format import SegmentEntry
from penstock.topics.segments.store import LocalSegmentRoot
from penstock.topics.segments.tiering import Tiers, TopicTier


class FramesLost(Damaged):
    """Frames of the log are not as they were written. Nothing of them was stored yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """The work to do for one topic."""

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
    """Add the rows to the segments of the topic, durably, and return all segments.

    `frames` returns the bytes of log files. Raises `FramesLost` if some frames are not as they were written.
    With `give_up_lost` their records are marked as lost instead.
    """
    segments, rows = list(growth.segments), growth.rows
    at = rows.first_seq
    while at < rows.end_seq:
        active = _active(segments, at)
        fit_count = rows_that_fit(
            rows.length[at - rows.first_seq :],
            events_left=growth.events_max - (active.count if active else 0),
            bytes_left=growth.bytes_max - (active.data_bytes if active else 0),
        )
        if not fit_count and active is not None:
            segments[-1] = sealed(tier, active)
            continue
        part = rows.part(at, at + max(fit_count, 1) - 1)
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
                # The segment is damaged. Leave it as it is, with the records that can be read.
                segments[-1] = msgspec.structs.replace(active, sealed=True)
                continue
        at = part.end_seq
    last = segments[-1]
    if not last.sealed and (last.count >= growth.events_max or last.data_bytes >= growth.bytes_max):
        segments[-1] = sealed(tier, last)
    return segments


def _active(segments: Sequence[SegmentEntry], next_seq: int) -> SegmentEntry | None:
    """Return the segment that takes the next record. One that ends elsewhere counts as sealed."""
    if segments and not segments[-1].sealed and segments[-1].end_seq == next_seq:
        return segments[-1]
    return None


def sealed(tier: TopicTier, entry: SegmentEntry) -> SegmentEntry:
    """Return the segment after sealing it."""
    try:
        return tier.seal(entry)
    except Damaged:
        return msgspec.structs.replace(entry, sealed=True)  # readers get an error for the damage


LOCK_FILE: Final = ".segments.lock"
ROWS_MIN: Final = 5000
"""The number of rows below which the transfer to another process costs more than it saves."""
EARLIER_WAIT_S: Final = 60.0
"""How long to wait for an earlier process. It ends with its parent unless it is stopped or hangs."""
_NICENESS: Final = 5
"""The niceness of the process. Requests have priority, even if the log grows longer."""

_LOGGER = logging.getLogger(__name__)


def await_earlier(fs: FileSystem, data_dir: str) -> None:
    """Wait until no process of an earlier start writes segments.

    Raises `LockHeld`, which names the holder, if one still runs after a minute.
    """
    with fs.lock(os.path.join(data_dir, LOCK_FILE), wait_s=EARLIER_WAIT_S):
        pass


class SegmentProcess:
    """A separate process that grows segments, started by the first large piece of work. For one thread."""

    def __init__(self, data_dir: str) -> None:
        self._data_dir = data_dir
        self._pool: ProcessPoolExecutor | None = None
        self._workers: list[BaseProcess] = []
        self._failed = False

    def grow(self, growth: Growth, files: Mapping[int, str]) -> list[SegmentEntry] | None:
        """Run `grow` in another process on log files by path.

        Return None if this process must do the work.
        """
        if self._failed or growth.rows.count < ROWS_MIN:
            return None
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                1,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_begin,
                initargs=(self._data_dir,),
            )
        try:
            work = self._pool.submit(_grow, growth, dict(files))
            self._workers = list((self._pool._processes or {}).values())
            return work.result()
        except BrokenProcessPool as error:
            self._failed = True
            self.close()
            # Nothing names the segments that it wrote, so they are written again.
            await_earlier(OsFileSystem(), self._data_dir)
            how = _ending(self._workers) or f"ended ({error})"
            _LOGGER.warning("the segment process %s; segments are built in this one from now on", how)
            return None

    def close(self) -> None:
        """End the process."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(cancel_futures=True)


def _ending(workers: Sequence[BaseProcess]) -> str:
    """Describe how the first of these processes ended, or return an empty text if none has."""
    for code in (worker.exitcode for worker in workers):
        if code is not None:
            return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return ""


_held = ExitStack()
_tiers: Tiers | None = None


def _begin(data_dir: str) -> None:
    global _tiers
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.nice(_NICENESS)
    fs = OsFileSystem()
    path = os.path.join(data_dir, LOCK_FILE)
    _held.enter_context(fs.lock(path, wait_s=EARLIER_WAIT_S, note=b"%d\n" % os.getpid()))
    _tiers = Tiers(LocalSegmentRoot(fs, data_dir))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _grow(growth: Growth, files: Mapping[int, str]) -> list[SegmentEntry]:
    assert _tiers is not None
    fs = OsFileSystem()
    views = {number: fs.open_view(path) for number, path in files.items()}
    return grow(growth, _tiers.topic(growth.topic_id), views.__getitem__)
