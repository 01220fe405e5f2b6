"""The event log: named topics with dense sequences, a durability per topic, and no silent loss.

    async with await Engine.open(EngineConfig(data_dir="/var/lib/topics")) as engine:
        await engine.put_topic("clicks", TopicConfig(durable=True))
        written = await engine.write("clicks", [NewRecord(msgspec.Raw(b'{"user":1}'))])
        page = await engine.diff("clicks", from_seq=0, wait_ms=1000)

One event loop owns an engine. A change becomes durable, as the topic's durability class promises, before its
call returns. It is not visible before that.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import cast

from penstock.clock import SYSTEM_CLOCK, Clock, SteadyClock
from penstock.errors import ConfigError, PenstockError
from penstock.storage import AppendLog, DirectoryLock, ExtentFile, FileSystem, OsFileSystem
from penstock.topics.checkpoints.cold_tier import ColdTierLock, check_apart
from penstock.topics.checkpoints.layout import LOCK_FILE, check_complete
from penstock.topics.checkpoints.maintenance import Maintenance
from penstock.topics.checkpoints.recovery import Recovered, recover
from penstock.topics.config import EngineConfig, TopicConfig
from penstock.topics.errors import (
    InvalidRequest,
    NotReady,
    ShuttingDown,
    TopicNotFound,
)
from penstock.topics.limits import PAGE_SIZE_DEFAULT
from penstock.topics.log.control import Deletion, Watermarks
from penstock.topics.log.frame import FrameType, encode_control
from penstock.topics.log.frame_scan import WalFormat
from penstock.topics.log.wal import (
    MakeCommitter,
    Wal,
    WalShard,
    group_committer,
    shard_folders,
)
from penstock.topics.model import (
    AckResult,
    BareRecord,
    ClaimResult,
    DeleteResult,
    ExtendResult,
    NackResult,
    Page,
    Predicate,
    PutResult,
    RemoveResult,
    TopicState,
    WriteResult,
)
from penstock.topics.queues.api import Queues, WorkStream, check_node
from penstock.topics.read.page import DiffRequest, Reader
from penstock.topics.read.subscription import Feed
from penstock.topics.routers.model import RouterConfig, RouterPut, RouterRemoved, RouterState
from penstock.topics.routers.registry import RouterRegistry
from penstock.topics.routers.routing import ReplicaMemoryLimit, Routing
from penstock.topics.schedule.pressure import Scheduler
from penstock.topics.segments.growth import await_earlier
from penstock.topics.segments.store import LocalSegmentRoot, open_cold_store
from penstock.topics.segments.tiering import Tiers
from penstock.topics.stats import EngineStats, SyncTimes, collect_stats
from penstock.topics.topic.catalog import Catalog
from penstock.topics.topic.topic import Topic
from penstock.topics.workers import LooseThreads, ThreadWorkers, Workers
from penstock.topics.write.append import WriteOutcome, Writer
from penstock.topics.write.pending import Done

_LOGGER = logging.getLogger(__name__)


class Engine:
    """All topics of one data directory, which no other process may have open.

    `start` recovers the state; until then every call raises `NotReady`. `open` creates and starts an engine.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        fs: FileSystem | None = None,
        clock: Clock = SYSTEM_CLOCK,
        workers: Workers | None = None,
        committers: MakeCommitter | None = None,
    ) -> None:
        self.config = config
        self.replay_progress = 0.0
        self.problems: list[str] = []
        """The damage that the last start found, one sentence each."""
        self._fs = OsFileSystem() if fs is None else fs
        self._clock = clock = SteadyClock(clock)
        self._cold_thread = LooseThreads(1, "topics-move") if workers is None else None
        self._workers = ThreadWorkers() if workers is None else workers
        self._owner: ColdTierLock | None = None
        self._sync_times = SyncTimes()
        self._committers = committers or group_committer(
            sync_interval_s=config.sync_interval_ms / 1000,
            on_sync=self._sync_times.observe,
        )
        self._data_dir = os.path.abspath(config.data_dir)
        self._lock = DirectoryLock(self._fs, self._data_dir, name=LOCK_FILE, note="pid=")
        self._catalog = Catalog(config, clock)
        self.scheduler = Scheduler(clock)
        """The overload control. It does not affect what is stored or read."""
        self._writer = Writer(self._catalog, clock, self._check_ready, self.scheduler)
        self._reader = Reader(self._catalog, clock, self._workers, self._check_ready)
        self._routing = Routing(
            self._catalog, clock, self._workers, self.scheduler, ReplicaMemoryLimit(config.checkpoint_bytes)
        )
        self._routers = RouterRegistry(config, self._catalog, clock, self._routing)
        self._queues = Queues(self._catalog, clock, self._workers, self._writer, self._check_ready)
        self._wal: Wal | None = None
        self._maintenance: Maintenance | None = None
        self._state = "new"

    @classmethod
    async def open(
        cls,
        config: EngineConfig,
        *,
        fs: FileSystem | None = None,
        clock: Clock = SYSTEM_CLOCK,
        workers: Workers | None = None,
        committers: MakeCommitter | None = None,
    ) -> Engine:
        """Create and start an engine. Raise `LockHeld`, `Damaged`, or the errors of the file system."""
        engine = cls(config, fs=fs, clock=clock, workers=workers, committers=committers)
        await engine.start()
        return engine

    # ---- start and close -----------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return self._state == "ready"

    async def start(self) -> None:
        """Recover the state on disk. Damage that leaves the rest usable is in `problems`."""
        assert self._state == "new", "an engine starts once"
        self._state = "starting"
        self._lock.__enter__()
        try:
            tiers = self._open_tiers()
            folders = shard_folders("wal", self.config.wal_shards)
            found = await self._workers.tidy(lambda: self._recover(tiers, folders))
            await self._workers.tidy(lambda: self._claim_cold(found))
            logs = await self._workers.tidy(lambda: [self._open_log(found, folder) for folder in folders])
            self._wal = Wal([self._shard(log, number) for number, log in enumerate(logs)])
            self._catalog.open(self._wal, found.topics, found.next_topic_id, found.lost_seq)
            self._routing.open(found.routers)
            self._routers.open(self._wal.shards[0])
            self.problems = found.problems
            for problem in found.problems:
                _LOGGER.error("%s", problem)
            self._maintenance = Maintenance(
                fs=self._fs,
                data_dir=self._data_dir,
                config=self.config,
                clock=self._clock,
                workers=self._workers,
                run_cold=self._workers.tidy if self._cold_thread is None else self._cold_thread,
                tiers=tiers,
                wal=self._wal,
                folders=folders,
                found=found,
                catalog=self._catalog,
                routing=self._routing,
            )
            self._catalog.on_removed(self._forget_topic)
            await self._maintenance.start()
            self._routing.start()
            self.scheduler.start(self._wal.shards)
        except BaseException:
            self._state = "closed"
            self._abandon()
            raise
        self._state = "ready"

    def _abandon(self) -> None:
        """Release everything after a failed start."""
        try:
            if self._wal is not None:
                with contextlib.suppress(PenstockError):
                    self._wal.close()
        finally:
            self._close_workers()
            self._lock.__exit__(None, None, None)

    def _forget_topic(self, topic: Topic) -> None:
        """Clean up after the durable deletion of a topic."""
        self._routing.topic_left(topic)
        assert self._maintenance is not None
        self._maintenance.remove_files(topic)

    def _close_workers(self) -> None:
        if self._cold_thread is not None:
            self._cold_thread.close()
        self._workers.close()

    def _open_tiers(self) -> Tiers:
        """Open both tiers. Raise `ConfigError` if the cold place is not usable."""
        hot, place = LocalSegmentRoot(self._fs, self._data_dir), self.config.cold_dir
        if place is None:
            return Tiers(hot)
        check_apart(self._data_dir, place)
        cold = open_cold_store(place, self._fs)
        self._owner = ColdTierLock(self._fs, self._data_dir, cold, place)
        return Tiers(hot, cold, self._owner.check)

    def _claim_cold(self, found: Recovered) -> None:
        """Raise `ConfigError` if the cold place lacks the old records, or belongs to another directory."""
        has_cold = any(entry.cold for topic in found.topics for entry in topic.log.segments)
        if self._owner is not None:
            self._owner.claim(has_cold=has_cold)
        elif has_cold:
            raise ConfigError(
                "old records are in a cold place, but none is configured; "
                "set TOPICS_COLD_DIR (cold_dir) to the place that was used before"
            )

    def _recover(self, tiers: Tiers, folders: Sequence[str]) -> Recovered:
        check_complete(self._fs, self._data_dir)
        await_earlier(self._fs, self._data_dir)

        def progress(done: float) -> None:
            self.replay_progress = done

        return recover(
            self._fs,
            self._data_dir,
            tiers,
            folders=folders,
            now_ms=self._clock.now_ms(),
            on_progress=progress,
        )

    def _open_log(self, found: Recovered, folder: str) -> AppendLog:
        return AppendLog.open(
            self._fs,
            os.path.join(self._data_dir, folder),
            WalFormat(),
            found=next((log.found for log in found.logs if log.path == folder), None),
            file_bytes=self.config.wal_file_bytes,
            extent=ExtentFile(self._fs, os.path.join(self._data_dir, folder)),
        )

    def _shard(self, log: AppendLog, number: int) -> WalShard:
        shard = WalShard(log, number, self._committers, self.config.wal_queue_max)
        shard.on_failure = self._catalog.give_up_in_flight
        return shard

    async def close(self) -> None:
        """Commit accepted writes, write a last snapshot, and release the directory. May be called twice."""
        if self._state != "ready":
            return
        self._state = "closed"
        assert self._wal is not None
        assert self._maintenance is not None
        self._queues.close()
        for topic in self._catalog.all():
            topic.subscribers.notify()
        await self.scheduler.close()
        try:
            await self._routing.close()
            await self._queues.settle()
            await self._maintenance.close()
        finally:
            self._wal.stop()
            try:
                await self._workers.tidy(self._wal.close)
            finally:
                self._close_workers()
                self._lock.__exit__(None, None, None)

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ---- topics --------------------------------------------------------------------------------------

    @property
    def topic_count(self) -> int:
        """Return how many topics there are."""
        return len(self._catalog)

    def exists(self, name: str) -> bool:
        """Return whether a topic of this name exists and is not being deleted."""
        self._check_ready()
        return self._catalog.find(name) is not None

    async def put_topic(self, name: str, config: TopicConfig) -> PutResult:
        """Create a topic, or replace the whole config of an existing one.

        Raises `InvalidRequest`, `IncompatibleTopic` for another type, and `Throttled` if there are too many.
        """
        self._check_ready()
        return await self._catalog.put(name, config)

    async def remove_topic(self, name: str, *, if_empty: bool = False) -> RemoveResult:
        """Delete a topic with all its records. A missing topic counts as deleted.

        Raises `TopicNotEmpty` if `if_empty` is set and the topic has records.
        """
        self._check_ready()
        await self._routing.drain_from(name)
        return await self._catalog.remove(name, if_empty=if_empty)

    def state(self, name: str, *, touch: bool = True) -> TopicState:
        """Return the state of a topic. With `touch` this counts as a read. Raise `TopicNotFound`."""
        self._check_ready()
        topic = self._catalog.get(name)
        now_ms = self._clock.now_ms()
        if touch:
            topic.touch(now_ms)
        self._catalog.retain(topic)
        return topic.state(now_ms)

    def topics(
        self,
        *,
        prefix: str = "",
        after: str = "",
        limit: int = PAGE_SIZE_DEFAULT,
        touch: bool = False,
        allowed: Callable[[str], bool] | None = None,
    ) -> tuple[list[TopicState], str | None]:
        """Return at most `limit` topics by name, and the `after` of the next page or None at the end."""
        self._check_ready()
        return self._catalog.page(prefix=prefix, after=after, limit=limit, touch=touch, allowed=allowed)

    # ---- records -------------------------------------------------------------------------------------

    async def write(
        self,
        name: str,
        records: Sequence[BareRecord],
        *,
        node: str | None = None,
        idempotency_key: str | None = None,
        create: bool | None = None,
        config: TopicConfig | None = None,
        parsed: bool = False,
        insist: bool = False,
    ) -> WriteResult:
        """Append records atomically. Return their position when the topic's durability is reached.

        `create` says whether a missing topic may be created, with `config`; by default `config.auto_create`
        decides. `parsed` promises that all JSON comes from a decoder. `insist` writes even while the engine
        is overloaded and rejects other writes. Raises the errors of `penstock.topics.errors`. After
        `CommitFailed` nothing was published.
        """
        outcome = WriteOutcome()
        self.append(
            name,
            records,
            outcome.settle,
            node=node,
            idempotency_key=idempotency_key,
            create=create,
            config=config,
            parsed=parsed,
            insist=insist,
        )
        return await outcome.wait()

    def append(
        self,
        name: str,
        records: Sequence[BareRecord],
        done: Callable[[WriteResult | Exception], None],
        *,
        node: str | None = None,
        idempotency_key: str | None = None,
        create: bool | None = None,
        config: TopicConfig | None = None,
        parsed: bool = False,
        insist: bool = False,
    ) -> bool:
        """Write without a coroutine: call `done` once with what `write` returns or raises.

        `done` may be called before this returns. Errors that are known immediately are raised instead. Return
        whether the records already have their position in the topic. This is False while the topic is being
        created or deleted, or while an earlier write with the same key is undecided.
        """
        self._check_ready()
        return self._writer.append(
            name,
            records,
            done,
            node=node,
            key=idempotency_key,
            create=create,
            config=config,
            parsed=parsed,
            insist=insist,
        )

    def begin_write(
        self,
        name: str,
        records: Sequence[BareRecord],
        done: Callable[[WriteResult | PenstockError], None],
        *,
        node: str | None = None,
        parsed: bool = False,
        insist: bool = False,
    ) -> bool:
        """Append to an existing topic.

        Return False and do nothing if it does not exist or is being deleted.
        """
        self._check_ready()
        if self._catalog.find(name) is None:
            return False
        # Only a write that waits for its topic can end with another kind of error.
        return self.append(name, records, cast("Done", done), node=node, parsed=parsed, insist=insist)

    async def diff(
        self,
        name: str,
        from_seq: int = 0,
        *,
        limit: int = 0,
        node: Sequence[str] = (),
        include_tags: bool = False,
        include_meta: bool = True,
        wait_ms: int = 0,
        max_batch_bytes: int = 0,
        match: Predicate | None = None,
    ) -> Page:
        """Return the records after `from_seq`, with a tombstone if some were lost without a deletion.

        With `match`, only records with a matching tag. With `wait_ms`, wait up to that time if there is
        nothing new. Raises `TopicNotFound`, and `Damaged` if the next record cannot be read.
        """
        self._check_ready()
        if self._routing.is_fed(name):
            await self._routing.drain(name)
        topic = self._catalog.get(name)
        request = DiffRequest.of(
            from_seq,
            limit=limit,
            max_batch_bytes=max_batch_bytes,
            nodes=node,
            include_tags=include_tags,
            include_meta=include_meta,
            match=match,
            dedupe_node=topic.config.dedupe_node,
        )
        return await self._reader.read(topic, request, wait_ms=wait_ms)

    def feed(self, name: str) -> Feed:
        """Return the current topic of this name for watchers. Raise `TopicNotFound`."""
        self._check_ready()
        assert self._wal is not None
        topic = self._catalog.get(name)
        return Feed(topic, self._reader, partial(self._routing.refresh, name), self._wal.shards)

    def on_topic(self, tell: Callable[[str], None]) -> None:
        """Call `tell` with the name of every topic that is created from now on. It must not raise."""
        self._catalog.on_entered(tell)

    async def delete(
        self, name: str, *, before_seq: int | None = None, match: Predicate | None = None
    ) -> DeleteResult:
        """Delete the records below `before_seq`, those whose tag matches, or those that meet both.

        Records written after the call are kept. Raises `InvalidRequest` without a selector, and
        `TopicNotFound`.
        """
        self._check_ready()
        if before_seq is None and match is None:
            raise InvalidRequest("say what to delete: before_seq, match, or both")
        topic = await self._catalog.settled(name)
        if topic is None:
            raise TopicNotFound(name)
        self._catalog.retain(topic)
        deletion = Deletion(before_seq=before_seq, match=match, bound_head=topic.log.index.head_seq + 1)
        tables = {}
        if match is not None:
            segments = topic.log.open_segments()
            tables = await self._workers.fetch(
                lambda: {(segment.first_seq, segment.entry.count): segment.tags() for segment in segments}
            )
            if self._catalog.find(name) is not topic:
                raise TopicNotFound(name)

        def apply() -> DeleteResult:
            result = topic.log.delete(deletion, tables)
            self._catalog.tally(topic)
            return result

        if topic.is_ephemeral and topic.log.index.earliest_seq > topic.log.kept_through:
            return apply()
        return await self._catalog.change(topic, FrameType.DELETE, deletion.encode(), apply)

    # ---- queues --------------------------------------------------------------------------------------

    async def claim(self, name: str, node: str, *, max: int = 1, lease_ms: int | None = None) -> ClaimResult:
        """Lease up to `max` jobs of a queue. No other worker gets them until the lease ends.

        Returned jobs come first, then the others in order. A job that reached the delivery limit moves to the
        dead letters instead. Raises `TopicNotFound`, `NotAQueue` and `InvalidRequest`.
        """
        self._check_ready()
        topic = await self._queues.find(name)
        if self._routing.is_fed(name):
            await self._routing.drain(name)
        return await self._queues.claim(topic, node, max, lease_ms)

    async def ack(
        self, name: str, node: str, seqs: Sequence[int], lease_ids: Sequence[str] = ()
    ) -> AckResult:
        """Delete finished jobs that `node` holds, with the durability of the topic.

        With `lease_ids`, delete only jobs held under exactly that lease. An empty id accepts any lease.
        """
        self._check_ready()
        return await self._queues.ack(name, node, seqs, lease_ids)

    async def nack(
        self, name: str, node: str, seqs: Sequence[int], lease_ids: Sequence[str] = (), *, delay_ms: int = 0
    ) -> NackResult:
        """Return jobs to the queue, immediately or after `delay_ms`. Fenced as in `ack`."""
        self._check_ready()
        return await self._queues.nack(name, node, seqs, lease_ids, delay_ms)

    async def extend(
        self, name: str, node: str, seqs: Sequence[int], lease_ids: Sequence[str] = (), *, lease_ms: int
    ) -> ExtendResult:
        """Extend leases to `lease_ms` from now. Fenced as in `ack`."""
        self._check_ready()
        return await self._queues.extend(name, node, seqs, lease_ids, lease_ms)

    async def work(self, name: str, node: str, *, max: int = 1, lease_ms: int | None = None) -> WorkStream:
        """Return a stream of jobs, at most `max` at a time. Close it to return them to the queue."""
        self._check_ready()
        check_node(node)
        topic = await self._queues.find(name)
        return WorkStream(
            self._queues,
            topic,
            partial(self._routing.refresh, name),
            self._clock,
            node=node,
            max=max,
            lease_ms=lease_ms,
        )

    # ---- routers -------------------------------------------------------------------------------------

    async def put_router(self, name: str, config: RouterConfig) -> RouterPut:
        """Copy records appended to one topic from now on into another, or change an existing router.

        Missing topics are created. Raises `InvalidRequest`, `TopicNotFound` for a destination that may not be
        created, `IncompatibleTopic` for a destination with another source or a router with other topics,
        `RouterCycle`, and `Throttled` if there are too many.
        """
        self._check_ready()
        return await self._routers.put(name, config)

    async def remove_router(self, name: str) -> RouterRemoved:
        """Remove a router. Its copies stay. A missing router counts as deleted."""
        self._check_ready()
        return await self._routers.remove(name)

    async def router(self, name: str, *, drain: bool = True) -> RouterState:
        """Return the state of a router, by default after it has copied all current records.

        Raise `RouterNotFound`.
        """
        self._check_ready()
        return await self._routers.state(name) if drain else self._routers.peek(name)

    def routers(
        self,
        *,
        prefix: str = "",
        after: str = "",
        limit: int = PAGE_SIZE_DEFAULT,
        source: str | None = None,
        dest: str | None = None,
        allowed: Callable[[RouterState], bool] | None = None,
    ) -> tuple[Sequence[RouterState], str | None]:
        """Return at most `limit` routers by name, and the `after` of the next page or None at the end."""
        self._check_ready()
        return self._routers.page(
            prefix=prefix, after=after, limit=limit, source=source, dest=dest, allowed=allowed
        )

    @property
    def router_count(self) -> int:
        """Return how many routers there are."""
        return len(self._routing)

    def refresh(self, name: str) -> None:
        """Start copying records into the topic from its routers. Watchers are notified when they arrive.

        Free of cost for a topic without routers.
        """
        self._routing.refresh(name)

    def is_fed(self, name: str) -> bool:
        """Return whether a router copies records into the topic."""
        return self._routing.is_fed(name)

    async def drain(self, name: str) -> None:
        """Wait until the routers have copied all current records, so that `state` counts them."""
        self._check_ready()
        await self._routing.drain(name)

    # ---- operations ----------------------------------------------------------------------------------

    async def checkpoint(self) -> None:
        """Take a checkpoint now: move records from the log into segments."""
        self._check_ready()
        assert self._maintenance is not None
        await self._maintenance.checkpoint()

    def stats(self) -> EngineStats:
        """Return statistics for metrics."""
        shards = () if self._wal is None else self._wal.shards
        now_ms = self._clock.now_ms()
        for topic in self._catalog.all():
            topic.queue_counts(now_ms)  # leases that have ended are not counted
        return collect_stats(self._catalog.all(), shards, self._sync_times, ready=self.ready)

    async def check_writable(self) -> None:
        """Raise `NotReady` with the reason if the log accepts no writes.

        After a failed commit, write a frame that changes nothing. So the recovery of the log is detected
        without a client's write.
        """
        self._check_ready()
        assert self._wal is not None
        for shard in self._wal.shards:
            if shard.fault is not None:
                await self._try(shard)

    async def _try(self, shard: WalShard) -> None:
        topic = next((one for one in self._catalog.all() if one.shard is shard and not one.deleted), None)
        if topic is None:
            shard.fault = None  # no topic writes there
            return
        floors = topic.log.floors
        marks = Watermarks(
            cap=floors.cap, earliest_seq=topic.log.index.earliest_seq, ttl=floors.ttl, trim=floors.trim
        )
        try:
            shard.check_room()
            await topic.commit(
                [encode_control(FrameType.EVICT_WATERMARK, topic.id, marks.encode())], sync=True
            )
        except PenstockError as error:
            raise NotReady(f"no write succeeds: {error}") from error

    def _check_ready(self) -> None:
        if self._state == "ready":
            return
        if self._state == "closed":
            raise ShuttingDown("the event log is closing; retry when it is back")
        raise NotReady(
            "the log is being replayed; retry in a moment",
            {"replay_progress": round(self.replay_progress, 4)},
        )
