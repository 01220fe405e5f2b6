"""Building segments in a process of its own.

Turning log frames into segment frames is the one large piece of work that has nothing to do with requests.
In a thread it would take the interpreter away from them; here it takes another core.

The process holds a lock file of the data directory as long as it lives, and it ends when its parent does. An
engine that starts waits for that lock: nobody writes a segment that a process of an earlier start is still
writing.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from multiprocessing.process import BaseProcess
from typing import Final

from penstock.storage import FileSystem, OsFileSystem
from penstock.topics.segment import SegmentEntry
from penstock.topics.segment_growth import Growth, grow
from penstock.topics.segment_root import LocalSegmentRoot
from penstock.topics.tier import Tiers

__all__ = ["LOCK_FILE", "SegmentProcess", "await_earlier"]

LOCK_FILE: Final = ".segments.lock"
ROWS_MIN: Final = 5000
"""Fewer rows than this are not worth the way to another process."""
EARLIER_WAIT_S: Final = 60.0
"""A segment process ends with its parent, unless it was stopped or hangs in a system call."""
_NICENESS: Final = 5
"""Requests go first; the log may be a little longer for it."""

_LOGGER = logging.getLogger(__name__)


def await_earlier(fs: FileSystem, data_dir: str) -> None:
    """Return when no process of an earlier start writes segments any more.

    Raises `LockHeld`, which names the holder, if one is still there after a minute.
    """
    with fs.lock(os.path.join(data_dir, LOCK_FILE), wait_s=EARLIER_WAIT_S):
        pass


class SegmentProcess:
    """Grows segments elsewhere, from the first piece of work on that is worth it. For one thread."""

    def __init__(self, data_dir: str) -> None:
        self._data_dir = data_dir
        self._pool: ProcessPoolExecutor | None = None
        self._workers: list[BaseProcess] = []
        self._failed = False

    def grow(self, growth: Growth, files: Mapping[int, str]) -> list[SegmentEntry] | None:
        """As `segment_growth.grow`, from log files by path; None when it has to be done here instead."""
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
            # What it wrote is not named by anything yet, and is written again.
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
    """How the first of these processes ended; a pool does not say. Empty if none has."""
    for code in (worker.exitcode for worker in workers):
        if code is not None:
            return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return ""


_held = ExitStack()
_tiers: Tiers | None = None


def _begin(data_dir: str) -> None:
    global _tiers
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to everybody; the parent decides
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
