"""The way in: checked, admitted, given a place, committed, published."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from penstock.clock import Clock
from penstock.errors import PenstockError
from penstock.topics.batch import PreparedBatch, prepare
from penstock.topics.catalog import Catalog
from penstock.topics.config import Durability, TopicConfig
from penstock.topics.control import write_head_watermark
from penstock.topics.errors import InvalidRequest, TopicNotFound
from penstock.topics.frame import EncodedBatch, FrameType, encode, encode_control
from penstock.topics.idempotency import Outcome
from penstock.topics.limits import KEY_BYTES_MAX
from penstock.topics.model import BareRecord, WriteResult
from penstock.topics.names import check_topic_name
from penstock.topics.scheduling import Scheduler
from penstock.topics.submission import Append, Done
from penstock.topics.topic import Topic

__all__ = ["Writer"]

_SYNCED: Final = (Durability.FSYNC, Durability.EPHEMERAL)


class Writer:
    """Writes to the topics of a catalog. `check` raises when the engine takes nothing."""

    def __init__(
        self, catalog: Catalog, clock: Clock, check: Callable[[], None], scheduler: Scheduler
    ) -> None:
        self._catalog = catalog
        self._clock = clock
        self._check = check
        self._scheduler = scheduler

    async def write(
        self,
        name: str,
        records: Sequence[BareRecord],
        *,
        node: str | None,
        key: str | None,
        create: bool | None,
        config: TopicConfig | None,
        parsed: bool,
        insist: bool = False,
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
            if not insist:
                self._scheduler.check(topic.shard)
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

    def begin(
        self,
        name: str,
        records: Sequence[BareRecord],
        done: Done,
        *,
        node: str | None,
        parsed: bool,
        insist: bool,
    ) -> bool:
        """See `Engine.begin_write`."""
        batch = prepare(records, node, parsed=parsed)
        topic = self._catalog.find(name)
        if topic is None:
            return False
        if not insist:
            self._scheduler.check(topic.shard)
        self._begin(topic, batch, False, done)
        return True

    async def _append(self, topic: Topic, prepared: PreparedBatch, created: bool) -> WriteResult:
        outcome: asyncio.Future[WriteResult] = asyncio.get_running_loop().create_future()

        def done(result: WriteResult | PenstockError) -> None:
            if outcome.done():
                return
            if isinstance(result, WriteResult):
                outcome.set_result(result)
            else:
                outcome.set_exception(result)

        self._begin(topic, prepared, created, done)
        return await outcome

    def _begin(self, topic: Topic, prepared: PreparedBatch, created: bool, done: Done) -> None:
        """Give the records their place and send them on; `done` is told when they are committed."""
        now_ms = self._clock.now_ms()
        catalog, config = self._catalog, topic.config
        catalog.retain(topic, now_ms)
        topic.shard.check_room()
        if config.discard == "reject":
            topic.admit(prepared.count, prepared.accounted_bytes)
        catalog.check_total(prepared.accounted_bytes)
        batch = encode(
            prepared,
            topic_id=topic.id,
            first_seq=topic.next_seq,
            ts_ms=max(now_ms, topic.last_ts_ms),
            durable=config.durable,
        )
        append = Append(topic, batch, now_ms, created, catalog.tally, done)
        if topic.is_in_memory and topic.is_idle:
            topic.take_off(batch)
            append.keep()
        else:
            self._submit(topic, batch, append)

    def _submit(self, topic: Topic, batch: EncodedBatch, append: Append) -> None:
        durability = topic.config.durability
        reserved = 0
        # An ephemeral topic whose earlier records are still being written waits for its turn all the same.
        is_in_memory = topic.is_in_memory
        frames = [] if is_in_memory else topic.moved_floors()
        if durability is Durability.DISK and (reserved := topic.reservation(batch)):
            frames.append(encode_control(FrameType.HEAD_WATERMARK, topic.id, write_head_watermark(reserved)))
        if frames or reserved:
            append.behind(frames, reserved)
        topic.shard.submit(
            frames if is_in_memory else [*frames, batch.buffer],
            frames=len(frames) + batch.count,
            # Behind a change to a class that syncs, an ephemeral topic's records are synced with it.
            sync=durability in _SYNCED or reserved > 0,
            waiting=append,
        )
        topic.take_off(batch)
        self._catalog.tally(topic)


def _check_key(key: str) -> None:
    if not key:
        raise InvalidRequest("idempotency_key is empty; leave it out or give one")
    size = len(key.encode("utf-8", "surrogatepass"))
    if size > KEY_BYTES_MAX:
        raise InvalidRequest(f"idempotency_key has {size} bytes; at most {KEY_BYTES_MAX} are allowed")
