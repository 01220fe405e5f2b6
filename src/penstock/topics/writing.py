"""The way in: checked, admitted, given a place, committed, published."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from penstock.clock import Clock
from penstock.files import Entry
from penstock.topics.batch import PreparedBatch, prepare
from penstock.topics.catalog import Catalog
from penstock.topics.config import Durability, TopicConfig
from penstock.topics.control import write_head_watermark
from penstock.topics.errors import InvalidRequest, TopicNotFound
from penstock.topics.frame import EncodedBatch, FrameType, encode, encode_control
from penstock.topics.idempotency import Outcome
from penstock.topics.limits import KEY_BYTES_MAX
from penstock.topics.model import NewRecord, WriteResult
from penstock.topics.names import check_topic_name
from penstock.topics.submission import Append
from penstock.topics.topic import Topic

__all__ = ["Writer"]


class Writer:
    """Writes to the topics of a catalog. `check` raises when the engine takes nothing."""

    def __init__(self, catalog: Catalog, clock: Clock, check: Callable[[], None]) -> None:
        self._catalog = catalog
        self._clock = clock
        self._check = check

    async def write(
        self,
        name: str,
        records: Sequence[NewRecord],
        *,
        node: str | None,
        key: str | None,
        create: bool | None,
        config: TopicConfig | None,
        parsed: bool,
    ) -> WriteResult:
        """See `Engine.write`."""
        batch = prepare(records, node, parsed=parsed)
        if key is not None:
            _check_key(key)
        created = False
        while True:
            topic = self._catalog.find(name)
            if topic is None:
                topic, created = await self._topic(name, create, config)
                if topic.leaving is not None or topic.gone:
                    continue
            if key is None:
                return await self._append(topic, batch, created)
            if (writing := topic.writing.get(key)) is None:
                return await self._append_once(topic, batch, created, key)
            await asyncio.wait([writing])
            self._check()

    async def _topic(self, name: str, create: bool | None, config: TopicConfig | None) -> tuple[Topic, bool]:
        """The topic, and whether it was made for this write."""
        topic = await self._catalog.settled(name)
        self._check()
        if topic is not None:
            return topic, False
        config = TopicConfig() if config is None else config
        if not (config.auto_create if create is None else create):
            raise TopicNotFound(name)
        check_topic_name(name)
        return await self._catalog.create(name, config.resolved(name)), True

    async def _append_once(self, topic: Topic, batch: PreparedBatch, created: bool, key: str) -> WriteResult:
        """The first write with a key appends; a later one gets its outcome, as long as it is remembered."""
        now_ms = self._clock.now_ms()
        done = topic.keys.find(key, now_ms=now_ms, window_ms=topic.config.idempotency_window_ms)
        if done is not None:
            return WriteResult(
                topic=topic.name,
                first_seq=done.first_seq,
                last_seq=done.last_seq,
                head_seq=done.head_seq,
                created=False,
                deduped=True,
            )
        writing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        topic.writing[key] = writing
        return await asyncio.shield(self._remembered(topic, batch, created, key, now_ms, writing))

    async def _remembered(
        self,
        topic: Topic,
        batch: PreparedBatch,
        created: bool,
        key: str,
        now_ms: int,
        writing: asyncio.Future[None],
    ) -> WriteResult:
        """Runs to its end even if the caller goes, so that a retry finds out what became of it."""
        try:
            result = await self._append(topic, batch, created)
            topic.keys.add(key, Outcome(result.first_seq, result.last_seq, result.head_seq, now_ms))
            return result
        finally:
            del topic.writing[key]
            writing.set_result(None)

    async def _append(self, topic: Topic, prepared: PreparedBatch, created: bool) -> WriteResult:
        now_ms = self._clock.now_ms()
        self._catalog.retain(topic)
        topic.shard.check_room()
        topic.admit(prepared.count, prepared.accounted_bytes)
        self._catalog.check_total(prepared.accounted_bytes)
        batch = encode(
            prepared,
            topic_id=topic.id,
            first_seq=topic.next_seq,
            ts_ms=max(now_ms, topic.last_ts_ms),
            durable=topic.config.durable,
        )
        if topic.is_ephemeral and not topic.in_flight:
            topic.take_off(batch)
            topic.keep_in_memory(batch, now_ms=now_ms)
            self._catalog.tally(topic)
            return _written(topic, batch, created)
        append = self._submit(topic, batch, now_ms)
        entry = await append.outcome
        return _written(topic, batch, created, entry)

    def _submit(self, topic: Topic, batch: EncodedBatch, now_ms: int) -> Append:
        durability = topic.config.durability
        sync = durability is Durability.FSYNC
        reserved = 0
        # An ephemeral topic whose earlier records are still being written waits for its turn all the same.
        frames = [] if topic.is_ephemeral else topic.moved_floors()
        if durability is Durability.DISK and (reserved := topic.reservation(batch)):
            frames.append(encode_control(FrameType.HEAD_WATERMARK, topic.id, write_head_watermark(reserved)))
        append = Append(
            topic,
            batch,
            skip_bytes=sum(map(len, frames)),
            reserved=reserved,
            now_ms=now_ms,
            on_published=self._catalog.tally,
        )
        topic.shard.submit(
            frames if topic.is_ephemeral else [*frames, batch.buffer],
            frames=len(frames) + batch.count,
            sync=sync or reserved > 0,
            waiting=append,
        )
        topic.take_off(batch)
        self._catalog.tally(topic)
        return append


def _written(topic: Topic, batch: EncodedBatch, created: bool, entry: Entry | None = None) -> WriteResult:
    return WriteResult(
        topic=topic.name,
        first_seq=batch.first_seq,
        last_seq=batch.last_seq,
        head_seq=max(batch.last_seq, topic.index.head_seq),
        created=created,
        deduped=False,
        wal_append_ms=0.0 if entry is None else entry.append_s * 1000,
        fsync_ms=entry.sync_s * 1000 if entry is not None and topic.config.durable else 0.0,
    )


def _check_key(key: str) -> None:
    if not key:
        raise InvalidRequest("idempotency_key is empty; leave it out or give one")
    size = len(key.encode("utf-8", "surrogatepass"))
    if size > KEY_BYTES_MAX:
        raise InvalidRequest(f"idempotency_key has {size} bytes; at most {KEY_BYTES_MAX} are allowed")
