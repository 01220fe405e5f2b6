"""Claims: one pass over the ready jobs serves one claim, or all claims of a short window.

Claims of one window share the jobs fairly.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from penstock.clock import Clock, SteadyClock
from penstock.errors import PenstockError
from penstock.topics.errors import Damaged, ShuttingDown, TopicNotFound
from penstock.topics.model import ClaimResult
from penstock.topics.queues.dead_letters import DeadLetters
from penstock.topics.queues.reading import read_jobs
from penstock.topics.read.render import Style
from penstock.topics.topic.catalog import Catalog
from penstock.topics.topic.lease_log import LEASES_RESERVED_MAX, LeaseEvent, lease_frame, reservation_frame
from penstock.topics.topic.leases import JobState, LeaseTable, Term
from penstock.topics.topic.queue import ClaimRequest, Queue
from penstock.topics.topic.topic import Topic
from penstock.topics.workers import Workers


def round_robin(seqs: Sequence[int], wants: Sequence[int]) -> list[list[int]]:
    """Distribute jobs to claims round-robin, none more than it wants.

    Each result keeps the order of `seqs`.
    """
    if len(wants) == 1:
        return [list(seqs[: wants[0]])]
    hands: list[list[int]] = [[] for _ in wants]
    left = list(wants)
    turn = [place for place, want in enumerate(wants) if want]
    at = 0
    while at < len(seqs) and turn:
        for place in turn:
            if at == len(seqs):
                break
            hands[place].append(seqs[at])
            left[place] -= 1
            at += 1
        turn = [place for place in turn if left[place]]
    return hands


_STYLE: Final = Style(include_tags=True, include_node=False)
_LETTERS: Final = 16
_LETTERS_MAX: Final = 1000
"""The dead letters that a pass writes at first, doubling each time, and in total."""
_RESERVE_MIN: Final = 4096
_RESERVE_CLAIMS: Final = 16
"""How many lease numbers are reserved together: one sync for at least this many equal claims."""


class LeaseAllocator:
    """The allocation of one pass: select, distribute, lease, log, read."""

    def __init__(self, catalog: Catalog, clock: SteadyClock, workers: Workers, letters: DeadLetters) -> None:
        self._catalog = catalog
        self._clock = clock
        self._workers = workers
        self._letters = letters

    async def claim(self, topic: Topic, queue: Queue, requests: Sequence[ClaimRequest]) -> list[ClaimResult]:
        """Lease as many jobs to the claims as there are. After an error no job is leased."""
        try:
            await self._allocate(topic, queue, requests)
            if topic.config.leases_durable:
                await self._log(topic, queue.leases, requests)
            return await self._results(topic, queue.leases, requests)
        except BaseException:
            self.release(topic, queue, requests)
            raise

    def release(self, topic: Topic, queue: Queue, requests: Sequence[ClaimRequest]) -> None:
        """Release the jobs of these claims, so that they are ready for other workers."""
        leases = [lease for request in requests for lease in request.leases]
        back = [job for lease in leases if (job := queue.leases.give_back(lease)) is not None]
        if back:
            queue.returned.notify()
            if topic.config.leases_durable and not topic.deleted:
                self._log_released(topic, back)

    def _log_released(self, topic: Topic, jobs: Sequence[JobState]) -> None:
        """Log released jobs without waiting. A lease that a restart still finds expires."""
        with contextlib.suppress(PenstockError):
            topic.shard.check_room()
            now_ms = self._clock.now_ms()
            ahead_ms = topic.log.wall_ahead_ms()
            frames = [
                lease_frame(LeaseEvent.RELEASED, topic.id, job.shifted(ahead_ms), ts_ms=now_ms)
                for job in jobs
            ]
            topic.commit(frames).add_done_callback(asyncio.Future.exception)

    async def _allocate(self, topic: Topic, queue: Queue, requests: Sequence[ClaimRequest]) -> None:
        table, config = queue.leases, topic.config
        letters = 1 if table.has_undeliverable else _LETTERS
        moved = 0
        while missing := sum(request.missing for request in requests):
            while table.next_lease_id + missing > table.reserved_lease_id:
                await self._reserve(topic, queue, missing)
            if topic.deleted:
                raise TopicNotFound(topic.name)
            now_ms = self.look(topic, table)
            deliveries_max = 0 if config.dead_letter is None else config.max_deliveries
            seqs, exhausted = table.select(
                topic.log.index, missing, deliveries_max=deliveries_max, letters=letters
            )
            hands = round_robin(seqs, [request.missing for request in requests])
            for request, hand in zip(requests, hands, strict=True):
                term = Term.of(now_ms, request.lease_ms)
                node, session = request.node, request.session
                request.leases += [table.lease(seq, node, term, session) for seq in hand]
            for seq in exhausted:
                table.move(seq)
            if not exhausted:
                break
            taken = await self._letters.move(topic, exhausted)
            moved += taken
            letters = min(_more_letters(letters, taken, len(exhausted)), _LETTERS_MAX - moved)
        if queue.reserving is None and table.reserved_lease_id - table.next_lease_id < _RESERVE_MIN // 2:
            self._begin_to_reserve(topic, queue, 1)

    def look(self, topic: Topic, table: LeaseTable) -> int:
        """Update the table to the current time and deletions. Return the steady time."""
        self._catalog.retain(topic)
        now_ms = self._clock.steady_ms()
        table.refresh(topic.log.index, now_ms)
        return now_ms

    # ---- lease numbers -------------------------------------------------------------------------------

    async def _reserve(self, topic: Topic, queue: Queue, count: int) -> None:
        """Reserve numbers that no lease after a crash will reuse. Raise what the commit raises."""
        if queue.reserving is None:
            topic.shard.check_room()
            self._begin_to_reserve(topic, queue, count)
        reserving = queue.reserving
        assert reserving is not None
        await asyncio.wait([reserving])
        reserving.result()

    def _begin_to_reserve(self, topic: Topic, queue: Queue, count: int) -> None:
        table = queue.leases
        more = min(max(_RESERVE_MIN, _RESERVE_CLAIMS * count), LEASES_RESERVED_MAX)
        below = max(table.next_lease_id, table.reserved_lease_id) + more

        def apply() -> None:
            table.reserve(below)

        def ended(reserving: asyncio.Future[float]) -> None:
            reserving.exception()
            queue.reserving = None

        frame = reservation_frame(topic.id, below, ts_ms=self._clock.now_ms())
        queue.reserving = topic.commit([frame], apply=apply, sync=True)
        queue.reserving.add_done_callback(ended)

    # ---- results of claims ---------------------------------------------------------------------------

    async def _log(self, topic: Topic, table: LeaseTable, requests: Sequence[ClaimRequest]) -> None:
        """Log the leases that still exist. No worker may hold a lease that is unknown after a restart."""
        for request in requests:
            request.leases = [
                lease
                for lease in request.leases
                if table.leased(lease.seq, lease.node, lease.lease_id) is not None
            ]
        leases = [lease for request in requests for lease in request.leases]
        if leases:
            topic.shard.check_room()
            now_ms = self._clock.now_ms()
            ahead_ms = topic.log.wall_ahead_ms()
            frames = [
                lease_frame(LeaseEvent.CLAIMED, topic.id, lease.shifted(ahead_ms), ts_ms=now_ms)
                for lease in leases
            ]
            await topic.commit(frames)

    async def _results(
        self, topic: Topic, table: LeaseTable, requests: Sequence[ClaimRequest]
    ) -> list[ClaimResult]:
        found: dict[int, bytes] = {}
        seqs = [lease.seq for request in requests for lease in request.leases]
        if seqs:
            seqs.sort()
            found, bad = await read_jobs(topic, seqs, _STYLE, self._workers)
            if topic.deleted:
                raise TopicNotFound(topic.name)
            if bad:
                self._delay_unreadable(topic, table, requests, bad)
                if not found:
                    raise _unreadable(topic, bad)
        return [self._result(topic, table, request, found) for request in requests]

    def _result(
        self, topic: Topic, table: LeaseTable, request: ClaimRequest, found: dict[int, bytes]
    ) -> ClaimResult:
        leases = [lease for lease in request.leases if lease.seq in found]
        leases.sort(key=_seq_of)
        ahead_ms = topic.log.wall_ahead_ms()
        return ClaimResult(
            topic=topic.name,
            fragments=[
                b'{"lease_id":"lease_%x","deadline":%d,"deliveries":%d,%b'
                % (lease.lease_id, lease.until_ms + ahead_ms, lease.deliveries, found[lease.seq][1:])
                for lease in leases
            ],
            seqs=[lease.seq for lease in leases],
            ready=table.ready(topic.log.index),
        )

    def _delay_unreadable(
        self, topic: Topic, table: LeaseTable, requests: Sequence[ClaimRequest], bad: Sequence[int]
    ) -> None:
        """Delay unreadable jobs for the length of a lease, so that others are delivered."""
        term = Term.of(self._clock.steady_ms(), topic.config.lease_ms)
        unreadable = set(bad)
        for request in requests:
            for lease in request.leases:
                if lease.seq in unreadable:
                    table.give_back(lease, term)


def _more_letters(tried: int, taken: int, exhausted: int) -> int:
    """Return how many letters to try next: 0 after a refusal, 1 if some were refused."""
    if not taken:
        return 0
    return 2 * tried if taken == exhausted else 1


def _seq_of(lease: JobState) -> int:
    return lease.seq


def _unreadable(topic: Topic, seqs: Sequence[int]) -> Damaged:
    first, last = min(seqs), max(seqs)
    return Damaged(
        f'jobs {first} to {last} of topic "{topic.name}" cannot be read back as they were written; '
        "delete them to skip them",
        {"topic": topic.name, "first_seq": first, "last_seq": last},
    )


async def serve_claim_batch(
    queue: Queue,
    clock: Clock,
    window_s: float,
    serve: Callable[[Sequence[ClaimRequest]], Awaitable[list[ClaimResult]]],
) -> None:
    """Wait until the window ends, then serve its claims that still wait.

    Later claims open the next window.
    """
    await clock.sleep(window_s)
    requests, queue.batch = queue.batch, []
    batch = [request for request in requests if not _outcome(request).done()]
    try:
        results = await serve(batch) if batch else []
    except asyncio.CancelledError:
        reject_claims(batch)
        raise
    except Exception as error:  # noqa: BLE001 - the claims receive it
        _fail(batch, error)
        return
    for request, result in zip(batch, results, strict=True):
        if not _outcome(request).done():
            _outcome(request).set_result(result)


def reject_claims(batch: Sequence[ClaimRequest]) -> None:
    """Fail these claims, because the engine is closing."""
    _fail(batch, ShuttingDown("the event log is closing; retry when it is back"))


def _outcome(request: ClaimRequest) -> asyncio.Future[ClaimResult]:
    assert request.outcome is not None
    return request.outcome


def _fail(requests: Sequence[ClaimRequest], error: Exception) -> None:
    for request in requests:
        if not _outcome(request).done():
            _outcome(request).set_exception(error)
