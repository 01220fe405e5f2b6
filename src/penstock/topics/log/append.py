"""The write path: records are checked, admitted, numbered, committed and published."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from penstock.clock import SteadyClock
from penstock.errors import PenstockError
from penstock.topics.config import Durability, TopicConfig
from penstock.topics.errors import CommitFailed, InvalidRequest, TopicNotFound
from penstock.topics.limits import KEY_BYTES_MAX
from penstock.topics.log.control import write_head_watermark
from penstock.topics.log.frame import EncodedBatch, FrameType, encode, encode_control
from penstock.topics.log.payload import PreparedBatch, prepare
from penstock.topics.log.pending import AppendBatch, Done, PendingAppend, Write, tell_failed
from penstock.topics.model import BareRecord, WriteResult
from penstock.topics.names import check_topic_name
from penstock.topics.schedule.pressure import Scheduler
from penstock.topics.topic.catalog import Catalog
from penstock.topics.topic.idempotency import Outcome
from penstock.topics.topic.topic import Topic

_LOGGER = logging.getLogger(__name__)
_SYNCED: Final = (Durability.FSYNC, Durability.EPHEMERAL)


class Writer:
    """Writes to the topics of a catalog. `check` raises when the engine takes nothing."""

    def __init__(
        self, catalog: Catalog, clock: SteadyClock, check: Callable[[], None], scheduler: Scheduler
    ) -> None:
        self._catalog = catalog
        self._clock = clock
        self._check = check
        self._scheduler = scheduler
        self._gathered: dict[Topic, AppendBatch] = {}

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
                if topic.deleting is not None or topic.deleted:
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
        now_ms = self._clock.steady_ms()
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
        outcome = _Outcome()

        def settle(result: WriteResult | PenstockError) -> None:
            # Also when the caller is gone, so that a retry finds out what became of it.
            if isinstance(result, WriteResult):
                topic.keys.add(key, Outcome(result.first_seq, result.last_seq, result.head_seq, now_ms))
            over()
            outcome.settle(result)

        def over() -> None:
            del topic.writing[key]
            writing.set_result(None)

        topic.writing[key] = writing
        try:
            self._begin(topic, batch, created, settle)
        except BaseException:
            over()
            raise
        return await outcome.reached()

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
        outcome = _Outcome()
        self._begin(topic, prepared, created, outcome.settle)
        return await outcome.reached()

    def _begin(self, topic: Topic, prepared: PreparedBatch, created: bool, done: Done) -> None:
        """Number the records and submit them; `done` is called when they are committed."""
        now_ms = self._clock.now_ms()
        catalog, config = self._catalog, topic.config
        catalog.retain(topic, now_ms)
        topic.shard.check_room()
        if config.discard == "reject":
            topic.admit(prepared.count, prepared.accounted_bytes)
        catalog.check_total(prepared.accounted_bytes)
        if topic.is_volatile:
            self._keep(topic, prepared, now_ms, (prepared.count, created, done))
        else:
            self._gather(topic, prepared, now_ms, created, done)
        catalog.tally(topic)

    def _keep(self, topic: Topic, prepared: PreparedBatch, now_ms: int, write: Write) -> None:
        """The records of an ephemeral topic are not logged."""
        topic.shard.flush_pending()  # what is gathered has its numbers for certain only then
        batch = encode(
            prepared,
            topic_id=topic.id,
            first_seq=topic.next_seq,
            ts_ms=max(now_ms, topic.last_ts_ms),
            durable=topic.config.durable,
        )
        append = PendingAppend(topic, batch, now_ms, self._catalog.tally, [write])
        if topic.is_idle:
            topic.reserve_seqs(batch.count, batch.accounted_bytes, batch.ts_ms)
            append.keep()
            return
        # Earlier records are still being written, and perhaps a change to a class that syncs.
        topic.shard.submit([], frames=batch.count, sync=True, waiting=append)
        topic.reserve_seqs(batch.count, batch.accounted_bytes, batch.ts_ms)

    def _gather(self, topic: Topic, prepared: PreparedBatch, now_ms: int, created: bool, done: Done) -> None:
        shard, is_alone = topic.shard, False
        gathered = self._gathered.get(topic)
        if gathered is None or not gathered.takes(prepared, topic.config.durability):
            if gathered is not None:
                self._send(topic)
            gathered = AppendBatch(topic, prepared, now_ms)
            is_alone = gathered.durability is Durability.FSYNC and shard.is_quiet
            if not is_alone:
                self._gathered[topic] = gathered
                shard.defer_flush(partial(self._send, topic))
        shard.count_in()
        gathered.add(prepared, created, done)
        topic.reserve_seqs(prepared.count, prepared.accounted_bytes, gathered.ts_ms)
        if is_alone:
            self._log(gathered)
            shard.commit()
        elif gathered.is_full:
            self._send(topic)

    def _send(self, topic: Topic) -> None:
        """Submit what was gathered for a topic, unless it was submitted already."""
        gathered = self._gathered.pop(topic, None)
        if gathered is not None:
            self._log(gathered)

    def _log(self, gathered: AppendBatch) -> None:
        topic = gathered.topic
        try:
            batch = encode(
                gathered.together(),
                topic_id=topic.id,
                first_seq=gathered.first_seq,
                ts_ms=gathered.ts_ms,
                durable=gathered.durability is Durability.FSYNC,
                ends=gathered.ends,
            )
        except Exception as error:
            # Nobody has built on it yet: whatever takes a sequence number submits, and so sends, first.
            _LOGGER.exception("writes that were taken could not be encoded")
            topic.release_seqs(gathered.count, gathered.accounted_bytes)
            topic.shard.count_out(len(gathered.writes))
            # Later: who hears of it may write again, and whoever had this sent is in the middle of something.
            told = CommitFailed(f"the records could not be encoded: {error!r}")
            asyncio.get_running_loop().call_soon(tell_failed, gathered.writes, told)
            return
        self._submit(gathered, batch)

    def _submit(self, gathered: AppendBatch, batch: EncodedBatch) -> None:
        topic = gathered.topic
        append = PendingAppend(topic, batch, gathered.now_ms, self._catalog.tally, gathered.writes)
        frames = topic.moved_floors()
        reserved = 0
        if gathered.durability is Durability.DISK and (reserved := topic.reservation(batch)):
            frames.append(encode_control(FrameType.HEAD_WATERMARK, topic.id, write_head_watermark(reserved)))
        if frames:
            append.behind(frames, reserved)
        topic.shard.submit(
            [*frames, batch.buffer],
            frames=len(frames) + batch.count,
            sync=gathered.durability in _SYNCED or reserved > 0,
            waiting=append,
            gathered=len(gathered.writes),
        )


class _Outcome:
    """The outcome of one write, for the caller that waits for it."""

    __slots__ = ("_result", "_waiter")

    def __init__(self) -> None:
        self._result: WriteResult | PenstockError | None = None
        self._waiter: asyncio.Future[WriteResult | PenstockError] | None = None

    def settle(self, result: WriteResult | PenstockError) -> None:
        self._result = result
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(result)

    async def reached(self) -> WriteResult:
        """The result as soon as it is known, which for a lone write is at once. Raises what kept it away."""
        result = self._result
        if result is None:
            self._waiter = asyncio.get_running_loop().create_future()
            result = await self._waiter
        if isinstance(result, WriteResult):
            return result
        raise result


def _check_key(key: str) -> None:
    if not key:
        raise InvalidRequest("idempotency_key is empty; leave it out or give one")
    size = len(key.encode("utf-8", "surrogatepass"))
    if size > KEY_BYTES_MAX:
        raise InvalidRequest(f"idempotency_key has {size} bytes; at most {KEY_BYTES_MAX} are allowed")
