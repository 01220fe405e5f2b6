"""Routers at work: records appended to a source are copied into its destinations.

Copies are derived and not written to the log. One small frame per pass, in the log of the destination, names
the copied records of the source and the router's cursor after them. The frame is committed with the
durability of the destination, and the copies become visible only then. The order of copies and direct writes
in a destination is therefore the order of its log. A copy that is made again has the same number and time.
Copies and cursor survive together or not at all, so a record is copied once, even across crashes. Four rules
keep the records that a frame refers to available until the copies are in their own segment:

1. Frames refer only to records of classes that never reuse a sequence number, and only if the source is at
   least as durable as the destination. Other copies are logged after the frame and committed with it: copies
   of ephemeral and `memory` sources, of less durable sources, of records that are themselves copies in
   memory, and of records in the cold tier.
2. No snapshot is taken during a pass (`still`). Every frame after a snapshot thus refers to records that were
   live at the snapshot, in a segment it names, or to later records in the log. Later deletion, eviction and
   expiry leave the bytes in place.
3. The segments of a deleted source stay until the next snapshot.
4. A cursor beyond the head of its source goes back to the head. Only a class without a durability promise can
   cause this. A snapshot stores the new cursor before anything is written.

A read of a destination first waits until its routers have copied everything that existed when the read began.
Copies that no reader waits for are made by a periodic tick.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Final, TypeAlias

from penstock.clock import Clock
from penstock.errors import PenstockError
from penstock.topics.config import TopicConfig
from penstock.topics.errors import Damaged, ShuttingDown, Throttled
from penstock.topics.limits import ROUTER_HOPS_MAX
from penstock.topics.routers.copy_commit import ColdBytes, CopySelection, Room, select, submit
from penstock.topics.routers.model import RouterEntry
from penstock.topics.routers.table import Router, RouterTable
from penstock.topics.schedule.pressure import Scheduler
from penstock.topics.schedule.ready_set import ReadySet, effective_priority
from penstock.topics.segments.reader import Segment
from penstock.topics.topic.catalog import Catalog
from penstock.topics.topic.topic import Topic
from penstock.topics.workers import Workers

REST_MIN_S: Final = 0.05
REST_MAX_S: Final = 2.0
_RETRIES_MAX: Final = 256
"""The number of routers that retry together. The others follow soon after."""

_Look: TypeAlias = tuple[int, int, TopicConfig]


class RouterBackoff:
    """The retry pauses of routers whose last pass failed. The caller passes the time in seconds."""

    def __init__(self) -> None:
        self._resting: dict[Router, tuple[float, _Look]] = {}
        """When to retry, and the destination's state at the failure."""
        self._pauses: dict[Router, float] = {}

    def __len__(self) -> int:
        return len(self._resting)

    def __contains__(self, router: Router) -> bool:
        return router in self._resting

    def fail(self, router: Router, now_s: float) -> None:
        """Record a failed attempt. An attempt before the retry time does not lengthen the pause."""
        if router in self._resting:
            until_s = self._resting[router][0]
        else:
            pause_s = min(2 * self._pauses.get(router, REST_MIN_S / 2), REST_MAX_S)
            self._pauses[router] = pause_s
            until_s = now_s + pause_s
        self._resting[router] = until_s, _look(router)

    def forget(self, router: Router) -> None:
        """Reset the pause, because the router made progress or has nothing to do."""
        self._resting.pop(router, None)
        self._pauses.pop(router, None)

    def due(self, now_s: float) -> list[Router]:
        """Return routers that may retry: their pause is over, or their destination has changed."""
        ready = (
            router
            for router, (until_s, look) in self._resting.items()
            if until_s <= now_s or look != _look(router)
        )
        due = list(islice(ready, _RETRIES_MAX))
        for router in due:
            del self._resting[router]
        return due


def _look(router: Router) -> _Look:
    dest = router.dest
    return dest.log.index.live, dest.log.index.live_bytes, dest.config


COPIES_BYTES_MIN: Final = 8 * 1024**2
_RECOUNT_EVERY_S: Final = 0.05


class ReplicaMemoryLimit:
    """A limit on the bytes of copies kept in memory until a checkpoint.

    The caller passes the time in seconds. While checkpoints succeed, the copies are little more than what
    accumulates between two of them. When checkpoints fail, routers wait, and uncopied records stay in the
    source, where its caps limit them.
    """

    def __init__(self, checkpoint_bytes: int) -> None:
        self._bound = max(2 * checkpoint_bytes, COPIES_BYTES_MIN)
        self._sizes: dict[Topic, int] = {}
        self._total = 0
        """The bytes of these copies, and of copies being committed."""
        self._recounted_s = 0.0

    def look(self, dest: Topic) -> None:
        """Recount a destination after copies arrived. Copies of an ephemeral topic do not count."""
        size = 0 if dest.deleted or dest.is_ephemeral else dest.log.chunk_bytes
        self._total += size - self._sizes.pop(dest, 0)
        if size:
            self._sizes[dest] = size

    @contextmanager
    def coming(self, dest: Topic, size: int) -> Iterator[None]:
        """Count copies of this size while they are being committed to a destination."""
        self._total += size
        try:
            yield
        finally:
            self._total -= size
            self.look(dest)

    def has_room(self, now_s: float) -> bool:
        """Return whether more copies may be made."""
        if self._total >= self._bound and now_s - self._recounted_s >= _RECOUNT_EVERY_S:
            # A checkpoint or a cap may have freed some of them meanwhile.
            self._recounted_s = now_s
            for dest in list(self._sizes):
                self.look(dest)
        return self._total < self._bound


_LOGGER = logging.getLogger(__name__)
_TICK_S: Final = 0.05
_YIELD_S: Final = 0.005
"""Under overload, the pause for other work between two passes that no reader waits for."""
_CURSOR_EVERY: Final = 8192
"""How many records may be skipped before the cursor is logged, if none of them is copied."""
_HOPS_KEPT: Final = 64
_NOTIFIED_MAX: Final = 256


class Routing:
    """The running routers of one engine. Used only on the event loop's thread."""

    def __init__(
        self,
        catalog: Catalog,
        clock: Clock,
        workers: Workers,
        scheduler: Scheduler,
        memory: ReplicaMemoryLimit,
    ) -> None:
        self._scheduler = scheduler
        self._memory = memory
        self._catalog = catalog
        self._clock = clock
        self._workers = workers
        self.table = RouterTable()
        self._listeners: dict[int, Callable[[], None]] = {}
        self._running: dict[int, asyncio.Task[bool]] = {}
        self._waiting: ReadySet[Router] = ReadySet()
        """Routers that the next tick starts."""
        self._backoff = RouterBackoff()
        """Routers whose last pass failed."""
        self._idle: dict[int, dict[Router, None]] = {}
        """Routers at the head of their source, by the source's id.

        Only they must be notified of new records.
        """
        self._ticking: asyncio.Task[None] | None = None
        self._committing: set[asyncio.Future[None]] = set()
        self._still = 0
        self._moving = asyncio.Event()
        self._moving.set()
        self.is_closed = True

    def open(self, entries: Iterable[RouterEntry]) -> None:
        """Enter the routers that recovery found at the start."""
        for entry in entries:
            source, dest = self._catalog.get(entry.source), self._catalog.get(entry.dest)
            self.enter(Router(entry, source, dest))

    def start(self) -> None:
        """Start copying."""
        self.is_closed = False
        for router in self.table:
            if router.is_behind:
                self._wait(router)

    async def close(self) -> None:
        """Copy everything possible, then stop. The next start continues with the rest."""
        for router in list(self.table):
            with contextlib.suppress(PenstockError):
                await self.drain(router.dest.name)
        self.is_closed = True
        if self._ticking is not None:
            self._ticking.cancel()
        for task in list(self._running.values()):
            await asyncio.wait([task])

    # ---- the routers ---------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.table)

    def entries(self) -> list[RouterEntry]:
        """Return all routers, for a snapshot of this moment."""
        return [router.entry() for router in self.table]

    def enter(self, router: Router) -> None:
        """Add a router whose creation is durable."""
        self.table.add(router)
        self._memory.look(router.dest)
        source = router.source
        if source.id not in self._listeners:
            self._listeners[source.id] = lambda: self._published(source)
            source.subscribers.listen(self._listeners[source.id])
        self._resume(router)

    def leave(self, router: Router) -> None:
        """Drop a router whose removal is durable."""
        if self.table.find(router.name) is not router:
            return  # a topic of it was deleted first
        self.table.remove(router)
        self._waiting.discard(router)
        self._backoff.forget(router)
        source = router.source
        self._idle.get(source.id, {}).pop(router, None)
        if not self.table.leaving(source.name):
            source.subscribers.unlisten(self._listeners.pop(source.id))
            self._idle.pop(source.id, None)

    def topic_left(self, topic: Topic) -> None:
        """Drop the routers that start or end at a topic whose deletion is durable."""
        ends = {*self.table.leaving(topic.name), *self.table.entering(topic.name)}
        for router in ends:
            self.leave(router)
        topic.routers_removed = tuple(sorted(router.name for router in ends))

    # ---- scheduling ----------------------------------------------------------------------------------

    def is_fed(self, topic: str) -> bool:
        """Return whether a router copies into the topic."""
        return bool(self.table.entering(topic))

    def refresh(self, topic: str) -> None:
        """Start copying records into the topic. Its listeners are notified when they arrive."""
        if self.table.entering(topic):
            for router in self.table.upstream(topic):
                self._start(router)

    async def drain(self, topic: str) -> None:
        """Wait until the topic has all records that its routers had when this call began and that fit.

        One round from the farthest router to the nearest is enough, unless there is a cycle.
        """
        if not self.table.entering(topic):
            return
        routers = self.table.upstream(topic)
        may_come_back = any(router.config.allow_cycle for router in routers)
        for _ in range(ROUTER_HOPS_MAX + 1 if may_come_back else 1):
            moved = [await self.catch_up(router) for router in routers]
            if not any(moved):
                return

    async def drain_from(self, topic: str) -> None:
        """Wait until the routers that start at the topic have copied everything, or cannot continue."""
        for router in self.table.leaving(topic):
            await self.catch_up(router)

    async def catch_up(self, router: Router) -> bool:
        """Copy up to the current head of the source. Return whether the router made progress."""
        target, began = router.source.log.index.head_seq, router.cursor
        while router.cursor < target and not router.stopped:
            before = router.cursor
            task = self._start(router)
            if task is None:
                break
            await asyncio.wait([task])
            # A task that began before the last record arrived may have finished without seeing it.
            if router.cursor == before and not _reached_target(task):
                break
        return router.cursor > began

    def _published(self, source: Topic) -> None:
        """Wake the idle routers of a source that has changed. The others check the source themselves."""
        idle = self._idle.pop(source.id, None)
        if idle is not None:
            self._notify_all(iter(idle))

    def _notify_all(self, routers: Iterator[Router]) -> None:
        """Notify many routers, with other work in between."""
        count = 0
        for router in islice(routers, _NOTIFIED_MAX):
            self._resume(router)
            count += 1
        if count == _NOTIFIED_MAX:
            asyncio.get_running_loop().call_soon(self._notify_all, routers)

    def _resume(self, router: Router) -> None:
        """Start the router immediately if a reader waits for its copies. Otherwise leave it to the tick."""
        if not router.is_behind:
            if not router.stopped:
                self._idle.setdefault(router.source.id, {})[router] = None
        elif router.dest.subscribers.are_there and not self.is_closed:
            self._start(router)
        else:
            self._wait(router)

    def _wait(self, router: Router) -> None:
        if router not in self._waiting:
            priority = _urgency(router.dest, self._clock.now_ms())
            self._waiting.mark(router, priority, self._now_ms(), lowered=self._scheduler.ladder.defers)
        self._keep_ticking()

    def _keep_ticking(self) -> None:
        if self._ticking is None and not self.is_closed:
            self._ticking = asyncio.create_task(self._tick())

    async def _tick(self) -> None:
        try:
            while len(self._waiting) or len(self._backoff):
                await self._clock.sleep(_TICK_S)
                for router in self._backoff.due(self._clock.monotonic()):
                    self._wait(router)
                for _ in range(len(self._waiting)):
                    found = self._waiting.take(self._now_ms())
                    if found is None:
                        break
                    self._start(found[0])
                    # Yield after each router, so that requests are served in between.
                    if self._scheduler.ladder.coalesce_ms:
                        await self._clock.sleep(_YIELD_S)
                    else:
                        await asyncio.sleep(0)
        finally:
            self._ticking = None

    def _now_ms(self) -> int:
        return int(self._clock.monotonic() * 1000)

    def _start(self, router: Router) -> asyncio.Task[bool] | None:
        """Return the task that runs a router, or None if there is nothing to do."""
        running = self._running.get(router.id)
        if running is not None or not router.is_behind or self.is_closed:
            return running
        task = asyncio.create_task(self._run(router))
        self._running[router.id] = task
        task.add_done_callback(lambda _: self._ended(router))
        return task

    def _ended(self, router: Router) -> None:
        task = self._running.pop(router.id)
        if not task.cancelled() and task.exception() is not None:
            _LOGGER.error('router "%s" stopped', router.name, exc_info=task.exception())
        if router.is_behind and not _reached_target(task):
            self._backoff.fail(router, self._clock.monotonic())
            self._keep_ticking()
        else:
            self._backoff.forget(router)
            self._resume(router)

    async def _run(self, router: Router) -> bool:
        """Run passes up to the current head of the source. Return whether it was reached."""
        target = router.source.log.index.head_seq
        while router.cursor < target and not router.stopped:
            try:
                if not await self._pass(router):
                    return False
            except (Throttled, ShuttingDown):
                return False  # there will be room later
            except PenstockError as error:
                _LOGGER.warning('router "%s" waits: %s', router.name, error)
                return False
            await asyncio.sleep(0)  # other tasks run between the passes of a long chain
        return True

    # ---- one pass ------------------------------------------------------------------------------------

    async def _pass(self, router: Router) -> bool:
        """Process the next records. Return whether all of them were processed."""
        picked = await self._select(router)
        if picked is None:
            return False
        if not picked.records and not picked.lost and picked.cursor - router.logged_cursor < _CURSOR_EVERY:
            is_done = picked.cursor > router.cursor
            router.cursor = picked.cursor
            return is_done and not picked.blocked
        if picked.cursor == router.cursor:
            return False
        is_kept_elsewhere = picked.by_value or router.dest.is_ephemeral
        if picked.records and not is_kept_elsewhere and not self._memory.has_room(self._clock.monotonic()):
            return False  # checkpoints do not keep up
        router.dest.shard.check_room()
        with self._memory.coming(router.dest, 0 if is_kept_elsewhere else picked.size):
            is_done = await self._send(router, picked)
        self._forget_hops(router.source)
        self._forget_hops(router.dest)
        return is_done and not picked.blocked

    async def _send(self, router: Router, picked: CopySelection) -> bool:
        """Commit a pass. Return whether that succeeded; the router repeats a failed pass."""
        outcome = submit(router, picked, now_ms=self._clock.now_ms(), on_published=self._catalog.tally)
        if outcome is None:
            return True
        self._committing.add(outcome)
        outcome.add_done_callback(self._committed)
        await asyncio.wait([outcome])
        return outcome.exception() is None

    def _committed(self, outcome: asyncio.Future[None]) -> None:
        self._committing.discard(outcome)
        outcome.exception()  # retrieved, because asyncio logs errors that are not

    async def _select(self, router: Router) -> CopySelection | None:
        """Select the records of the next pass, or None if the router or a topic of it is being removed."""
        fetched: ColdBytes | None = None
        while True:
            await self._moving.wait()
            source, dest = router.source, router.dest
            if (
                router.stopped
                or self.is_closed
                or source.deleted
                or dest.deleted
                or dest.deleting is not None
            ):
                return None
            if dest.is_ephemeral and not (dest.is_volatile and dest.log.is_idle):
                return None  # durable records that are still in flight go first
            self._catalog.retain(source)
            self._catalog.retain(dest)
            picked = select(router, Room.of(dest, self._catalog.total_left()), fetched)
            if picked.needs is None:
                return picked
            fetched = await self._fetch(picked.needs)

    async def _fetch(self, needed: ColdBytes) -> ColdBytes:
        segment = needed.run.source
        assert isinstance(segment, Segment)

        def read() -> tuple[int, memoryview]:
            try:
                return segment.read(needed.start, needed.stop)
            except Damaged:
                return 0, memoryview(b"")

        base, view = await self._workers.fetch(read)
        return needed._replace(base=base, view=view)

    def _forget_hops(self, topic: Topic) -> None:
        if len(topic.log.hops) > _HOPS_KEPT:
            cursors = [router.cursor for router in self.table.leaving(topic.name)]
            topic.log.hops.forget_below(min(cursors, default=topic.log.index.head_seq) + 1)

    # ---- snapshots -----------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        """Hold back passes, so that a snapshot contains each pass completely or not at all."""
        self._still += 1
        self._moving.clear()
        try:
            while self._committing:
                await asyncio.wait(list(self._committing))
            yield
        finally:
            self._still -= 1
            if not self._still:
                self._moving.set()


def _reached_target(task: asyncio.Task[bool]) -> bool:
    return not task.cancelled() and task.exception() is None and task.result()


def _urgency(dest: Topic, now_ms: int) -> int:
    config = dest.config
    return effective_priority(
        config.priority,
        auto_priority=config.auto_priority,
        now_ms=now_ms,
        last_consumed_ms=dest.last_consumed_ms,
    )
