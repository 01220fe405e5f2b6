"""Queues: topics whose records are jobs that workers lease and that are deleted when done.

`Queues` serves single calls. `WorkStream` sends jobs to a connected worker as they arrive, and releases the
leases of a worker that disconnects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from penstock.clock import SteadyClock
from penstock.topics.errors import BatchTooLarge, InvalidRequest, NotAQueue, TopicNotFound
from penstock.topics.limits import (
    CLAIM_MAX,
    LEASE_MS_MAX,
    LEASE_MS_MIN,
    NACK_DELAY_MS_MAX,
    NODE_BYTES_MAX,
    SEQS_MAX,
)
from penstock.topics.log.control import Deletion
from penstock.topics.log.frame import FrameType, encode_control
from penstock.topics.model import (
    AckResult,
    ClaimResult,
    ExtendResult,
    NackResult,
    NewRecord,
    WriteResult,
    parse_lease_ids,
)
from penstock.topics.queues.claims import (
    LeaseAllocator,
    reject_claims,
    serve_claim_batch,
)
from penstock.topics.queues.dead_letters import DeadLetters
from penstock.topics.topic.catalog import Catalog
from penstock.topics.topic.lease_log import LeaseEvent, dead_letter_frame, lease_frame
from penstock.topics.topic.leases import Job, JobState, Term, WorkerSession
from penstock.topics.topic.queue import ClaimRequest, Queue
from penstock.topics.topic.topic import Topic
from penstock.topics.workers import Workers
from penstock.topics.write.append import WriteOutcome, Writer

_NO_FENCE: Final = 0


class Queues:
    """The queues of a catalog. `check` raises while the engine serves no calls."""

    def __init__(
        self,
        catalog: Catalog,
        clock: SteadyClock,
        workers: Workers,
        writer: Writer,
        check: Callable[[], None],
    ) -> None:
        self._catalog = catalog
        self._clock = clock
        self._writer = writer
        self._check = check
        self._letters = DeadLetters(catalog, workers, self._write_letter, self._delete_letter)
        self._allocator = LeaseAllocator(catalog, clock, workers, self._letters)
        self._windows: dict[asyncio.Task[None], Queue] = {}

    def close(self) -> None:
        """Fail the claims that wait for their batch, because the engine is closing."""
        for window, queue in self._windows.items():
            window.cancel()
            batch, queue.batch = queue.batch, []
            reject_claims(batch)

    def check(self) -> None:
        """Raise if the engine serves no calls."""
        self._check()

    async def settle(self) -> None:
        """Wait until no dead letter is being written. No new one starts once the engine serves no calls."""
        await self._letters.settle()

    async def find(self, name: str) -> Topic:
        """Return the queue. Raise `TopicNotFound` or `NotAQueue`."""
        topic = self._catalog.find(name) or await self._catalog.settled(name)
        self._check()
        if topic is None:
            raise TopicNotFound(name)
        if topic.queue is None:
            raise NotAQueue(name)
        return topic

    def look(self, topic: Topic) -> int:
        """Expire leases and delays that are due. Return the steady time."""
        return self._allocator.look(topic, queue_of(topic).leases)

    # ---- claims --------------------------------------------------------------------------------------

    async def claim(
        self,
        topic: Topic,
        node: str,
        want: int,
        lease_ms: int | None,
        session: WorkerSession | None = None,
    ) -> ClaimResult:
        """Claim jobs. See `Engine.claim`. `session` records the jobs that are claimed for a connection."""
        self._check()
        check_node(node)
        request = ClaimRequest(
            node=node,
            want=min(max(want, 1), CLAIM_MAX),
            lease_ms=clamp_lease_ms(topic.config.lease_ms if lease_ms is None else lease_ms),
            session=session,
        )
        queue = queue_of(topic)
        if topic.config.claim_jitter_ms:
            return await self._join(topic, queue, request)
        return (await self._allocator.claim(topic, queue, [request]))[0]

    async def _join(self, topic: Topic, queue: Queue, request: ClaimRequest) -> ClaimResult:
        await asyncio.sleep(0)  # runs in a task from here on, so a claim whose client leaves takes no jobs
        self._check()
        request.outcome = asyncio.get_running_loop().create_future()
        queue.batch.append(request)
        if len(queue.batch) == 1:
            wait_s = topic.config.claim_jitter_ms / 1000
            window = asyncio.create_task(
                serve_claim_batch(queue, self._clock, wait_s, lambda batch: self._serve(topic, queue, batch))
            )
            self._windows[window] = queue
            window.add_done_callback(self._windows.pop)
        try:
            return await request.outcome
        except asyncio.CancelledError:
            self._allocator.release(topic, queue, [request])
            raise

    async def _serve(self, topic: Topic, queue: Queue, batch: Sequence[ClaimRequest]) -> list[ClaimResult]:
        self._check()
        if topic.deleted:
            raise TopicNotFound(topic.name)
        return await self._allocator.claim(topic, queue, batch)

    # ---- calls of workers ----------------------------------------------------------------------------

    async def ack(self, name: str, node: str, seqs: Sequence[int], lease_ids: Sequence[str]) -> AckResult:
        """Ack jobs. See `Engine.ack`."""
        fences = _checked(node, seqs, lease_ids)
        topic = await self.find(name)
        topic.shard.check_room()
        queue = queue_of(topic)
        held, skipped = self._held(topic, queue, node, seqs, fences)
        for seq, job in held:
            queue.leases.leave(seq, job)
        fsync_ms = 0.0
        if held:
            frames = self._frames(LeaseEvent.ACKED, topic, [job.at(seq) for seq, job in held])
            fsync_ms = await self._delete(topic, queue, [seq for seq, _ in held], frames)
        return AckResult(
            topic=name,
            acked=len(held),
            skipped=skipped,
            ready=queue.leases.ready(topic.log.index),
            in_flight=queue.leases.in_flight,
            fsync_ms=fsync_ms if topic.config.durable else 0.0,
        )

    async def nack(
        self, name: str, node: str, seqs: Sequence[int], lease_ids: Sequence[str], delay_ms: int
    ) -> NackResult:
        """Return jobs to the queue. See `Engine.nack`."""
        fences = _checked(node, seqs, lease_ids)
        topic = await self.find(name)
        queue = queue_of(topic)
        self._check_log(topic)
        held, skipped = self._held(topic, queue, node, seqs, fences)
        delay = Term.of(self._clock.steady_ms(), min(delay_ms, NACK_DELAY_MS_MAX)) if delay_ms else None
        for seq, job in held:
            queue.leases.release(seq, job, delay)
        queue.returned.notify()
        await self._log(LeaseEvent.RELEASED, topic, [job.at(seq) for seq, job in held])
        return NackResult(
            topic=name,
            nacked=len(held),
            skipped=skipped,
            ready=queue.leases.ready(topic.log.index),
            in_flight=queue.leases.in_flight,
        )

    async def extend(
        self, name: str, node: str, seqs: Sequence[int], lease_ids: Sequence[str], lease_ms: int
    ) -> ExtendResult:
        """Extend leases. See `Engine.extend`."""
        fences = _checked(node, seqs, lease_ids)
        topic = await self.find(name)
        queue = queue_of(topic)
        self._check_log(topic)
        term = Term.of(self._clock.steady_ms(), clamp_lease_ms(lease_ms))
        deadlines: dict[int, int] = {}
        held, skipped = self._held(topic, queue, node, seqs, fences)
        for seq, job in held:
            queue.leases.extend(seq, job, term)
            deadlines[seq] = term.until_ms + topic.log.wall_ahead_ms()
        await self._log(LeaseEvent.EXTENDED, topic, [job.at(seq) for seq, job in held])
        return ExtendResult(topic=name, deadlines_ms=deadlines, skipped=skipped)

    async def drop(self, topic: Topic, session: WorkerSession) -> None:
        """End the session of a closed connection. Its jobs are ready immediately."""
        queue = queue_of(topic)
        self.look(topic)
        dropped = queue.leases.drop(session)
        if dropped:
            queue.returned.notify()
            self._check_log(topic)
            await self._log(LeaseEvent.RELEASED, topic, dropped)

    def _held(
        self, topic: Topic, queue: Queue, node: str, seqs: Sequence[int], fences: Sequence[int]
    ) -> tuple[list[tuple[int, Job]], list[int]]:
        """Return the jobs that the node holds, each once, and the other sequence numbers."""
        self.look(topic)
        if queue.leases.hear(node, seqs, fences):
            queue.returned.notify()
        held: dict[int, Job] = {}
        skipped: list[int] = []
        for seq, fence in zip(seqs, fences, strict=True):
            job = None if seq in held else queue.leases.leased(seq, node, fence)
            if job is None:
                skipped.append(seq)
            else:
                held[seq] = job
        return list(held.items()), skipped

    # ---- the log -------------------------------------------------------------------------------------

    def _check_log(self, topic: Topic) -> None:
        if topic.config.leases_durable:
            topic.shard.check_room()

    async def _log(self, event: LeaseEvent, topic: Topic, jobs: Sequence[JobState]) -> None:
        frames = self._frames(event, topic, jobs)
        if frames:
            await topic.commit(frames)

    def _frames(self, event: LeaseEvent, topic: Topic, jobs: Sequence[JobState]) -> list[bytes]:
        """Return the frames of an event, or none unless the leases of the queue outlive the process."""
        if not topic.config.leases_durable:
            return []
        now_ms = self._clock.now_ms()
        ahead_ms = topic.log.wall_ahead_ms()
        return [lease_frame(event, topic.id, job.shifted(ahead_ms), ts_ms=now_ms) for job in jobs]

    async def _delete(
        self,
        topic: Topic,
        queue: Queue,
        seqs: Sequence[int],
        frames: Sequence[bytes],
        *,
        letters: int = 0,
    ) -> float:
        """Delete jobs that are leaving or moving in the table. If the commit fails, raise and keep them."""
        table = queue.leases
        deletion = Deletion(seqs=np.array(seqs, np.uint64), bound_head=topic.log.index.head_seq + 1)

        def apply() -> None:
            table.refresh(topic.log.index, self._clock.steady_ms())
            table.gone(seqs, topic.log.delete(deletion).deleted)
            table.dead_lettered += letters
            self._catalog.tally(topic)
            queue.returned.notify()

        def undo() -> None:
            table.stay(seqs)

        if topic.is_ephemeral and topic.log.index.earliest_seq > topic.log.kept_through:
            apply()
            return 0.0
        deleted = encode_control(FrameType.DELETE, topic.id, deletion.encode(), ts_ms=self._clock.now_ms())
        # Deletions free space on a full disk.
        return await topic.commit([*frames, deleted], apply=apply, undo=undo, urgent=True)

    async def _write_letter(self, name: str, record: NewRecord) -> WriteResult:
        self._check()
        outcome = WriteOutcome()
        self._writer.append(name, [record], outcome.settle, create=True, parsed=True)
        return await outcome.wait()

    async def _delete_letter(self, topic: Topic, seq: int) -> None:
        topic.shard.check_room()
        now_ms, deliveries = self._clock.now_ms(), topic.config.max_deliveries
        frame = dead_letter_frame(topic.id, seq, deliveries, ts_ms=now_ms)
        await self._delete(topic, queue_of(topic), [seq], [frame], letters=1)


def queue_of(topic: Topic) -> Queue:
    """Return the queue of a topic that `Queues.find` returned."""
    assert topic.queue is not None
    return topic.queue


def check_node(node: str) -> None:
    """Raise `InvalidRequest` unless this is a valid worker name."""
    if not node:
        raise InvalidRequest("node is empty; name the worker")
    try:
        size = len(node.encode())
    except UnicodeEncodeError:
        raise InvalidRequest("node holds half of a surrogate pair; send text that has a UTF-8 form") from None
    if size > NODE_BYTES_MAX:
        raise InvalidRequest(f"node has {size} bytes; at most {NODE_BYTES_MAX} are allowed")


def clamp_lease_ms(lease_ms: int) -> int:
    """Limit a lease to what the contract allows."""
    return min(max(lease_ms, LEASE_MS_MIN), LEASE_MS_MAX)


def _checked(node: str, seqs: Sequence[int], lease_ids: Sequence[str]) -> Sequence[int]:
    """Return the lease number that each job must be held under, or 0 for any."""
    fences = parse_lease_ids(lease_ids)
    check_node(node)
    if len(seqs) > SEQS_MAX:
        raise BatchTooLarge(
            f"{len(seqs)} seqs in one call; at most {SEQS_MAX} are allowed",
            {"seqs": len(seqs), "max": SEQS_MAX},
        )
    if fences and len(fences) != len(seqs):
        raise InvalidRequest(f"{len(fences)} lease_ids for {len(seqs)} seqs; send one for each, or none")
    return fences or [_NO_FENCE] * len(seqs)


_LOOK_EVERY_S: Final = 0.25
"""The interval of checks for ended leases and delays, which have no notification."""


class WorkStream:
    """The jobs of one connection: at most `max` at a time, refilled as they are acked or nacked.

    After one of its leases expires, no more jobs are sent until its node acks, nacks or extends one of the
    jobs delivered here, even late. A client that hangs thus costs the queue one delivery of `max` jobs.
    """

    def __init__(
        self,
        queues: Queues,
        topic: Topic,
        refresh: Callable[[], None],
        clock: SteadyClock,
        *,
        node: str,
        max: int,
        lease_ms: int | None,
    ) -> None:
        self._queues = queues
        self._topic = topic
        self._refresh = refresh
        self._clock = clock
        self._node = node
        self._most = min(max or 1, CLAIM_MAX)
        self._lease_ms = lease_ms
        self._session = WorkerSession(node)

    @property
    def held(self) -> int:
        """Return how many jobs the connection holds."""
        return len(self._session)

    @property
    def is_silent(self) -> bool:
        """Return whether all its leases expired, and it was silent for the length of another lease."""
        lease_ms = self._topic.config.lease_ms if self._lease_ms is None else self._lease_ms
        return self._session.is_unresponsive(self._clock.steady_ms(), clamp_lease_ms(lease_ms))

    async def next(self, wait_s: float) -> ClaimResult | None:
        """Return more jobs as soon as there are any and fewer than `max` are held.

        Return None at the timeout, or if the worker is silent. Raises `TopicNotFound` if the queue is gone,
        and the errors of a claim.
        """
        deadline_s = self._clock.monotonic() + wait_s
        queue = queue_of(self._topic)
        while True:
            with self._topic.subscribers.register() as published, queue.returned.register() as returned:
                jobs = await self._claim()
                if jobs is not None:
                    return jobs
                left_s = deadline_s - self._clock.monotonic()
                if left_s <= 0 or self.is_silent:
                    return None
                await self._wait({published, returned}, min(left_s, _LOOK_EVERY_S))

    async def _claim(self) -> ClaimResult | None:
        self._queues.check()
        if self._topic.deleted:
            raise TopicNotFound(self._topic.name)
        self._refresh()
        self._queues.look(self._topic)
        free = self._most - len(self._session)
        if free <= 0 or not self._session.takes_jobs:
            return None
        jobs = await self._queues.claim(self._topic, self._node, free, self._lease_ms, self._session)
        return jobs if jobs.seqs else None

    async def _wait(self, wakers: set[asyncio.Future[None]], at_most_s: float) -> None:
        timer = asyncio.ensure_future(self._clock.sleep(at_most_s))
        try:
            await asyncio.wait([*wakers, timer], return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()

    async def close(self) -> None:
        """Release all jobs that this stream still holds, so that they are ready for other workers."""
        if not self._topic.deleted:
            await self._queues.drop(self._topic, self._session)
