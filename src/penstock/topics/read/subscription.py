"""Follow a topic: notifications of every change, and reads without waiting where possible.

A feed belongs to one instance of a topic. When the topic is deleted the feed says so, and a topic of the same
name that is created later has another epoch.

Records of `disk` topics are published when they are written, and synced a moment later. A client that must
not see anything a power cut could take back asks for that sync: it is an empty entry in the log, after the
records, and when it is durable so are they.
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
    """How much of one topic is synced. Ask after every publish: one sync at a time is in progress.

    `tell` is called with True when more is synced than before, and with False when that failed: ask again
    later. It may ask at once.
    """

    __slots__ = (
        "_asked_seq",
        "_failed",
        "_is_closed",
        "_pending",
        "_shards",
        "_synced_seq",
        "_tell",
        "_topic",
    )

    def __init__(self, topic: Topic, shards: Sequence[WalShard], tell: Callable[[bool], None]) -> None:
        self._topic = topic
        self._shards = shards
        self._tell = tell
        self._synced_seq = 0
        self._asked_seq = 0
        self._pending = 0
        self._failed = False
        self._is_closed = False

    @property
    def end_seq(self) -> int:
        """Up to here records may be handed out: where there is nothing to wait for, up to the head."""
        topic = self._topic
        return self._synced_seq if topic.config.durability is Durability.DISK else topic.log.index.head_seq

    def ask(self) -> None:
        """See to it that everything that is published now gets synced."""
        topic = self._topic
        if self._pending or self._is_closed or topic.deleted or self.end_seq == topic.log.index.head_seq:
            return
        # A copy is durable when what it is a copy of is, and that may be in any log.
        shards = self._shards if topic.log.has_chunks else (topic.shard,)
        try:
            for shard in shards:
                shard.check_room()
        except (Throttled, ShuttingDown):
            self._tell(False)
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
        self._tell(not self._failed)


class SubscriptionFilter(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """The filter and format of a subscription; equal ones share the pages that are rendered for them."""

    limit: int = DIFF_LIMIT_DEFAULT
    max_batch_bytes: int = BATCH_BYTES_DEFAULT
    nodes: frozenset[str] = frozenset()
    """Records of these origins are left out, unless the topic does not filter."""
    include_tags: bool = False
    include_meta: bool = True
    include_data: bool = True
    match: Predicate | None = None
    strong: bool = False
    """Nothing that a power cut could still take back."""

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
        """With defaults for zeros, and values above the limits lowered to them."""
        within = DiffRequest.of(limit=limit, max_batch_bytes=max_batch_bytes)
        return cls(
            limit=within.limit,
            max_batch_bytes=within.max_batch_bytes,
            nodes=frozenset(nodes),
            include_tags=include_tags,
            include_meta=include_meta,
            include_data=include_data,
            match=match,
            strong=strong,
        )


class Feed:
    """One topic, followed. Belongs to the event loop's thread, as the topic does."""

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
        """The effective priority of the topic, before it ages by waiting."""
        config = self._topic.config
        return effective_priority(
            config.priority,
            auto_priority=config.auto_priority,
            now_ms=now_ms,
            last_consumed_ms=self._topic.last_consumed_ms,
        )

    def fence(self, tell: Callable[[bool], None]) -> DurableWatermark:
        """The watermark for readers that want synced records only; see `DurableWatermark` for `tell`."""
        return DurableWatermark(self._topic, self._shards, tell)

    def listen(self, tell: Callable[[], None]) -> None:
        """Call this whenever records are published and when the topic goes; it must not raise."""
        self._topic.subscribers.listen(tell)

    def unlisten(self, tell: Callable[[], None]) -> None:
        self._topic.subscribers.unlisten(tell)

    def refresh(self) -> None:
        """Bring in what others feed into the topic and is not there yet."""
        self._refresh()

    def page_at_hand(self, from_seq: int, want: SubscriptionFilter, *, until_seq: int = 0) -> Page | None:
        """The records after `from_seq`; None if some have to be fetched, which `page` does.

        With `until_seq` none after it. Raises `Damaged` when the next record cannot be read.
        """
        return self._reader.page_at_hand(self._topic, self._request(from_seq, want, until_seq))

    async def page(self, from_seq: int, want: SubscriptionFilter, *, until_seq: int = 0) -> Page:
        """Read a page from any tier. Raises as `page_at_hand`, and `TopicNotFound` and `Unavailable`."""
        try:
            request = self._request(from_seq, want, until_seq)
            page = await self._reader.read(self._topic, request, wait_ms=0)
        except Damaged:
            if not self._topic.deleted:
                raise
            page = None  # its files went with it
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
