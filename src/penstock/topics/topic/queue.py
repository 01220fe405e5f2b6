"""The state of one queue besides its records: its leases and the waiting claims."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from penstock.topics.model import ClaimResult, QueueCounts
from penstock.topics.topic.changes import Subscribers
from penstock.topics.topic.leases import JobState, LeaseTable, QueueEntry, WorkerSession
from penstock.topics.topic.topic_log import TopicLog


@dataclass(slots=True, kw_only=True, eq=False)
class ClaimRequest:
    """One claim for jobs, and the leases it received."""

    node: str
    want: int
    lease_ms: int
    session: WorkerSession | None = None
    """The connection that the jobs are for."""
    outcome: asyncio.Future[ClaimResult] | None = None
    leases: list[JobState] = field(default_factory=list)

    @property
    def has_left(self) -> bool:
        """Return whether the client is gone and will not receive its jobs."""
        is_done = self.outcome is not None and self.outcome.done()
        return is_done or (self.session is not None and not self.session.is_open)

    @property
    def missing(self) -> int:
        """Return how many more jobs the claim can receive now."""
        is_active = not self.has_left and (self.session is None or self.session.takes_jobs)
        return self.want - len(self.leases) if is_active else 0


class Queue:
    """The leases of the jobs in a log, and the waiting claims."""

    __slots__ = ("batch", "leases", "log", "reserving", "returned")

    def __init__(self, log: TopicLog) -> None:
        self.log = log
        self.leases = LeaseTable()
        self.returned = Subscribers()
        """Notified when jobs are returned or a worker has room again."""
        self.batch: list[ClaimRequest] = []
        """Claims that are served together."""
        self.reserving: asyncio.Future[float] | None = None
        """The reservation of lease numbers in progress."""

    def counts(self, now_ms: int) -> QueueCounts:
        """Return the current counts of the jobs. Call `TopicLog.retain` first."""
        leases, index = self.leases, self.log.index
        leases.refresh(index, self.log.steady_ms(now_ms))
        return QueueCounts(
            ready=leases.ready(index), in_flight=leases.in_flight, dead_lettered=leases.dead_lettered
        )

    def entry(self) -> QueueEntry:
        """Return the state of the queue for a snapshot, without its records."""
        log = self.log
        return self.leases.entry(with_leases=log.config.leases_durable, ahead_ms=log.wall_ahead_ms())
