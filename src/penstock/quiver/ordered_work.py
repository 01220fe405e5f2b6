"""Work that must be done in order and may fail: the first piece is tried until it succeeds, then the next."""

from __future__ import annotations

import logging
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from penstock.clock import Clock
from penstock.errors import PenstockError, Unavailable
from penstock.retry import RetryPolicy

__all__ = ["OrderedWork"]

T = TypeVar("T")

_LOGGER = logging.getLogger(__name__)
_WAIT_S_MAX: Final = 60.0


@dataclass(slots=True, eq=False)
class _Job(Generic[T]):
    item: T
    number: int
    attempts: int = 0
    due_s: float = 0.0


class OrderedWork(Generic[T]):
    """A queue of items and what does them, on a thread of its own once `start` was called.

    `do` raises a `PenstockError` when an item has to be tried again. It may itself take the item out with
    `finish`, as soon as the item is done in the sense of whoever looks at `items`; otherwise it is out when
    `do` returns. Without the thread `step` does the work, which is how tests own every moment of it.
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
        """What is not done yet, first to last."""
        with self._changed:
            return [job.item for job in self._jobs]

    def submit(self, item: T) -> None:
        """Put an item at the end. Never waits for the work."""
        with self._changed:
            self._submitted += 1
            self._jobs.append(_Job(item, self._submitted))
            self._changed.notify_all()

    def step(self) -> bool:
        """Do the first item if its time has come. Whether it is done now.

        A failure is kept in `last_error`, and the next attempt is put off. After `stop` nothing is done.
        """
        with self._working:
            job = self._first_due()
            if job is None:
                return False
            try:
                self._do(job.item)
            except PenstockError as error:
                self._put_off(job, error)
                return False
            except Exception as error:
                # A thread that ended here would leave everything behind it undone, and nobody would know.
                _LOGGER.exception("%s failed in an unforeseen way", self._what)
                self._put_off(job, Unavailable(f"{self._what}: {type(error).__name__}: {error}"))
                return False
            self.finish(job.item)
            with self._changed:
                self._changed.notify_all()
            return True

    def finish(self, item: T) -> None:
        """Take the first item out, if it is this one."""
        with self._changed:
            if self._jobs and self._jobs[0].item is item:
                self._jobs.popleft()
                self.last_error = None

    def drain(self, timeout_s: float | None = None) -> None:
        """Return when everything submitted before is done.

        Attempts that were put off are made at once. Raises the error of one that fails again, and
        `Unavailable` when the time is over, or the work was stopped; the items stay and are tried again
        later.
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
                    raise Unavailable(f"{self._what}: not done yet; ask again")
                self._changed.wait(left)
        # The last one is out of the queue, but its announcement may still be under way.
        with self._working:
            return

    def start(self) -> None:
        """Work on a thread of its own from here on."""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"quiver {self._what}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the attempt that is under way. What is left stays in memory; drain before."""
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
        # Whoever stopped it may have let go of the files: nobody else may write them any more.
        if self._stopping:
            raise Unavailable(f"{self._what}: stopped before it was done")

    def _hurry(self) -> int:
        """Let every attempt be due now; how many have failed so far."""
        for job in self._jobs:
            job.due_s = 0.0
        self._changed.notify_all()
        return self._failures

    def _first_due(self) -> _Job[T] | None:
        with self._changed:
            return self._jobs[0] if self._ready() and not self._stopping else None

    def _put_off(self, job: _Job[T], error: PenstockError) -> None:
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
