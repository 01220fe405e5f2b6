"""One topic: its log, its queue if it has one, and its subscribers.

All calls run on the event loop's thread, so each method is one atomic step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from penstock.clock import SteadyClock
from penstock.storage import Entry, LogPosition
from penstock.topics.config import TopicConfig
from penstock.topics.log.frame import EncodedBatch
from penstock.topics.log.wal import WalShard
from penstock.topics.model import QueueCounts, TopicState
from penstock.topics.schedule.ready_set import effective_priority
from penstock.topics.topic.changes import PendingCommit, Subscribers, sync_ms
from penstock.topics.topic.idempotency import WriteWindow
from penstock.topics.topic.index import TopicIndex
from penstock.topics.topic.queue import Queue
from penstock.topics.topic.topic_log import TopicLog


class Topic:
    """The state of one topic. `id` is never reused, not even for a topic of the same name."""

    shard: WalShard
    """Where the topic's frames go. Not set while recovery builds the topic."""

    def __init__(
        self,
        *,
        name: str,
        id: int,
        config: TopicConfig,
        index: TopicIndex | None = None,
        shard: WalShard | None = None,
    ) -> None:
        self.name = name
        self.id = id
        self.log = TopicLog(name=name, topic_id=id, config=config, index=index)
        self.set_config(config)
        self.queue = Queue(self.log) if config.type == "queue" else None
        self.subscribers = Subscribers()
        self.keys = WriteWindow()
        self.writing: dict[str, asyncio.Future[None]] = {}
        """Writes with an idempotency key that are not decided yet."""
        self.last_read_ms: int | None = None
        self.last_consumed_ms: int | None = None
        self.deleted = False
        self.deleting: asyncio.Future[None] | None = None
        """Completes when the deletion in progress is decided. None without a deletion."""
        self._making_durable = 0
        self.tally_bytes = 0
        """The share of this topic in the engine's total."""
        self.is_referred = False
        """Whether records of this topic were copied. Its bytes may be needed to make the copies again."""
        self.routers_removed: tuple[str, ...] = ()
        """The routers that were removed with it."""
        if shard is not None:
            self.attach(shard)

    def attach(self, shard: WalShard, clock: SteadyClock | None = None) -> None:
        """Write to this log from now on, and use this clock."""
        self.shard = self.log.shard = shard
        if clock is not None:
            self.log.clock = clock

    def settle(self, now_ms: int) -> None:
        """Finish recovery: treat all recovered records as written."""
        self.log.settle(now_ms)
        if self.queue is not None:
            self.queue.leases.settle(self.log.index, now_ms, with_leases=self.config.leases_durable)

    @property
    def version(self) -> int:
        """Return a number that rises with every change that a snapshot must include."""
        return self.log.version if self.queue is None else self.log.version + self.queue.leases.version

    @property
    def epoch(self) -> int:
        """Return a number that rises with every created topic, even under the same name."""
        return self.id

    @property
    def is_volatile(self) -> bool:
        """Return whether new records are kept only in memory."""
        return self.is_ephemeral and not self._making_durable

    def make_durable(self, decided: asyncio.Future[None]) -> None:
        """Write new records to disk while the change to a durable topic is undecided."""
        self._making_durable += 1
        decided.add_done_callback(self._made_durable)

    def _made_durable(self, _: asyncio.Future[None]) -> None:
        self._making_durable -= 1

    def stay(self) -> None:
        """Keep the topic, because its deletion failed."""
        self.deleting = None

    def touch(self, now_ms: int) -> None:
        """Record a read, so that the topic counts as in use."""
        self.last_read_ms = self.last_consumed_ms = now_ms

    def reconfigure(self, config: TopicConfig, now_ms: int) -> None:
        """Apply a new config. Its caps take effect immediately."""
        was_ephemeral = self.is_ephemeral
        self.set_config(config)
        if was_ephemeral and not self.is_ephemeral:
            # From now on these records are stored like all others: the next checkpoint writes them to a
            # segment.
            self.log.kept_through = self.log.index.head_seq
        self.log.retain(now_ms)

    def set_config(self, config: TopicConfig) -> None:
        """Replace the config without applying it to existing records."""
        self.log.set_config(config)
        self.config, self.is_ephemeral = config, self.log.is_ephemeral

    # ---- publishing ----------------------------------------------------------------------------------

    def publish(self, batch: EncodedBatch, *, file: int, base: int, now_ms: int) -> None:
        """Make committed records visible, and evict the records that exceed the caps."""
        self.log.publish(batch, file=file, base=base, now_ms=now_ms)
        self.subscribers.notify()

    def keep_in_memory(self, batch: EncodedBatch, *, now_ms: int) -> None:
        """Publish records whose bytes are only in memory."""
        self.log.keep_in_memory(batch, now_ms=now_ms)
        self.subscribers.notify()

    def mark_lost(self, count: int) -> None:
        """Mark the next sequence numbers as lost, because their originals were lost before the copy."""
        self.log.mark_lost(count)
        self.subscribers.notify()

    # ---- commits -------------------------------------------------------------------------------------

    def commit(
        self,
        frames: Sequence[bytes],
        *,
        apply: Callable[[], None] | None = None,
        undo: Callable[[], None] | None = None,
        sync: bool | None = None,
        urgent: bool = False,
    ) -> asyncio.Future[float]:
        """Commit frames of this topic. The result is the duration of the sync in ms.

        Call `WalShard.check_room` first. If `sync` is None, the topic's durability decides whether to sync.
        """
        log_frames = [*self.log.moved_floors(), *frames]
        pending = PendingCommit(sync_ms if apply is None else _applied(apply), undo)
        self.shard.submit(
            log_frames,
            frames=len(log_frames),
            sync=self.config.durable if sync is None else sync,
            waiting=pending,
            urgent=urgent,
        )
        return pending.outcome

    def sync(self) -> asyncio.Future[float]:
        """Return a future that completes when every earlier write to the topic is durable."""
        pending = PendingCommit(sync_ms)
        self.shard.submit([], frames=0, sync=True, waiting=pending)
        return pending.outcome

    # ---- state ---------------------------------------------------------------------------------------

    def state(self, now_ms: int) -> TopicState:
        """Return the state of the topic. Call `TopicLog.retain` first."""
        index, config = self.log.index, self.config
        return TopicState(
            topic=self.name,
            config=config,
            head_seq=index.head_seq,
            earliest_seq=index.earliest_seq,
            count=index.live,
            bytes=index.live_bytes,
            effective_priority=effective_priority(
                config.priority,
                auto_priority=config.auto_priority,
                now_ms=now_ms,
                last_consumed_ms=self.last_consumed_ms,
            ),
            last_write_ms=self.log.last_write_ms,
            last_read_ms=self.last_read_ms,
            queue=self.queue_counts(now_ms),
        )

    def queue_counts(self, now_ms: int) -> QueueCounts | None:
        """Return the current counts of the jobs, or None for a log. Call `TopicLog.retain` first."""
        return None if self.queue is None else self.queue.counts(now_ms)


def _applied(apply: Callable[[], None]) -> Callable[[Entry, LogPosition], float]:
    def applied(entry: Entry, position: LogPosition) -> float:
        apply()
        return sync_ms(entry, position)

    return applied
