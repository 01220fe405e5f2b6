"""Group commit: a thread that commits all waiting entries of many writers with one sync, in order.

A single entry is written and synced immediately. The submitting thread does that itself if a sync is about as
fast as waking another thread. While a sync runs, later entries queue up and share the next sync. The commit
thread waits for more entries only where syncs are slow.

When a commit fails, every uncommitted entry fails until `resume` is called. That includes entries submitted
later, because these build on the entries that failed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import msgspec

from penstock.errors import PenstockError, Unavailable
from penstock.storage.append_log import AppendLog
from penstock.storage.fs import Buffer
from penstock.storage.log_layout import LogPosition

_LOGGER = logging.getLogger(__name__)
_BATCH_BYTES_MAX = 16 * 1024**2
_SLICE_S = 0.0005
_QUICK_SYNC_S = 0.0005
"""The longest sync for which the submitting thread may wait."""
_STALL_S = 0.01
_WARY_FACTOR = 100
"""After a stall, only the commit thread waits for the disk, for this multiple of the stall. The submitting
thread therefore loses at most a hundredth of its time to stalls, and a single delay by a busy processor soon
has no effect."""
_SMALL_BYTES = 64 * 1024
"""Data up to this size does not affect the duration of a sync."""


class QueueFull(Unavailable):
    """Too many entries wait for their commit. Nothing was queued. Retry later."""


class Entry(msgspec.Struct, eq=False):
    """Frames that are committed together or not at all, and their outcome.

    - `context` belongs to the submitter.
    - `urgent` allows the entry to use the reserve of a log whose device is full.
    - `submissions` is how many submissions the submitter has combined in this entry.
    - `position` or `error` is set on delivery.
    - `append_s` is the duration of the write, and `sync_s` that of the sync. A call that does both counts as
      sync.
    - `held_s` is how long the commit waited for more entries because of `widen`.
    """

    buffers: Sequence[Buffer]
    byte_count: int
    frame_count: int
    sync: bool
    context: object = None
    urgent: bool = False
    submissions: int = 1
    generation: int = 0
    position: LogPosition | None = None
    error: PenstockError | None = None
    append_s: float = 0.0
    sync_s: float = 0.0
    held_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitStats:
    """The totals of a committer since it started, and the state of its queue."""

    entries: int
    frames: int
    batches: int
    bytes: int
    syncs: int
    rotations: int
    failures: int
    submit_full: int
    queue_depth: int
    queue_peak: int


def commit_entries(log: AppendLog, entries: Sequence[Entry]) -> PenstockError | None:
    """Write the entries with as few writes and syncs as the log's files allow, and set their outcomes.

    Stop at the first failure. Set the error in that entry and all later ones, and return it.
    """
    first = 0
    while first < len(entries):
        start_s = time.perf_counter()
        try:
            byte_count, last = entries[first].byte_count, first + 1
            if byte_count > log.room:
                log.reserve(byte_count, urgent=entries[first].urgent)
            if last < len(entries):
                last, byte_count = _fitting(entries, first, log.room)
            _append(log, entries[first:last], byte_count, start_s)
        except PenstockError as error:
            for entry in entries[first:]:
                entry.error = error
            return error
        first = last
    return None


def _fitting(entries: Sequence[Entry], first: int, room: int) -> tuple[int, int]:
    """Return the end of the entries from `first` that fit in `room`, at least one, and their size."""
    byte_count = entries[first].byte_count
    last = first + 1
    while last < len(entries) and byte_count + entries[last].byte_count <= room:
        byte_count += entries[last].byte_count
        last += 1
    return last, byte_count


def _append(log: AppendLog, entries: Sequence[Entry], byte_count: int, start_s: float) -> None:
    buffers: Sequence[Buffer] = entries[0].buffers
    frame_count = entries[0].frame_count
    sync = entries[0].sync
    if len(entries) > 1:
        buffers = [buffer for entry in entries for buffer in entry.buffers]
        frame_count = sum([entry.frame_count for entry in entries])
        sync = any(entry.sync for entry in entries)
    write_s = time.perf_counter()
    urgent = entries[0].urgent
    file, offset = log.append(buffers, byte_count, frame_count, sync=sync, urgent=urgent)
    end_s = time.perf_counter()
    append_s, sync_s = (write_s - start_s, end_s - write_s) if sync else (end_s - start_s, 0.0)
    for entry in entries:
        entry.position = LogPosition(file, offset)
        entry.append_s = append_s
        entry.sync_s = sync_s
        offset += entry.byte_count


def _set_held(entries: Sequence[Entry], seconds: float) -> None:
    for entry in entries:
        entry.held_s = seconds


class GroupCommitter:
    """Commits the entries of one log in a thread.

    That thread, or `flush`, calls `deliver` with the entries of one commit together, each entry once, in the
    order of submission. `deliver` must not raise. Only one thread, such as that of an event loop, may call
    `submit`, `flush` and `resume`.

    Entries that need no sync are delivered after the write and synced within `sync_interval_s`. `on_sync`
    receives the duration of each sync. Where a small sync usually takes less than `quick_sync_s`, `flush` may
    do it in the calling thread, and no commit waits for more entries. With `one_by_one` no entry shares its
    write or its sync with another.
    """

    def __init__(
        self,
        log: AppendLog,
        deliver: Callable[[list[Entry]], None],
        *,
        queue_max: int = 4096,
        sync_interval_s: float = 0.1,
        window_max_s: float = 0.01,
        mark_after_s: float = 0.05,
        quick_sync_s: float = _QUICK_SYNC_S,
        one_by_one: bool = False,
        pause: Callable[[float], None] = time.sleep,
        on_sync: Callable[[float], None] | None = None,
        name: str = "commit",
    ) -> None:
        self._log = log
        self._deliver = deliver
        self._queue_max = queue_max
        self._sync_interval_s = sync_interval_s
        self._window_max_s = window_max_s
        self._mark_after_s = mark_after_s
        self._quick_sync_s = quick_sync_s
        self._one_by_one = one_by_one
        self._pause = pause
        self._on_sync = on_sync
        self._queue: SimpleQueue[list[Entry] | None] = SimpleQueue()
        self._held: list[Entry] = []
        self._submitted = self._taken = 0
        self._turn = threading.Lock()
        """Held while committing or syncing."""
        self._rests = False
        """Whether the commit thread waits without a timeout."""
        self._wary_until_s = 0.0
        self._window_s = 0.0
        self._generation = 0
        self._failed = -1
        self._failure: PenstockError | None = None
        self._closed = False
        self._last_size = 0
        self._usual_sync_s = 0.0
        self._sync_due_s = float("inf")
        self._prepared_in = 0
        self._entries = self._frames = self._batches = self._bytes = 0
        self._failures = self._submit_full = self._queue_peak = 0
        self._preparer: threading.Thread | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the commit thread."""
        self._thread.start()

    @property
    def generation(self) -> int:
        """The number of calls of `resume`. Each entry records it."""
        return self._generation

    def submit(self, entry: Entry, *, hold: bool = False) -> None:
        """Queue an entry. `deliver` receives its outcome. With `hold` the thread is not woken before `flush`.

        Raise `QueueFull`, or `Unavailable` after `close`. The entry is not queued then.
        """
        depth = self._submitted - self._taken
        if depth >= self._queue_max:
            self._submit_full += 1
            raise QueueFull(f"{depth} writes wait for the disk; retry in a moment")
        if self._closed:
            raise Unavailable("the log is closed; nothing more is written")
        if depth >= self._queue_peak:
            self._queue_peak = depth + 1
        entry.generation = self._generation
        self._submitted += 1
        self._held.append(entry)
        if not hold:
            self.flush()

    def flush(self) -> None:
        """Pass on the held entries. Waking the thread once for many costs less than once for each."""
        if self._held:
            entries, self._held = self._held, []
            if not self._commit_alone(entries):
                self._queue.put(entries)

    def _commit_alone(self, entries: list[Entry]) -> bool:
        """Commit a single small durable entry in this thread if no commit is in progress and syncs are quick.

        Return whether the entry was committed.
        """
        is_single = len(entries) == 1 and entries[0].sync and entries[0].byte_count <= _SMALL_BYTES
        if not is_single or self._submitted - self._taken != 1 or not self.is_quick:
            return False
        if not self._turn.acquire(blocking=False):
            return False
        try:
            if entries[0].byte_count > self._log.room:
                return False  # a new file takes longer than an entry
            self._taken += 1
            self._commit(entries)
        finally:
            self._turn.release()
        if self._rests:
            self._rests = False
            self._queue.put([])  # wake the thread, to mark the commit when no entry waits
        return True

    @property
    def is_quick(self) -> bool:
        """Whether `flush` commits a single small entry itself, because syncs are quick."""
        if self._window_s or not 0.0 < self._usual_sync_s < self._quick_sync_s:
            return False
        return time.monotonic() >= self._wary_until_s

    def widen(self, window_s: float) -> None:
        """Let later commits wait up to `window_s` for more entries, while more arrive.

        This has no effect where syncs are quick. With 0, commits wait only where that saves syncs.
        """
        self._window_s = window_s

    def resume(self) -> int:
        """Accept entries again after a failure. The caller has undone everything that built on it.

        Return the new generation.
        """
        self._generation += 1
        return self._generation

    def rotate(self, then: Callable[[], None] = lambda: None) -> None:
        """Start a new file of the log between two commits. Raise the errors of `AppendLog.rotate`.

        `then` is called before the next commit. At that point everything written is delivered, and is in
        files before the new one.
        """
        with self._turn:
            self._log.rotate()
            then()

    def stats(self) -> CommitStats:
        return CommitStats(
            entries=self._entries,
            frames=self._frames,
            batches=self._batches,
            bytes=self._bytes,
            syncs=self._log.syncs,
            rotations=self._log.rotations,
            failures=self._failures,
            submit_full=self._submit_full,
            queue_depth=self._submitted - self._taken,
            queue_peak=self._queue_peak,
        )

    def close(self) -> None:
        """Commit and sync everything that was submitted, and end the thread. The log stays open.

        Call this in the submitting thread, or after its last `flush`. It may be called twice. Raise the error
        of the last sync.
        """
        if not self._closed:
            self._closed = True
            self.flush()
            self._queue.put(None)
            if self._thread.ident is None:
                self._run()
        if self._thread.ident is not None:
            self._thread.join()
        if self._preparer is not None and self._preparer.ident is not None:
            self._preparer.join()
        self._log.sync()
        with contextlib.suppress(PenstockError):
            self._log.mark()

    def _run(self) -> None:
        closing = False
        while not closing:
            try:
                first = self._queue.get(timeout=self._rest_s())
            except Empty:
                with self._turn:
                    self._tend()
                continue
            if first is None:
                return
            with self._turn:
                batch, closing = self._collect(first)
                for together in [[entry] for entry in batch] if self._one_by_one else [batch]:
                    if together:
                        self._commit(together)
                if time.monotonic() >= self._sync_due_s:
                    self._tend()

    def _rest_s(self) -> float | None:
        # Set the flag before the check: a later commit sees the flag, and the check sees earlier commits.
        self._rests = True
        patience_s = self._patience_s()
        self._rests = patience_s is None
        return patience_s

    def _collect(self, first: list[Entry]) -> tuple[list[Entry], bool]:
        """Take all waiting entries. Return them, and whether the committer is closing.

        If a sync takes longer than a short wait, and far fewer entries wait than last time, wait for others,
        which are probably about to arrive.
        """
        batch = first
        self._taken += len(first)
        closing = self._drain(batch)
        expects_more = self._usual_sync_s > 2 * _SLICE_S and len(batch) * 2 < self._last_size
        # A quick sync needs no window: entries gather while the current sync runs.
        window_s = 0.0 if self._usual_sync_s < self._quick_sync_s else self._window_s
        if batch and not closing and (window_s or expects_more):
            start_s = time.perf_counter()
            closing = self._linger(batch, window_s or self._window_max_s)
            if window_s:
                _set_held(batch, time.perf_counter() - start_s)
        self._last_size = len(batch)
        return batch, closing

    def _linger(self, batch: list[Entry], window_s: float) -> bool:
        """Wait in slices while each one brings more entries, up to `window_s`."""
        give_up_s = time.monotonic() + window_s
        closing = False
        while not closing and time.monotonic() < give_up_s:
            before = len(batch)
            self._pause(_SLICE_S)
            closing = self._drain(batch)
            if len(batch) == before:
                break
        return closing

    def _drain(self, batch: list[Entry]) -> bool:
        """Take queued entries, up to a limit in bytes. Returns whether the committer is closing."""
        byte_count = 0
        for _ in range(self._queue.qsize()):
            entries = self._queue.get_nowait()
            if entries is None:
                return True
            batch += entries
            self._taken += len(entries)
            byte_count += sum([entry.byte_count for entry in entries])
            if byte_count > _BATCH_BYTES_MAX:
                break
        return False

    def _commit(self, batch: list[Entry]) -> None:
        current = batch
        if batch[0].generation <= self._failed:
            current = [entry for entry in batch if entry.generation > self._failed]
            for entry in batch[: len(batch) - len(current)]:
                entry.error = self._failure
        if current:
            self._write(current)
        try:
            self._deliver(batch)
        except Exception:
            _LOGGER.exception("a commit could not be delivered")
        # The writers have their outcomes; the rest is not urgent.
        if current:
            self._account(current)
            self._plan()

    def _write(self, entries: list[Entry]) -> None:
        try:
            failure = commit_entries(self._log, entries)
        except Exception as error:
            # This is a defect of the program. Fail the entries, or their writers would wait indefinitely.
            _LOGGER.exception("a commit broke")
            failure = Unavailable(f"the commit broke: {error!r}")
            for entry in entries:
                entry.error = None if entry.position else failure
        if failure is not None:
            self._failures += 1
            self._failed = entries[-1].generation
            self._failure = failure

    def _plan(self) -> None:
        """Schedule the next sync, and prepare the next file if it is needed soon."""
        if self._log.is_durable:
            self._sync_due_s = float("inf")
        elif self._sync_due_s == float("inf"):
            self._sync_due_s = time.monotonic() + self._sync_interval_s
        if self._log.wants_next and self._prepared_in != self._log.end.file:
            self._prepared_in = self._log.end.file
            name = f"{self._thread.name}-next"
            self._preparer = threading.Thread(target=self._prepare, name=name, daemon=True)
            # No thread can start while the process ends. The rotation then allocates its file itself.
            with contextlib.suppress(RuntimeError):
                self._preparer.start()

    def _account(self, entries: list[Entry]) -> None:
        byte_count, sync_s = 0, 0.0
        for entry in entries:
            if entry.error is None:
                self._entries += 1
                self._frames += entry.frame_count
                byte_count += entry.byte_count
                sync_s = entry.sync_s
        self._bytes += byte_count
        self._batches += 1
        if sync_s:
            self._note_sync(sync_s, byte_count)

    def _note_sync(self, seconds: float, byte_count: int) -> None:
        if seconds > _STALL_S:
            self._wary_until_s = time.monotonic() + seconds * _WARY_FACTOR
        if byte_count <= _SMALL_BYTES:
            # The average falls immediately and rises slowly: a slow sync may have waited for a processor.
            usual_s = self._usual_sync_s
            self._usual_sync_s = usual_s + (seconds - usual_s) / 64 if 0 < usual_s < seconds else seconds
        if self._on_sync is not None:
            self._on_sync(seconds)

    def _prepare(self) -> None:
        # If there is no space for the file, the rotation reports it.
        with contextlib.suppress(PenstockError):
            self._log.prepare_next()

    def _patience_s(self) -> float | None:
        if self._sync_due_s != float("inf"):
            return max(0.0, self._sync_due_s - time.monotonic())
        return self._mark_after_s if self._log.wants_mark else None

    def _tend(self) -> None:
        """Do the work that is due while no entry waits: sync written entries, or mark the last sync."""
        try:
            if self._log.is_durable:
                self._log.mark()
            else:
                byte_count = self._log.end.offset - self._log.durable_end.offset
                start_s = time.perf_counter()
                self._log.sync()
                self._note_sync(time.perf_counter() - start_s, byte_count)
            self._sync_due_s = float("inf")
        except PenstockError:
            self._failures += 1
            self._sync_due_s = time.monotonic() + self._sync_interval_s
