"""Following a topic: notifications of every change, and reads that wait only when necessary.

A feed belongs to one instance of a topic. It reports when the topic is deleted. A later topic of the same
name has another epoch.

Records of `disk` topics are published when they are written and synced shortly afterwards. A client that must
not see records that a power failure could lose requests a sync. It is an empty entry in the log after the
records: when the entry is durable, so are they.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from penstock.errors import PenstockError
from penstock.storage import Entry, LogPosition
from penstock.topics.config import Durability
from penstock.topics.errors import Damaged, ShuttingDown, Throttled, TopicNotFound
from penstock.topics.limits import BATCH_BYTES_DEFAULT, DIFF_LIMIT_DEFAULT
from penstock.topics.log.wal import WalShard
from penstock.topics.model import Page, Predicate
from penstock.topics.read.page import DiffRequest, Reader
from penstock.topics.schedule.ready_set import effective_priority
from penstock.topics.topic.topic import Topic


class DurableWatermark:
    """The durable watermark of one topic. Call `ask` after every publish; one sync at a time is in progress.

    `callback` is called with True when the watermark has risen, and with False when the sync failed and must
    be requested again later. It may call `ask` immediately.
    """

    __slots__ = (
        "_asked_seq",
        "_callback",
        "_failed",
        "_is_closed",
        "_pending",
        "_shards",
        "_synced_seq",
        "_topic",
    )

    def __init__(self, topic: Topic, shards: Sequence[WalShard], callback: Callable[[bool], None]) -> None:
        self._topic = topic
        self._shards = shards
        self._callback = callback
        self._synced_seq = 0
        self._asked_seq = 0
        self._pending = 0
        self._failed = False
        self._is_closed = False

    @property
    def end_seq(self) -> int:
        """Return the last record that may be delivered: the durable one, or the head if no sync is needed."""
        topic = self._topic
        return self._synced_seq if topic.config.durability is Durability.DISK else topic.log.index.head_seq

    def ask(self) -> None:
        """Start a sync of everything that is published now, unless one is in progress."""
        topic = self._topic
        if self._pending or self._is_closed or topic.deleted or self.end_seq == topic.log.index.head_seq:
            return
        # A copy is durable when its original is, and that may be in any log.
        shards = self._shards if topic.log.has_chunks else (topic.shard,)
        try:
            for shard in shards:
                shard.check_room()
        except (Throttled, ShuttingDown):
            self._callback(False)
            return
        self._asked_seq = topic.log.index.head_seq
        self._pending, self._failed = len(shards), False
        for shard in shards:
            shard.submit([], frames=0, sync=True, waiting=self)

    def close(self) -> None:
        """Stop notifying."""
        self._is_closed = True

    def committed(self, entry: Entry, position: LogPosition) -> None:
        self._decided()

    def failed(self, error: PenstockError) -> None:
        self._failed = True
        self._decided()

    def _decided(self) -> None:
        self._pending -= 1
        if self._pending or self._is_closed:
            return
        if not self._failed:
            self._synced_seq = self._asked_seq
        self._callback(not self._failed)


class SubscriptionFilter(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """The filter and format of a subscription. Equal ones share rendered pages."""

    limit: int = DIFF_LIMIT_DEFAULT
    max_batch_bytes: int = BATCH_BYTES_DEFAULT
    nodes: frozenset[str] = frozenset()
    """The origins whose records are skipped, unless the topic does not filter by origin."""
    include_tags: bool = False
    include_meta: bool = True
    include_data: bool = True
    match: Predicate | None = None
    strong: bool = False
    """Whether only records that survive a power failure are delivered."""

    @classmethod
    def of(
        cls,
        *,
        limit: int = 0,
        max_batch_bytes: int = 0,
        nodes: Iterable[str] = (),
        include_tags: bool = False,
        include_meta: bool = True,
        include_data: bool = True,
        match: Predicate | None = None,
        strong: bool = False,
    ) -> SubscriptionFilter:
        """Return a filter with defaults for zeros, and values limited to their maximum."""
        limited = DiffRequest.of(limit=limit, max_batch_bytes=max_batch_bytes)
        return cls(
            limit=limited.limit,
            max_batch_bytes=limited.max_batch_bytes,
            nodes=frozenset(nodes),
            include_tags=include_tags,
            include_meta=include_meta,
            include_data=include_data,
            match=match,
            strong=strong,
        )


class Feed:
    """A topic that a client follows. Used only on the event loop's thread, as the topic is."""

    __slots__ = ("_reader", "_refresh", "_shards", "_topic", "epoch", "name")

    def __init__(
        self, topic: Topic, reader: Reader, refresh: Callable[[], None], shards: Sequence[WalShard]
    ) -> None:
        self._topic = topic
        self.name = topic.name
        self.epoch = topic.epoch
        self._reader = reader
        self._refresh = refresh
        self._shards = shards

    @property
    def is_gone(self) -> bool:
        return self._topic.deleted

    @property
    def head_seq(self) -> int:
        return self._topic.log.index.head_seq

    def priority(self, now_ms: int) -> int:
        """Return the effective priority of the topic, without the bonus for waiting."""
        config = self._topic.config
        return effective_priority(
            config.priority,
            auto_priority=config.auto_priority,
            now_ms=now_ms,
            last_consumed_ms=self._topic.last_consumed_ms,
        )

    def fence(self, callback: Callable[[bool], None]) -> DurableWatermark:
        """Return the watermark for readers that want only synced records. See `DurableWatermark`."""
        return DurableWatermark(self._topic, self._shards, callback)

    def listen(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever records are published and when the topic is deleted. It must not raise."""
        self._topic.subscribers.listen(callback)

    def unlisten(self, callback: Callable[[], None]) -> None:
        self._topic.subscribers.unlisten(callback)

    def refresh(self) -> None:
        """Start copying records that routers still owe to the topic."""
        self._refresh()

    def page_at_hand(self, from_seq: int, want: SubscriptionFilter, *, until_seq: int = 0) -> Page | None:
        """Return the records after `from_seq`, or None if some must be fetched, which `page` does.

        `until_seq` is the last record to return. Raises `Damaged` if the next record cannot be read.
        """
        return self._reader.page_at_hand(self._topic, self._request(from_seq, want, until_seq))

    async def page(self, from_seq: int, want: SubscriptionFilter, *, until_seq: int = 0) -> Page:
        """Read a page from any tier. Raise as `page_at_hand` does, or `TopicNotFound` or `Unavailable`."""
        try:
            request = self._request(from_seq, want, until_seq)
            page = await self._reader.read(self._topic, request, wait_ms=0)
        except Damaged:
            if not self._topic.deleted:
                raise
            page = None  # its files were removed with it
        if page is None or self._topic.deleted:
            raise TopicNotFound(self.name)
        return page

    def _request(self, from_seq: int, want: SubscriptionFilter, until_seq: int) -> DiffRequest:
        return DiffRequest.of(
            from_seq,
            limit=want.limit,
            max_batch_bytes=want.max_batch_bytes,
            nodes=want.nodes,
            include_tags=want.include_tags,
            include_meta=want.include_meta,
            include_data=want.include_data,
            match=want.match,
            until_seq=until_seq,
            dedupe_node=self._topic.config.dedupe_node,
        )
