"""The catalog: topics by name, in order, with their creation and deletion.

A topic enters the catalog when its creation commits, and leaves when its deletion commits. Every call for the
name waits between submission and commit, so no call writes to a topic that is being deleted.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec

from penstock.clock import SteadyClock
from penstock.topics.config import Durability, EngineConfig, TopicConfig
from penstock.topics.errors import IncompatibleTopic, Throttled, TopicNotEmpty, TopicNotFound
from penstock.topics.limits import PAGE_SIZE_DEFAULT
from penstock.topics.log.control import TopicChange, write_head_watermark
from penstock.topics.log.frame import FrameType, encode_control
from penstock.topics.log.wal import Wal, WalShard
from penstock.topics.model import PutResult, RemoveResult, TopicState
from penstock.topics.names import check_topic_name
from penstock.topics.topic.changes import PendingCommit
from penstock.topics.topic.lease_log import log_leases
from penstock.topics.topic.topic import Topic

T = TypeVar("T")

_CONFIG = msgspec.json.Encoder()


class Catalog:
    """All topics of an engine and their total size. Used only on the event loop's thread."""

    def __init__(self, config: EngineConfig, clock: SteadyClock) -> None:
        self._config = config
        self._clock = clock
        self._topics: dict[str, Topic] = {}
        self._names: list[str] = []
        self._creating: dict[str, asyncio.Future[None]] = {}
        self._wal: Wal | None = None
        self._on_removed: Callable[[Topic], None] = lambda _: None
        self._on_entered: list[Callable[[str], None]] = []
        self.next_topic_id = 1
        self.lost_seq = 0
        """New topics start above this number, because a lost topic of the same name may have reached it."""
        self.total_bytes = 0
        """Accounted bytes of all live records and of all writes in flight."""

    def open(self, wal: Wal, topics: Iterable[Topic], next_topic_id: int, lost_seq: int) -> None:
        """Enter the topics that recovery found at the start."""
        self._wal = wal
        self.next_topic_id = next_topic_id
        self.lost_seq = lost_seq
        for topic in topics:
            topic.attach(wal.shard_of(topic.id), self._clock)
            self._enter(topic)

    def on_removed(self, callback: Callable[[Topic], None]) -> None:
        """Call `callback` with every topic whose deletion has committed."""
        self._on_removed = callback

    def on_entered(self, callback: Callable[[str], None]) -> None:
        """Call `callback` with the name of every topic that is created from now on."""
        self._on_entered.append(callback)

    def all(self) -> list[Topic]:
        return list(self._topics.values())

    def __len__(self) -> int:
        return len(self._topics)

    def __contains__(self, name: str) -> bool:
        return name in self._topics

    def find(self, name: str) -> Topic | None:
        """Return the topic, or None if it does not exist or is being deleted."""
        topic = self._topics.get(name)
        return None if topic is None or topic.deleting is not None else topic

    def get(self, name: str) -> Topic:
        """Return the topic for a reader. Raise `TopicNotFound` if it does not exist."""
        topic = self._topics.get(name)
        if topic is None:
            raise TopicNotFound(name)
        return topic

    def take_id(self) -> int:
        """Return an id that no topic or router has had before."""
        taken, self.next_topic_id = self.next_topic_id, self.next_topic_id + 1
        return taken

    async def settled(self, name: str) -> Topic | None:
        """Wait until no creation or deletion of the topic is in progress. Return the topic, or None."""
        while True:
            topic = self._topics.get(name)
            in_progress = self._creating.get(name) if topic is None else topic.deleting
            if in_progress is None:
                return topic
            await asyncio.wait([in_progress])

    def give_up_in_flight(self, shard: WalShard) -> None:
        """Drop the writes in flight of a shard whose commit failed. None of them will be published."""
        for topic in self._topics.values():
            if topic.shard is shard:
                topic.log.give_up_in_flight()
                self.tally(topic)

    # ---- creation and deletion -----------------------------------------------------------------------

    async def put(self, name: str, config: TopicConfig) -> PutResult:
        """Create a topic, or reconfigure an existing one. See `Engine.put_topic`."""
        check_topic_name(name)
        config = config.resolved(name)
        topic = await self.settled(name)
        if topic is None:
            await self.create(name, config)
            return PutResult(topic=name, created=True, config=config)
        if topic.config.type != config.type:
            raise IncompatibleTopic(
                f'topic "{name}" is a {topic.config.type} and cannot become a {config.type}; delete it first',
                {"topic": name, "existing_type": topic.config.type, "requested_type": config.type},
            )
        if topic.config != config:
            await self._reconfigure(topic, config)
        return PutResult(topic=name, created=False, config=config)

    def check_count(self, more: int) -> None:
        """Raise `Throttled` if `more` new topics would exceed the limit."""
        cap = self._config.max_topics
        if cap and len(self._topics) + len(self._creating) + more > cap:
            raise Throttled(
                f"there are {len(self._topics)} topics; delete some or raise the limit",
                {"limit": "max_topics", "max": cap},
            )

    async def create(self, name: str, config: TopicConfig) -> Topic:
        """Create a topic that no other call is creating. Raise `Throttled` if there are too many."""
        self.check_count(1)
        assert self._wal is not None
        topic_id = self.take_id()
        topic = Topic(name=name, id=topic_id, config=config)
        topic.attach(self._wal.shard_of(topic_id), self._clock)
        if self.lost_seq:
            topic.log.mark_log_lost(self.lost_seq)
            topic.log.forget_in_flight()
        body = _named(topic, config, self.lost_seq)
        created = self.change(topic, FrameType.TOPIC_CREATE, body, lambda: self._enter(topic))
        self._creating[name] = created
        created.add_done_callback(lambda _: self._creating.pop(name))
        # The creation continues even if the caller is cancelled, because other calls wait for it.
        await asyncio.shield(created)
        return topic

    async def _reconfigure(self, topic: Topic, config: TopicConfig) -> None:
        logged: list[asyncio.Future[float]] = []

        def apply() -> None:
            now_ms, had_durable_leases = self._clock.now_ms(), topic.config.leases_durable
            topic.reconfigure(config, now_ms)
            self.tally(topic)
            if topic.queue is not None and config.leases_durable and not had_durable_leases:
                logged.extend(log_leases(topic, now_ms))

        decided = self.change(topic, FrameType.CONFIG_UPDATE, _named(topic, config), apply)
        if topic.is_ephemeral and config.durability is not Durability.EPHEMERAL:
            topic.make_durable(decided)
        # The change continues even if the caller is cancelled, because later writes rely on it.
        await asyncio.shield(decided)
        for part in logged:
            await part

    async def remove(self, name: str, *, if_empty: bool) -> RemoveResult:
        """Delete a topic. See `Engine.remove_topic`."""
        topic = await self.settled(name)
        if topic is None:
            return RemoveResult(topic=name, deleted=False)
        self.retain(topic)
        if if_empty and (count := topic.log.index.live + topic.log.in_flight):
            raise TopicNotEmpty(
                f'topic "{name}" has {count} records; delete them first or leave out if_empty',
                {"topic": name, "count": count},
            )
        leaving = self.change(topic, FrameType.TOPIC_DELETE, _named(topic, None), lambda: self._leave(topic))
        topic.deleting = leaving
        leaving.add_done_callback(lambda _: topic.stay())
        # The deletion continues even if the caller is cancelled, because other calls wait for it.
        await asyncio.shield(leaving)
        return RemoveResult(topic=name, deleted=True, routers_removed=topic.routers_removed)

    def change(self, topic: Topic, kind: FrameType, body: bytes, apply: Callable[[], T]) -> asyncio.Future[T]:
        """Make a change durable, then apply it, even if the caller is cancelled."""
        topic.shard.check_room()
        frames = [*topic.log.moved_floors(), encode_control(kind, topic.id, body, ts_ms=self._clock.now_ms())]
        if kind is FrameType.CONFIG_UPDATE and topic.is_ephemeral and topic.log.next_seq > 1:
            # The log has no record of this topic, but its sequence numbers must still never be reused.
            used = write_head_watermark(topic.log.next_seq - 1)
            frames.append(encode_control(FrameType.HEAD_WATERMARK, topic.id, used))
        change = PendingCommit(lambda entry, position: apply())
        # Changes are small, and deletions free space on a full disk.
        topic.shard.submit(frames, frames=len(frames), sync=True, waiting=change, urgent=True)
        return change.outcome

    def _enter(self, topic: Topic) -> None:
        self._topics[topic.name] = topic
        insort(self._names, topic.name)
        self.tally(topic)
        for callback in self._on_entered:
            callback(topic.name)

    def _leave(self, topic: Topic) -> None:
        del self._topics[topic.name]
        del self._names[bisect_left(self._names, topic.name)]
        self.total_bytes -= topic.tally_bytes
        topic.deleted = True
        topic.subscribers.notify()
        self._on_removed(topic)

    # ---- queries -------------------------------------------------------------------------------------

    def page(
        self,
        *,
        prefix: str = "",
        after: str = "",
        limit: int = PAGE_SIZE_DEFAULT,
        touch: bool = False,
        allowed: Callable[[str], bool] | None = None,
    ) -> tuple[list[TopicState], str | None]:
        """Return a page of topics in order of their names. See `Engine.topics`."""
        found: list[TopicState] = []
        now_ms = self._clock.now_ms()
        start = max(bisect_left(self._names, prefix), bisect_right(self._names, after) if after else 0)
        for place in range(start, len(self._names)):
            name = self._names[place]
            if not name.startswith(prefix):
                break
            if allowed is not None and not allowed(name):
                continue
            if len(found) == limit:
                return found, found[-1].topic
            topic = self._topics[name]
            if touch:
                topic.last_consumed_ms = now_ms
            self.retain(topic)
            found.append(topic.state(now_ms))
        return found, None

    def retain(self, topic: Topic, now_ms: int | None = None) -> None:
        """Evict records that exceed the age or size limits, then update the total."""
        topic.log.retain(self._clock.now_ms() if now_ms is None else now_ms)
        self.tally(topic)

    def tally(self, topic: Topic) -> None:
        """Update the total over all topics with the current size of this topic."""
        now = topic.log.index.live_bytes + topic.log.in_flight_bytes
        if now != topic.tally_bytes and not topic.deleted:
            self.total_bytes += now - topic.tally_bytes
            topic.tally_bytes = now

    def total_left(self) -> int | None:
        """Return how many more bytes all topics together may hold, or None if there is no limit."""
        cap = self._config.max_total_bytes
        return max(cap - self.total_bytes, 0) if cap else None

    def check_total(self, size: int) -> None:
        """Raise `Throttled` if `size` more bytes exceed the limit over all topics."""
        cap = self._config.max_total_bytes
        if cap and self.total_bytes + size > cap:
            raise Throttled(
                f"all topics together hold {self.total_bytes} bytes of at most {cap}; delete some records",
                {"limit": "max_total_bytes", "max": cap},
            )


def _named(topic: Topic, config: TopicConfig | None, lost_seq: int = 0) -> bytes:
    encoded = b"" if config is None else _CONFIG.encode(config)
    return TopicChange(name=topic.name, config=encoded, lost_seq=lost_seq).encode()
