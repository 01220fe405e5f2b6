"""The write path: records are checked, admitted, numbered, committed and published."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from penstock.clock import SteadyClock
from penstock.topics.config import Durability, TopicConfig
from penstock.topics.errors import CommitFailed, InvalidRequest, TopicNotFound
from penstock.topics.limits import KEY_BYTES_MAX
from penstock.topics.log.control import write_head_watermark
from penstock.topics.log.frame import EncodedBatch, FrameType, encode, encode_control
from penstock.topics.log.payload import PreparedBatch, prepare
from penstock.topics.model import BareRecord, WriteResult
from penstock.topics.names import check_topic_name
from penstock.topics.schedule.pressure import Scheduler
from penstock.topics.topic.catalog import Catalog
from penstock.topics.topic.idempotency import Outcome
from penstock.topics.topic.topic import Topic
from penstock.topics.write.pending import (
    BATCH_BYTES_MAX,
    AppendBatch,
    Done,
    PendingAppend,
    Write,
    report_failure,
)

_LOGGER = logging.getLogger(__name__)
_SYNCED: Final = (Durability.FSYNC, Durability.EPHEMERAL)


class Writer:
    """The writer for the topics of a catalog. `check` raises if the engine accepts no writes."""

    def __init__(
        self, catalog: Catalog, clock: SteadyClock, check: Callable[[], None], scheduler: Scheduler
    ) -> None:
        self._catalog = catalog
        self._clock = clock
        self._check = check
        self._scheduler = scheduler
        self._gathered: dict[Topic, AppendBatch] = {}
        self._waiting: set[asyncio.Task[None]] = set()
        """Writes that wait for their topic, or for an earlier write with the same key."""

    def append(
        self,
        name: str,
        records: Sequence[BareRecord],
        done: Done,
        *,
        node: str | None = None,
        key: str | None = None,
        create: bool | None = None,
        config: TopicConfig | None = None,
        parsed: bool = False,
        insist: bool = False,
    ) -> bool:
        """Append records and call `done` with the outcome. See `Engine.append`."""
        batch = prepare(records, node, parsed=parsed)
        if key is not None:
            _check_key(key)
        topic = self._catalog.find(name)
        if topic is not None and (key is None or key not in topic.writing):
            self._place(topic, batch, False, key, insist, done)
            return True
        waiting = asyncio.get_running_loop().create_task(
            self._wait_for_topic(name, batch, key, create, config, insist, done)
        )
        self._waiting.add(waiting)
        waiting.add_done_callback(self._waiting.discard)
        return False

    async def _wait_for_topic(
        self,
        name: str,
        batch: PreparedBatch,
        key: str | None,
        create: bool | None,
        config: TopicConfig | None,
        insist: bool,
        done: Done,
    ) -> None:
        """Place a write once its topic exists and no other write with its key is in progress."""
        created = False
        try:
            while True:
                topic = self._catalog.find(name)
                if topic is None:
                    topic, created = await self._topic(name, create, config)
                    if topic.deleting is not None or topic.deleted:
                        continue
                if key is None or (writing := topic.writing.get(key)) is None:
                    break
                await asyncio.wait([writing])
                self._check()
            self._place(topic, batch, created, key, insist, done)
        except Exception as error:  # noqa: BLE001 - the caller receives it
            done(error)

    async def _topic(self, name: str, create: bool | None, config: TopicConfig | None) -> tuple[Topic, bool]:
        """Return the topic, and whether it was created for this write."""
        topic = await self._catalog.settled(name)
        self._check()
        if topic is not None:
            return topic, False
        config = TopicConfig() if config is None else config
        if not (config.auto_create if create is None else create):
            raise TopicNotFound(name)
        check_topic_name(name)
        return await self._catalog.create(name, config.resolved(name)), True

    def _place(
        self,
        topic: Topic,
        batch: PreparedBatch,
        created: bool,
        key: str | None,
        insist: bool,
        done: Done,
    ) -> None:
        """Admit a write. Only the first write with a key appends; later ones get its outcome."""
        if not insist:
            self._scheduler.check(topic.shard)
        if key is None:
            self._begin(topic, batch, created, done)
            return
        now_ms = self._clock.steady_ms()
        earlier = topic.keys.find(key, now_ms=now_ms, window_ms=topic.config.idempotency_window_ms)
        if earlier is not None:
            done(
                WriteResult(
                    topic=topic.name,
                    first_seq=earlier.first_seq,
                    last_seq=earlier.last_seq,
                    head_seq=earlier.head_seq,
                    created=False,
                    deduped=True,
                )
            )
            return
        writing: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def release() -> None:
            del topic.writing[key]
            writing.set_result(None)

        def settle(result: WriteResult | Exception) -> None:
            if isinstance(result, WriteResult):
                topic.keys.add(key, Outcome(result.first_seq, result.last_seq, result.head_seq, now_ms))
            release()
            done(result)

        topic.writing[key] = writing
        try:
            self._begin(topic, batch, created, settle)
        except BaseException:
            release()
            raise

    def _begin(self, topic: Topic, prepared: PreparedBatch, created: bool, done: Done) -> None:
        """Number the records and submit them. `done` is called after the commit."""
        now_ms = self._clock.now_ms()
        catalog, config = self._catalog, topic.config
        catalog.retain(topic, now_ms)
        topic.shard.check_room()
        if config.discard == "reject":
            topic.log.admit(prepared.count, prepared.accounted_bytes)
        catalog.check_total(prepared.accounted_bytes)
        if topic.is_volatile:
            self._keep(topic, prepared, now_ms, (prepared.count, created, done))
        else:
            self._gather(topic, prepared, now_ms, created, done)
        catalog.tally(topic)

    def _keep(self, topic: Topic, prepared: PreparedBatch, now_ms: int, write: Write) -> None:
        """Keep the records of an ephemeral topic in memory instead of logging them."""
        topic.shard.flush_pending()  # the sequence numbers of gathered writes are final only after this
        batch = encode(
            prepared,
            topic_id=topic.id,
            first_seq=topic.log.next_seq,
            ts_ms=max(now_ms, topic.log.last_ts_ms),
            durable=topic.config.durable,
        )
        append = PendingAppend(topic, batch, now_ms, self._catalog.tally, [write])
        if topic.log.is_idle:
            topic.log.reserve_seqs(batch.count, batch.accounted_bytes, batch.ts_ms)
            append.keep()
            return
        # Earlier records are still being written, possibly with a change to a durable class.
        topic.shard.submit([], frames=batch.count, sync=True, waiting=append)
        topic.log.reserve_seqs(batch.count, batch.accounted_bytes, batch.ts_ms)

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
        topic.log.reserve_seqs(prepared.count, prepared.accounted_bytes, gathered.ts_ms)
        if is_alone:
            self._log(gathered)
            shard.commit()
        elif gathered.accounted_bytes >= BATCH_BYTES_MAX:
            self._send(topic)

    def _send(self, topic: Topic) -> None:
        """Submit the gathered writes of a topic, if there are any."""
        gathered = self._gathered.pop(topic, None)
        if gathered is not None:
            self._log(gathered)

    def _log(self, gathered: AppendBatch) -> None:
        topic = gathered.topic
        try:
            batch = encode(
                gathered.merged(),
                topic_id=topic.id,
                first_seq=gathered.first_seq,
                ts_ms=gathered.ts_ms,
                durable=gathered.durability is Durability.FSYNC,
                ends=gathered.ends,
            )
        except Exception as error:
            # No other write depends on these numbers: every caller that takes one flushes this batch first.
            _LOGGER.exception("accepted writes could not be encoded")
            topic.log.release_seqs(gathered.count, gathered.accounted_bytes)
            topic.shard.count_out(len(gathered.writes))
            # Report later: a callback may write again, and the caller may be in the middle of a submission.
            failure = CommitFailed(f"the records could not be encoded: {error!r}")
            asyncio.get_running_loop().call_soon(report_failure, gathered.writes, failure)
            return
        self._submit(gathered, batch)

    def _submit(self, gathered: AppendBatch, batch: EncodedBatch) -> None:
        topic = gathered.topic
        append = PendingAppend(topic, batch, gathered.now_ms, self._catalog.tally, gathered.writes)
        frames = topic.log.moved_floors()
        reserved = 0
        if gathered.durability is Durability.DISK and (reserved := topic.log.reservation(batch)):
            frames.append(encode_control(FrameType.HEAD_WATERMARK, topic.id, write_head_watermark(reserved)))
        if frames:
            append.prepend(frames, reserved)
        topic.shard.submit(
            [*frames, batch.buffer],
            frames=len(frames) + batch.count,
            sync=gathered.durability in _SYNCED or reserved > 0,
            waiting=append,
            gathered=len(gathered.writes),
        )


class WriteOutcome:
    """The outcome of one write for a waiting coroutine. Pass `settle` to `Writer.append`."""

    __slots__ = ("_result", "_waiter")

    def __init__(self) -> None:
        self._result: WriteResult | Exception | None = None
        self._waiter: asyncio.Future[WriteResult | Exception] | None = None

    def settle(self, result: WriteResult | Exception) -> None:
        self._result = result
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(result)

    async def wait(self) -> WriteResult:
        """Return the result, without suspending if it is already known. Raise the error of a failed write."""
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
