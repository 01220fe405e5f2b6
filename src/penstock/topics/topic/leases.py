"""The lease table of a queue: which worker holds which job. Its state changes only with time and calls.

A record of a queue is a job. A job that was never delivered has no entry here; such jobs are at or above
`cursor` in the topic's index. A delivered job has an entry until it is gone:

    ready --claim--> leased --ack--> leaving --committed--> gone
      ^                |  |
      |   expiry, nack |  | nack with a delay
      +----------------+  +--> delayed --time--> ready
      +--claim after the last delivery--> moving --committed--> gone (to the dead letters)
                                            |
                                            +--letter refused--> stuck, until letters are accepted again

No method waits, writes or reads a clock. The caller passes `now_ms` and the index, and calls `refresh` before
any method that depends on them. Counts are always exact. Times are the steady time of the process, which is
independent of steps of the wall clock. Only snapshots and the log use wall time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple

import msgspec
import numpy as np

from penstock.topics.limits import LEASE_MS_MAX
from penstock.topics.segments.columns import DEAD
from penstock.topics.topic.index import TopicIndex


class WorkerSession:
    """The jobs of one connection of a node. The worker may be dead while `expired` is not empty."""

    __slots__ = ("expired", "expired_ms", "is_open", "node", "seqs")

    def __init__(self, node: str) -> None:
        self.node = node
        self.is_open = True
        self.seqs: set[int] = set()
        """Jobs that were delivered and are neither finished nor expired."""
        self.expired: dict[int, int] = {}
        """The lease number of every job that expired since the last message from the worker."""
        self.expired_ms = 0
        """When the last of these leases ended."""

    def __len__(self) -> int:
        return len(self.seqs)

    @property
    def takes_jobs(self) -> bool:
        """Return whether jobs may be sent.

        No jobs are sent after the session closed, or after a lease expired and before the next message of the
        worker.
        """
        return self.is_open and not self.expired

    def expire(self, seq: int, lease_id: int, until_ms: int) -> None:
        """Record a lease that was not acked, nacked or extended in time."""
        if self.is_open:
            self.expired[seq] = lease_id
            self.expired_ms = max(self.expired_ms, until_ms)

    def lost(self, seq: int, lease_id: int) -> bool:
        """Return whether the job's lease expired in this session. A `lease_id` of 0 matches any lease."""
        expired = self.expired.get(seq)
        return expired is not None and lease_id in (0, expired)

    def is_unresponsive(self, now_ms: int, patience_ms: int) -> bool:
        """Return whether all leases expired and the worker was silent for `patience_ms` since then."""
        return bool(self.expired) and not self.seqs and now_ms - self.expired_ms > patience_ms


READY: Final = 0
LEASED: Final = 1
DELAYED: Final = 2
LEAVING: Final = 3
MOVING: Final = 4
STUCK: Final = 5
"""A ready job that had its last delivery, but whose dead letter was refused."""
_STATES: Final = 6

_WINDOW_MIN: Final = 64
_WINDOW_MAX: Final = 4096
_SPARE: Final = 1024
"""The number of stale heap entries that is always tolerated before a heap is rebuilt."""


class Term(NamedTuple):
    """The end and the length of a lease or a delay."""

    until_ms: int
    length_ms: int

    @classmethod
    def of(cls, now_ms: int, length_ms: int) -> Term:
        """Return the term that starts now and lasts for `length_ms`."""
        return cls(now_ms + length_ms, length_ms)


class Job:
    """A job that was delivered at least once, or is about to be."""

    __slots__ = ("deliveries", "lease_id", "length_ms", "node", "session", "state", "until_ms")

    def __init__(self) -> None:
        self.state = READY
        self.deliveries = 0
        self.lease_id = 0
        self.node = ""
        self.until_ms = 0
        """When the lease ends, or when a delayed job is ready again."""
        self.length_ms = 0
        """The full length of the lease or delay."""
        self.session: WorkerSession | None = None
        """The connection that the job was delivered on, or None if there was no connection."""

    def at(self, seq: int) -> JobState:
        """Return the state of the job."""
        node = self.node if self.lease_id else ""
        return JobState(seq, self.deliveries, self.lease_id, self.until_ms, node, self.length_ms)


class JobState(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The state of one job at one moment, as workers, the log and snapshots see it.

    `until_ms` is the end of the lease. Without a lease id it is the time at which the job is ready again, or
    0 for immediately. `length_ms` is the full length of the lease or delay, or 0 if a snapshot does not
    contain it.
    """

    seq: int
    deliveries: int
    lease_id: int = 0
    until_ms: int = 0
    node: str = ""
    length_ms: int = 0

    def shifted(self, ahead_ms: int) -> JobState:
        """Return the same state with its times moved `ahead_ms` later."""
        if not self.until_ms or not ahead_ms:
            return self
        return msgspec.structs.replace(self, until_ms=max(self.until_ms + ahead_ms, 1))


class QueueEntry(msgspec.Struct, frozen=True, array_like=True):
    """The state of a queue in a snapshot, without its records."""

    next_lease_id: int
    """The lowest lease number that was never used."""
    dead_lettered: int
    jobs: tuple[JobState, ...] = ()


class Selection(NamedTuple):
    """Jobs to deliver now, and jobs that had their last delivery. Both ascend and are no longer queued."""

    seqs: list[int]
    exhausted: list[int]


class LeaseTable:
    """The delivered jobs of one queue, their leases, and the position of the first fresh job."""

    __slots__ = (
        "_counts",
        "_jobs",
        "_limit",
        "_lows",
        "_picked",
        "_reclaim",
        "_stuck",
        "_timers",
        "_unresponsive",
        "cursor",
        "dead_lettered",
        "next_lease_id",
        "reserved_lease_id",
        "version",
    )

    def __init__(self) -> None:
        self._jobs: dict[int, Job] = {}
        self._counts = [0] * _STATES
        self._reclaim: list[int] = []
        self._stuck: deque[int] = deque()
        """A queue that is served in turn, so that one refused dead letter does not block the others."""
        self._limit = 0
        """The delivery limit that made these jobs stuck."""
        self._unresponsive: set[WorkerSession] = set()
        """Connections whose leases expired and that have not sent a message since."""
        self._timers: list[tuple[int, int]] = []
        """(due time, sequence number) pairs. Stale entries are ignored."""
        self._lows: list[int] = []
        """A heap of the jobs' sequence numbers, lowest first. Some jobs may already be deleted."""
        self._picked = 0
        """The index's count of individual deletions when the jobs were last compared with it."""
        self.cursor = 1
        self.next_lease_id = 1
        self.reserved_lease_id = 1
        """The lease number to continue with after a crash; no lower number is used again."""
        self.dead_lettered = 0
        self.version = 0
        """A counter that rises with every change that a snapshot must include."""

    def __len__(self) -> int:
        return len(self._jobs)

    # ---- time and deletion ---------------------------------------------------------------------------

    def refresh(self, index: TopicIndex, now_ms: int) -> None:
        """Apply expired leases and delays, and drop jobs whose records were deleted, evicted or expired."""
        if self._picked != index.picked:
            self._drop_dead(index)
        lows = self._lows
        while lows and lows[0] < index.earliest_seq:
            self._drop(heappop(lows))
        if len(lows) > 2 * len(self._jobs) + _SPARE:
            self._lows = sorted(self._jobs)
        timers = self._timers
        while timers and timers[0][0] <= now_ms:
            when_ms, seq = heappop(timers)
            job = self._jobs.get(seq)
            if job is not None and when_ms == _due_ms(job):
                self._expire(seq, job)
                self._set_ready(seq, job)
        if len(timers) > 2 * (self._counts[LEASED] + self._counts[DELAYED]) + _SPARE:
            self._rebuild_timers()

    def _expire(self, seq: int, job: Job) -> None:
        if job.session is not None and job.session.is_open:
            job.session.expire(seq, job.lease_id, job.until_ms)
            self._unresponsive.add(job.session)

    def _rebuild_timers(self) -> None:
        self._timers = [(due, seq) for seq, job in self._jobs.items() if (due := _due_ms(job))]
        heapify(self._timers)

    def _drop_dead(self, index: TopicIndex) -> None:
        self._picked = index.picked
        if self._jobs:
            seqs = np.array(sorted(self._jobs), np.uint64)
            for seq in seqs[~index.are_live(seqs)].tolist():
                self._drop(seq)

    def _drop(self, seq: int) -> None:
        job = self._jobs.pop(seq, None)
        if job is not None:
            self.version += 1
            self._counts[job.state] -= 1
            if job.session is not None:
                job.session.seqs.discard(seq)

    def _set(self, seq: int, job: Job, state: int) -> None:
        self.version += 1
        self._counts[job.state] -= 1
        self._counts[state] += 1
        job.state = state
        if state != LEASED and state != LEAVING and job.session is not None:
            job.session.seqs.discard(seq)
            job.session = None

    def _set_ready(self, seq: int, job: Job) -> None:
        self._set(seq, job, READY)
        job.lease_id = job.until_ms = job.length_ms = 0
        heappush(self._reclaim, seq)

    # ---- counting ------------------------------------------------------------------------------------

    def ready(self, index: TopicIndex) -> int:
        """Return the number of jobs that a claim could get now."""
        counts = self._counts
        return index.live - counts[LEASED] - counts[DELAYED] - counts[LEAVING] - counts[MOVING]

    @property
    def in_flight(self) -> int:
        """Return the number of leased jobs, including those whose ack is being committed."""
        return self._counts[LEASED] + self._counts[LEAVING]

    # ---- delivery ------------------------------------------------------------------------------------

    def select(
        self, index: TopicIndex, count: int, *, deliveries_max: int = 0, letters: int = 1
    ) -> Selection:
        """Select up to `count` jobs: first returned ones, lowest number first, then fresh ones.

        Selected jobs are no longer ready. Deliver them (`lease`, `move`) or return them (`release`) in the
        same step. With `deliveries_max`, jobs that reached this limit are returned separately, at most
        `letters` of them, with stuck jobs last. If `letters` is 0, they become stuck.
        """
        if deliveries_max != self._limit:
            self._limit = deliveries_max
            self._unstick()
        seqs, exhausted = self._reclaimed(count, deliveries_max, letters)
        while self._stuck and len(exhausted) < letters:
            seq = self._stuck.popleft()
            job = self._jobs.get(seq)
            if job is not None and job.state == STUCK:
                exhausted.append(seq)
        if len(seqs) < count and not self._reclaim:
            seqs += self._fresh(index, count - len(seqs))
            seqs.sort()
        return Selection(seqs, exhausted)

    def _reclaimed(self, count: int, deliveries_max: int, letters: int) -> Selection:
        """Select returned jobs that are ready, until either part is full."""
        found = Selection([], [])
        reclaim = self._reclaim
        while reclaim and len(found.seqs) < count and (not letters or len(found.exhausted) < letters):
            seq = heappop(reclaim)
            job = self._jobs.get(seq)
            if job is None or job.state != READY:
                continue
            if not deliveries_max or job.deliveries < deliveries_max:
                found.seqs.append(seq)
            elif letters:
                found.exhausted.append(seq)
            else:
                self._park(seq, job)
        return found

    def _park(self, seq: int, job: Job) -> None:
        self._set(seq, job, STUCK)
        self._stuck.append(seq)

    def _unstick(self) -> None:
        """Make stuck jobs ready again, because the delivery limit has changed."""
        stuck, self._stuck = self._stuck, deque()
        for seq in stuck:
            job = self._jobs.get(seq)
            if job is not None and job.state == STUCK:
                self._set_ready(seq, job)

    @property
    def has_undeliverable(self) -> bool:
        """Return whether there are stuck jobs, whose dead letters were refused."""
        return bool(self._stuck)

    def _fresh(self, index: TopicIndex, count: int) -> list[int]:
        found: list[int] = []
        at = max(self.cursor, index.earliest_seq)
        while len(found) < count and at <= index.head_seq:
            part = index.run_from(at)
            if part is None:
                at = index.head_seq + 1
                break
            run, place = part
            at = run.first_seq + place
            if count == 1 and not run.flag(place) & DEAD:
                live, stop = [at], place + 1
            else:
                stop = min(run.count, place + min(max(2 * count, _WINDOW_MIN), _WINDOW_MAX))
                live = (np.flatnonzero(run.is_live(place, stop)) + at).tolist()
            at = run.first_seq + stop
            for seq in live:
                if seq not in self._jobs:
                    found.append(seq)
                    self._enter(seq)
                    if len(found) == count:
                        at = seq + 1
                        break
        self.cursor = at
        return found

    def _enter(self, seq: int) -> Job:
        job = self._jobs[seq] = Job()
        self._counts[READY] += 1
        heappush(self._lows, seq)
        return job

    def lease(self, seq: int, node: str, term: Term, session: WorkerSession | None = None) -> JobState:
        """Deliver a selected job under a new lease number."""
        job = self._jobs[seq]
        self._set(seq, job, LEASED)
        job.deliveries += 1
        job.lease_id = self.next_lease_id
        self.next_lease_id += 1
        job.node, job.session = node, session
        if session is not None:
            session.seqs.add(seq)
        self._set_timer(seq, job, term)
        return job.at(seq)

    def _set_timer(self, seq: int, job: Job, term: Term) -> None:
        self.version += 1
        job.until_ms, job.length_ms = term
        heappush(self._timers, (_due_ms(job), seq))

    # ---- calls of workers ----------------------------------------------------------------------------

    def leased(self, seq: int, node: str, lease_id: int = 0) -> Job | None:
        """Return the job if this node holds it, under `lease_id` unless that is 0. Otherwise return None."""
        job = self._jobs.get(seq)
        if job is None or job.state != LEASED or job.node != node:
            return None
        return job if not lease_id or lease_id == job.lease_id else None

    def extend(self, seq: int, job: Job, term: Term) -> None:
        """Extend the lease to this term."""
        self._set_timer(seq, job, term)

    def release(self, seq: int, job: Job, delay: Term | None = None) -> None:
        """Make the job ready again, immediately or after a delay."""
        if delay is None:
            self._set_ready(seq, job)
            return
        self._set(seq, job, DELAYED)
        job.lease_id = 0
        self._set_timer(seq, job, delay)

    def hear(self, node: str, seqs: Sequence[int], fences: Sequence[int]) -> bool:
        """Mark the connections of the named jobs and leases as alive. Return whether one of them was silent.

        A lease number of 0 stands for any lease. A job that was delivered twice counts for the connection of
        the named lease, or without a lease number for the connection that holds it now.
        """
        alive = [
            session
            for session in self._unresponsive
            if session.node == node
            and any(self._is_from(session, seq, fence) for seq, fence in zip(seqs, fences, strict=True))
        ]
        for session in alive:
            session.expired.clear()
            self._unresponsive.discard(session)
        return bool(alive)

    def _is_from(self, session: WorkerSession, seq: int, lease_id: int) -> bool:
        job = self.leased(seq, session.node, lease_id)
        return session.lost(seq, lease_id) if job is None else job.session is session

    def drop(self, session: WorkerSession) -> list[JobState]:
        """Release the jobs that a closed connection still holds, and return them."""
        session.is_open = False
        session.expired.clear()
        self._unresponsive.discard(session)
        dropped: list[JobState] = []
        for seq in sorted(session.seqs):
            job = self._jobs.get(seq)
            if job is not None and job.state == LEASED and job.session is session:
                self._set_ready(seq, job)
                dropped.append(job.at(seq))
        return dropped

    def give_back(self, lease: JobState, delay: Term | None = None) -> JobState | None:
        """End a lease that was never sent to a worker, without counting a delivery.

        Return the state of the job, or None if the lease had already ended.
        """
        job = self.leased(lease.seq, lease.node, lease.lease_id)
        if job is None:
            return None
        job.deliveries -= 1
        self.release(lease.seq, job, delay)
        return job.at(lease.seq)

    # ---- removal -------------------------------------------------------------------------------------

    def leave(self, seq: int, job: Job) -> None:
        """Mark a job whose ack is being committed. It is not delivered, and its lease does not expire."""
        self._set(seq, job, LEAVING)

    def move(self, seq: int) -> Job:
        """Mark a selected job as moving to the dead letters."""
        job = self._jobs[seq]
        self._set(seq, job, MOVING)
        return job

    def stay(self, seqs: Iterable[int]) -> None:
        """Undo `leave` and `move`: restore the leases, and park jobs that were to be moved."""
        for seq in seqs:
            job = self._jobs.get(seq)
            if job is None:
                continue
            if job.state == LEAVING:
                self._set(seq, job, LEASED)
                self._set_timer(seq, job, Term(job.until_ms, job.length_ms))
            elif job.state == MOVING:
                self._park(seq, job)

    def gone(self, seqs: Iterable[int], removed: int) -> None:
        """Drop jobs that were deleted from the index, `removed` of them since the last `refresh`."""
        self._picked += removed
        for seq in seqs:
            self._drop(seq)

    # ---- snapshots and recovery ----------------------------------------------------------------------

    def entry(self, *, with_leases: bool, ahead_ms: int = 0) -> QueueEntry:
        """Return the state for a snapshot: numbers, deliveries, and leases if they outlive the process.

        `ahead_ms` is how far the wall clock is ahead of the steady time of this table.
        """
        jobs = tuple(
            job.at(seq).shifted(ahead_ms) if with_leases else JobState(seq, job.deliveries)
            for seq, job in sorted(self._jobs.items())
            if job.deliveries
        )
        return QueueEntry(max(self.next_lease_id, self.reserved_lease_id), self.dead_lettered, jobs)

    def restore(self, entry: QueueEntry) -> None:
        """Load the state that a snapshot stored."""
        self.saw_lease_id(entry.next_lease_id - 1)
        self.dead_lettered = entry.dead_lettered
        for job in entry.jobs:
            self.put(job)

    def put(self, entry: JobState) -> None:
        """Set the state of a job, replacing any earlier state."""
        self.saw_lease_id(entry.lease_id)
        self._drop(entry.seq)
        job = self._enter(entry.seq)
        job.deliveries, job.lease_id, job.node = entry.deliveries, entry.lease_id, entry.node
        if entry.lease_id:
            self._set(entry.seq, job, LEASED)
            self._set_timer(entry.seq, job, Term(entry.until_ms, entry.length_ms))
        else:
            delay = Term(entry.until_ms, entry.length_ms) if entry.until_ms else None
            self.release(entry.seq, job, delay)

    def reserve(self, below: int) -> None:
        """Record that a start after a crash uses no lease number below this one."""
        self.version += 1
        self.reserved_lease_id = max(self.reserved_lease_id, below)

    def saw_lease_id(self, lease_id: int) -> None:
        """Mark this number and every lower one as used."""
        self.next_lease_id = max(self.next_lease_id, lease_id + 1)
        self.reserved_lease_id = max(self.reserved_lease_id, self.next_lease_id)

    def end_leases(self) -> None:
        """End all leases and delays during recovery. Call `settle` afterwards."""
        for seq, job in self._jobs.items():
            self._set(seq, job, READY)
            job.lease_id = job.until_ms = job.length_ms = 0

    def settle(self, index: TopicIndex, now_ms: int, *, with_leases: bool) -> None:
        """Finish recovery. Without leases that outlive the process, every job is ready.

        The wall clock may have been set back since a lease was stored. A restored lease therefore lasts at
        most its own length.
        """
        if not with_leases:
            self.end_leases()
        for job in self._jobs.values():
            job.until_ms = min(job.until_ms, now_ms + (job.length_ms or LEASE_MS_MAX))
        # The heaps may hold a job several times if its state was restored several times.
        self._reclaim = sorted(seq for seq, job in self._jobs.items() if job.state == READY)
        self._lows = sorted(self._jobs)
        self._rebuild_timers()
        self._picked = -1
        self.cursor = index.earliest_seq
        self.refresh(index, now_ms)


def _due_ms(job: Job) -> int:
    """Return when time changes the state of a job, or 0 if it does not.

    A lease includes its last millisecond.
    """
    if job.state == LEASED:
        return job.until_ms + 1
    return job.until_ms if job.state == DELAYED else 0
