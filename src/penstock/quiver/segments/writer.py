"""Writing sealed segments to files in order, and retrying until each is on disk.

A segment that cannot be written stays in memory and is retried. Until it is on disk, `lowest_wal_start` keeps
its log entries, and the segments after it wait, so that segments appear in the order in which they were
sealed. Uploads use the same queue.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from penstock.clock import Clock
from penstock.errors import PenstockError, Unavailable
from penstock.metrics import Registry
from penstock.quiver.model import SegmentInfo
from penstock.retry import RetryPolicy

if TYPE_CHECKING:
    from penstock.quiver.model import SealedSegment
    from penstock.quiver.segments.store import SegmentStore

T = TypeVar("T")

_LOGGER = logging.getLogger(__name__)
_WAIT_S_MAX: Final = 60.0
_RETRY: Final = RetryPolicy(floor_s=0.1, ceiling_s=30.0)


@dataclass(slots=True, eq=False)
class _Job(Generic[T]):
    item: T
    number: int
    attempts: int = 0
    due_s: float = 0.0


class OrderedQueue(Generic[T]):
    """A queue that retries its first item until it succeeds. A thread processes it after `start`.

    `do` raises a `PenstockError` if an item has to be retried. It may call `finish` itself as soon as readers
    of `items` may count the item as done; otherwise the item is removed when `do` returns. Without the
    thread, `step` does the work, so that tests control each step.
    """

    def __init__(
        self,
        do: Callable[[T], None],
        *,
        what: str,
        clock: Clock,
        rng: random.Random,
        policy: RetryPolicy,
        on_failure: Callable[[T, PenstockError], None] | None = None,
    ) -> None:
        self._do = do
        self._what = what
        self._clock = clock
        self._rng = rng
        self._policy = policy
        self._on_failure = on_failure
        self._jobs: deque[_Job[T]] = deque()
        self._changed = threading.Condition()
        self._working = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._submitted = 0
        self._failures = 0
        self.last_error: PenstockError | None = None

    def __len__(self) -> int:
        return len(self._jobs)

    def items(self) -> list[T]:
        """Return the unfinished items in order."""
        with self._changed:
            return [job.item for job in self._jobs]

    def submit(self, item: T) -> None:
        """Append an item. Never wait for the work."""
        with self._changed:
            self._submitted += 1
            self._jobs.append(_Job(item, self._submitted))
            self._changed.notify_all()

    def step(self) -> bool:
        """Process the first item if it is due, and return whether it is done now.

        A failure is kept in `last_error`, and the next attempt is postponed. After `stop` nothing is
        processed.
        """
        with self._working:
            job = self._first_due()
            if job is None:
                return False
            try:
                self._do(job.item)
            except PenstockError as error:
                self._postpone(job, error)
                return False
            except Exception as error:
                # If the thread ended here, all later items would silently stay undone.
                _LOGGER.exception("%s failed unexpectedly", self._what)
                self._postpone(job, Unavailable(f"{self._what}: {type(error).__name__}: {error}"))
                return False
            self.finish(job.item)
            with self._changed:
                self._changed.notify_all()
            return True

    def finish(self, item: T) -> None:
        """Remove the first item if it is `item`."""
        with self._changed:
            if self._jobs and self._jobs[0].item is item:
                self._jobs.popleft()
                self.last_error = None

    def drain(self, timeout_s: float | None = None) -> None:
        """Return when everything submitted before is done.

        Postponed attempts are made now. Raise the error of an attempt that fails again, and `Unavailable` on
        a timeout or after `stop`. The items stay and are retried later.
        """
        if self._thread is None:
            self._drain_here()
            return
        deadline = None if timeout_s is None else self._clock.monotonic() + timeout_s
        with self._changed:
            target = self._submitted
            failures = self._hurry()
            while self._jobs and self._jobs[0].number <= target:
                if self._failures > failures and self.last_error is not None:
                    raise self.last_error
                self._check_running()
                left = None if deadline is None else deadline - self._clock.monotonic()
                if left is not None and left <= 0:
                    raise Unavailable(f"{self._what}: not finished in time; try again")
                self._changed.wait(left)
        # The last item is out of the queue, but its `do` may still be running.
        with self._working:
            return

    def start(self) -> None:
        """Start the worker thread."""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"quiver {self._what}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the current attempt. Call `drain` first: unfinished items stay in memory."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _drain_here(self) -> None:
        while self._jobs:
            with self._changed:
                self._check_running()
                self._hurry()
            if not self.step() and self.last_error is not None:
                raise self.last_error

    def _check_running(self) -> None:
        # The caller of `stop` may have released the files, so they must not be written any more.
        if self._stopping:
            raise Unavailable(f"{self._what}: stopped before it was finished")

    def _hurry(self) -> int:
        """Make every attempt due now and return the number of failures so far."""
        for job in self._jobs:
            job.due_s = 0.0
        self._changed.notify_all()
        return self._failures

    def _first_due(self) -> _Job[T] | None:
        with self._changed:
            return self._jobs[0] if self._ready() and not self._stopping else None

    def _postpone(self, job: _Job[T], error: PenstockError) -> None:
        span = min(self._policy.ceiling_s, self._policy.floor_s * 2.0 ** min(job.attempts, 30))
        wait_s = span * self._rng.uniform(0.5, 1.0)
        _LOGGER.error("%s failed, next attempt in %.1f s: %s", self._what, wait_s, error)
        if self._on_failure is not None:
            self._on_failure(job.item, error)
        with self._changed:
            job.attempts += 1
            self._failures += 1
            job.due_s = self._clock.monotonic() + wait_s
            self.last_error = error
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._stopping and not self._ready():
                    self._changed.wait(self._wait_s())
                if self._stopping:
                    return
            self.step()

    def _ready(self) -> bool:
        return bool(self._jobs) and self._jobs[0].due_s <= self._clock.monotonic()

    def _wait_s(self) -> float | None:
        if not self._jobs:
            return None
        return min(_WAIT_S_MAX, max(0.0, self._jobs[0].due_s - self._clock.monotonic()))


@dataclass(frozen=True, slots=True, eq=False)
class _Numbered:
    sealed: SealedSegment
    seq: int


class SegmentWriter:
    """Writes sealed segments in order, on a thread after `start`.

    Without the thread, `step` does the work. `on_written` is called after each segment, when its log entries
    are no longer needed. Its exceptions are logged.
    """

    def __init__(
        self,
        store: SegmentStore,
        *,
        next_seq: int,
        on_written: Callable[[SegmentInfo], None],
        clock: Clock,
        rng: random.Random,
        registry: Registry,
        policy: RetryPolicy = _RETRY,
    ) -> None:
        self._store = store
        self._next_seq = next_seq
        self._on_written = on_written
        self._clock = clock
        self._numbering = threading.Lock()
        self._work: OrderedQueue[_Numbered] = OrderedQueue(
            self._write,
            what="writing a segment",
            clock=clock,
            rng=rng,
            policy=policy,
            on_failure=self._count_failure,
        )
        self._seconds = registry.histogram("quiver.finalize.seconds", "Time to write one segment.")
        self._failures = registry.counter(
            "quiver.finalize.failures_total", "Failed attempts to write a segment."
        )
        self._triggers = registry.counter(
            "quiver.finalize.trigger", "Sealed segments by trigger.", ["trigger"]
        )

    @property
    def last_error(self) -> PenstockError | None:
        """The error of the last attempt to write the first segment, or None if it has not failed."""
        return self._work.last_error

    @property
    def next_seq(self) -> int:
        """The number of the next sealed segment."""
        return self._next_seq

    @property
    def first_unwritten_seq(self) -> int:
        """The lowest number that is not on disk. A checkpoint stores it, so that no number is skipped."""
        with self._numbering:
            waiting = self._work.items()
            return waiting[0].seq if waiting else self._next_seq

    def waiting(self) -> list[tuple[int, int]]:
        """Return the number and size of every sealed segment. One that was just written may be included."""
        return [(each.seq, each.sealed.byte_count) for each in self._work.items()]

    @property
    def byte_count(self) -> int:
        """The size of the segments that are sealed and not yet on disk, in bytes."""
        return sum(each.sealed.byte_count for each in self._work.items())

    @property
    def count(self) -> int:
        """The number of segments that are sealed and not yet on disk."""
        return len(self._work)

    def lowest_wal_start(self) -> int | None:
        """Return the lowest log position that a sealed segment still needs, or None if all are on disk."""
        return min((each.sealed.wal_start for each in self._work.items()), default=None)

    def submit(self, sealed: SealedSegment) -> int:
        """Queue a sealed segment and return its number. Never wait for the disk.

        Call it under the lock under which the segment was sealed. Then numbers follow the order of sealing,
        and the segment is always either open or in this queue.
        """
        with self._numbering:
            seq = self._next_seq
            self._next_seq += 1
            self._work.submit(_Numbered(sealed, seq))
        self._triggers.inc(trigger=sealed.trigger.value)
        return seq

    def step(self) -> bool:
        """Write the first segment if it is due, and return whether it is on disk now."""
        return self._work.step()

    def drain(self, timeout_s: float | None = None) -> None:
        """Return when every segment submitted before is on disk and `on_written` was called for it.

        Raise the error of a failed attempt, and `Unavailable` on a timeout. The segments stay and are retried
        later.
        """
        self._work.drain(timeout_s)

    def start(self) -> None:
        """Start the writer thread."""
        self._work.start()

    def stop(self) -> None:
        """End the thread after the current write. Call `drain` first: unwritten segments stay in memory."""
        self._work.stop()

    def _write(self, numbered: _Numbered) -> None:
        started = self._clock.monotonic()
        info = self._store.write(numbered.sealed, numbered.seq)
        self._seconds.observe(self._clock.monotonic() - started)
        self._work.finish(numbered)
        try:
            self._on_written(info)
        except Exception:
            _LOGGER.exception("segment %d is on disk, but its callback failed", info.seq)

    def _count_failure(self, numbered: _Numbered, error: PenstockError) -> None:
        self._failures.inc()
