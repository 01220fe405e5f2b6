"""The state of one queue beside its records: its leases, and the claims that wait for jobs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from penstock.topics.model import ClaimResult, QueueCounts
from penstock.topics.topic.changes import Subscribers
from penstock.topics.topic.leases import JobState, LeaseTable, QueueEntry, WorkerSession
from penstock.topics.topic.topic_log import TopicLog


@dataclass(slots=True, kw_only=True, eq=False)
class ClaimRequest:
    """One claim for jobs, and the leases it was given."""

    node: str
    want: int
    lease_ms: int
    session: WorkerSession | None = None
    """Of the connection that the jobs are for."""
    outcome: asyncio.Future[ClaimResult] | None = None
    leases: list[JobState] = field(default_factory=list)

    @property
    def has_left(self) -> bool:
        """Whether the client is gone and will not see its jobs."""
        is_told = self.outcome is not None and self.outcome.done()
        return is_told or (self.session is not None and not self.session.is_open)

    @property
    def missing(self) -> int:
        """How many jobs it would take now."""
        is_there = not self.has_left and (self.session is None or self.session.takes_jobs)
        return self.want - len(self.leases) if is_there else 0


class Queue:
    """The leases of the jobs in a log, and the claims that wait."""

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
        """The counts of the jobs now. Call `TopicLog.retain` before."""
        leases, index = self.leases, self.log.index
        leases.refresh(index, self.log.steady_ms(now_ms))
        return QueueCounts(
            ready=leases.ready(index), in_flight=leases.in_flight, dead_lettered=leases.dead_lettered
        )

    def entry(self) -> QueueEntry:
        """Return the state of the queue for a snapshot, without its records."""
        log = self.log
        return self.leases.entry(with_leases=log.config.leases_durable, ahead_ms=log.wall_ahead_ms())
