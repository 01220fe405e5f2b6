"""Relaying a topic into a queue: each record once, even after a crash of any process.

1. The queue stores the position: every batch of the relay is appended as the transaction (application, last
   sequence), see `penstock.buffer`. Batch and position therefore become durable in the same write.
2. A starting relay reads the position and continues after it. There is no other state.
3. Each append requires that the queue is still at the position that the relay continues from. An attempt
   whose response was lost is therefore recognised, and one of two concurrent relays is refused.
4. A record that decoders may refuse, which an earlier version accepted, is durably stored as a dead letter
   next to the queue before the batch that passes it. Its key is logged.
5. Records that the topic has evicted are a gap. `on_gap` says how to handle it.

While one batch is stored, the next one is read.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar
from urllib.parse import quote

import msgspec
import xxhash

from penstock import errors
from penstock.buffer import (
    NO_VERSION,
    Entry,
    EntryIndex,
    Metadata,
    ProducerConfig,
    QueueReader,
    StaleTransaction,
    Transaction,
    append_batches,
    find_tag,
    last_version,
    read_shards,
    storage_error,
    store_batch,
)
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import NotFound, PenstockError
from penstock.ids import SYSTEM_RNG
from penstock.objects import open_store
from penstock.retry import Backoff, RetryPolicy
from penstock.services.feed import cancel_and_wait, unless_set
from penstock.services.relay_batch import (
    Gap,
    Identity,
    RelayBatch,
    RelayConfig,
    RelayGap,
    RelayTaken,
    Start,
    TopicChanged,
    changed,
    identity_of,
)
from penstock.topics import (
    BATCH_BYTES_MAX,
    DIFF_LIMIT_MAX,
    WAIT_MS_MAX,
    Client,
    Durability,
    Page,
    TopicState,
    UnreadableRecord,
    unreadable,
)

T = TypeVar("T")

_TRANSIENT = (errors.Unavailable, errors.Conflict, errors.OutcomeUnknown)
_LOGGER = logging.getLogger(__name__)
_GAPS_KEPT = 100
"""The number of gaps that a report lists. It counts the records of all of them."""
_LOOK_BACK: Final = 64
"""The number of entries, from the newest, that are searched for the last one of this relay."""


@dataclass(slots=True, kw_only=True)
class RelayReport:
    """The result of a run. `through` is the last sequence that is in the queue or was skipped."""

    topic: str
    app: str
    through: int = 0
    head: int = 0
    """The end of the topic at the last read."""
    records: int = 0
    record_bytes: int = 0
    batches: int = 0
    missed: int = 0
    """The number of records that were gone."""
    gaps: list[Gap] = field(default_factory=list)
    """The first gaps."""
    unreadable: int = 0
    """The number of records that were stored as dead letters next to the queue."""

    @property
    def lag(self) -> int:
        return max(0, self.head - self.through)

    def add(self, draft: RelayBatch) -> None:
        """Count a batch that is in the queue."""
        self.through = draft.through
        self.records += draft.count
        self.record_bytes += draft.record_bytes
        self.batches += 1 if draft.count else 0
        self.unreadable += len(draft.dead_letters)
        self.missed += sum(gap.missed for gap in draft.gaps)
        self.gaps += draft.gaps[: _GAPS_KEPT - len(self.gaps)]


class _Note(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The last relayed record, and the number of its batch in the queue."""

    seq: int = msgspec.field(name="$seq")
    ts_ms: int = msgspec.field(name="$ts")
    number: int | None = None
    """The number of the batch, or None in a note that an earlier version wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayPosition:
    """The position in the topic that the queue has reached: up to `seq`, or nothing if that is None."""

    seq: int | None
    last: Identity | None = None
    """The last relayed record, if the queue or its `.relay` object still names it."""


class RelayDeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A record that was not relayed: its position, the reason, and its text in the topic (base64)."""

    topic: str
    seq: int
    ts_ms: int
    reason: str
    recorded_at_ms: int
    data: bytes


class RelayTarget:
    """One queue, or the shard of it that receives this application's batches."""

    def __init__(self, config: ProducerConfig, app: str, *, clock: Clock, rng: random.Random) -> None:
        self._config = config
        self._app = app
        self._clock = clock
        self._rng = rng
        self._store = open_store(config.store, deadline_s=config.append_deadline_s)
        digest = xxhash.xxh3_64_hexdigest(app.encode())
        self._identity_key = f"{config.manifest_key}.relay/{digest}.json"

    async def position(self, topic: str) -> RelayPosition:
        """Return the position after the last appended batch. Raise `StorageError`.

        Warn if this relay has been further: then the queue or its transaction log was rolled back, and
        records are relayed again. Raise `Corrupt` if only the queue was rolled back, because its lost records
        would not be relayed again.
        """
        seq = await self._last_version()
        remembered = await self._remembered()
        if remembered is not None and remembered.seq > (seq or 0):
            seq = await self._last_version()  # another relay may have appended between the two reads
        if remembered is not None and remembered.seq > (seq or 0):
            _LOGGER.warning(
                "%s has %s up to %d, but %d was relayed before: the queue, or its transaction log %s.txn, "
                "was removed or replaced by an older copy. The records after that are relayed again, and may "
                "be in the queue twice",
                self._config.manifest_key,
                topic,
                seq or 0,
                remembered.seq,
                self._config.manifest_key,
            )
        if seq is None:
            return RelayPosition(seq=None)
        index = await QueueReader(self._store, self._config.manifest_key, clock=self._clock).index()
        if remembered is not None and remembered.seq <= seq:
            self._check_queue(index, remembered)
        entry = _newest(index, self._app)
        payloads = [] if entry is None else [item.payload for item in entry.metadata]
        known = None
        if remembered is not None and remembered.seq <= seq:
            known = Identity(seq=remembered.seq, ts_ms=remembered.ts_ms)
        return RelayPosition(seq=seq, last=identity_of(payloads, topic) or known)

    def _check_queue(self, index: EntryIndex, remembered: _Note) -> None:
        """Raise `Corrupt` if the queue has not assigned the number of this relay's last batch yet."""
        end = index.footer.next_sequence
        if remembered.number is not None and end <= remembered.number:
            raise errors.Corrupt(
                f"{self._config.manifest_key} ends before number {end}, and batch {remembered.number} of "
                f"{self._app!r} was in it: the queue was removed or replaced by an older copy. Restore it; "
                "or, if the missing records were delivered or may be lost, relay under another name (app)"
            )

    async def _last_version(self) -> int | None:
        return await last_version(
            self._config, self._app, store=self._store, clock=self._clock, rng=self._rng
        )

    async def set_aside(self, topic: str, bad: UnreadableRecord, text: bytes) -> str:
        """Store a record that is not relayed next to the queue. Return its key, which is the same for each
        attempt.
        """
        dead_letter = RelayDeadLetter(
            topic=topic,
            seq=bad.seq,
            ts_ms=bad.ts_ms,
            reason=bad.reason,
            recorded_at_ms=self._clock.now_ms(),
            data=text,
        )
        # Stores do not accept percent signs and tildes in a key.
        folder = quote(self._app, safe="").replace("~", "%7E").replace("%", "=")
        key = f"{self._config.manifest_key}.dead/relay/{folder}/{bad.seq:020d}.json"
        await self._store.put(key, msgspec.json.encode(dead_letter))
        return key

    async def append(self, relayed: RelayBatch, follows: int | None) -> None:
        """Append a batch once and durably after `follows`, or as the first if that is None. Raise
        `StorageError`.

        Raise `RelayTaken` without appending anything if the queue is at another position.
        """
        now_ms = self._clock.now_ms()
        items = [
            Metadata(start_index=start, ingestion_time_ms=now_ms, payload=payload)
            for start, payload in relayed.metadata()
        ]
        batch = await store_batch(
            self._store,
            self._config.prefix,
            relayed.chunks,
            compression=self._config.compression,
            metadata=items,
            clock=self._clock,
            rng=self._rng,
            policy=RetryPolicy(deadline_s=self._config.append_deadline_s),
        )
        try:
            appended = await append_batches(
                self._config,
                [batch],
                Transaction(app=self._app, version=relayed.through),
                follows=NO_VERSION if follows is None else follows,
                store=self._store,
                clock=self._clock,
                rng=self._rng,
            )
        except StaleTransaction as error:
            raise RelayTaken(
                f"another process relays {relayed.topic} as {self._app!r}: {self._config.manifest_path} has "
                f"records after {follows or 'the beginning'} already. Stop one of the two"
            ) from error
        if relayed.last is not None:
            await self._remember(relayed.last, appended.first)

    async def _remember(self, last: Identity, number: int | None) -> None:
        """Also store the last record outside the queue, because no entry names it after its batch is
        consumed.

        The batch is already in the queue, so a failure is only a warning.
        """
        try:
            note = _Note(seq=last.seq, ts_ms=last.ts_ms, number=number)
            await self._store.put(self._identity_key, msgspec.json.encode(note))
        except PenstockError as error:
            _LOGGER.warning("cannot write %s: %s", self._identity_key, error)

    async def _remembered(self) -> _Note | None:
        try:
            raw = (await self._store.get(self._identity_key)).data
            return msgspec.json.decode(raw, type=_Note)
        except NotFound:
            return None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            _LOGGER.warning("cannot decode %s; the topic is not checked", self._identity_key)
            return None
        except PenstockError as error:
            raise storage_error(error, f"reading {self._identity_key}") from error


@asynccontextmanager
async def open_target(
    config: ProducerConfig, app: str, *, clock: Clock, rng: random.Random
) -> AsyncIterator[RelayTarget]:
    """Open the store of the queue. For a sharded queue, use the shard of `app`."""
    store = open_store(config.store, deadline_s=config.append_deadline_s)
    try:
        _, own = (await read_shards(store, config)).of_app(app)
        yield RelayTarget(replace(own, store=store), app, clock=clock, rng=rng)
    finally:
        if store is not config.store:
            await store.close()


def _newest(index: EntryIndex, app: str) -> Entry | None:
    """Return the newest entry of `app` among the last entries of the queue."""
    for number in reversed(range(max(0, len(index) - _LOOK_BACK), len(index))):
        tag = find_tag(index[number].tail)
        if tag is not None and tag.app == app:
            return index[number]
    return None


class Relay:
    """Moves the records of one topic into one queue. The caller closes `client`."""

    def __init__(
        self,
        client: Client,
        config: RelayConfig,
        *,
        clock: Clock = SYSTEM_CLOCK,
        rng: random.Random = SYSTEM_RNG,
        on_progress: Callable[[RelayReport], None] | None = None,
    ) -> None:
        self._client = client
        self._config = config
        self._clock = clock
        self._rng = rng
        self._on_progress = on_progress or (lambda report: None)
        self._stop = asyncio.Event()
        self._last: Identity | None = None
        self._unsettled: RelayBatch | None = None
        self.report = RelayReport(topic=config.topic, app=config.name)

    def stop(self) -> None:
        """Stop after the current batch."""
        self._stop.set()

    async def run(self, *, once: bool = False) -> RelayReport:
        """Relay until `stop`, or with `once` up to the current end of the topic.

        Transient errors are retried for `retry_for`, each time from the position in the queue. Raise
        `RelayGap`, `RelayTaken`, `TopicChanged`, and errors of the server and the store.
        """
        policy = RetryPolicy(floor_s=0.1, ceiling_s=5.0, deadline_s=self._config.retry_for_s)
        backoff = Backoff(policy, clock=self._clock, rng=self._rng)
        batches, end = self.report.batches, None
        while True:
            try:
                async with open_target(
                    self._config.queue, self._config.name, clock=self._clock, rng=self._rng
                ) as target:
                    state = await self._unless_stopped(self._state())
                    if state is None:
                        return self.report
                    end = state.head_seq if once and end is None else end
                    await self._relay(target, state, end)
                return self.report
            except _TRANSIENT:
                if self.report.batches > batches:
                    batches, backoff = self.report.batches, Backoff(policy, clock=self._clock, rng=self._rng)
                if not await self._unless_stopped(backoff.pause()):
                    raise

    async def _state(self) -> TopicState:
        state = await self._client.state(self._config.topic, touch=False)
        if state.config.durability in (Durability.EPHEMERAL, Durability.MEMORY):
            raise errors.Unsupported(
                f"{self._config.topic} has the durability {state.config.durability.value}: after a crash its "
                "sequences may be reused for other records, so the position would be wrong. Use disk or fsync"
            )
        return state

    async def _relay(self, target: RelayTarget, state: TopicState, end: int | None) -> None:
        position = await target.position(self._config.topic)
        committed = position.seq
        self._settle(committed)
        after = _start(self._config.start, state) if committed is None else committed
        self._check_reached(after, state, begun=committed is not None)
        await self._unless_stopped(self._check_identity(self._known(after, position.last)))
        if self._stop.is_set():
            return
        self.report.through, self.report.head = after, state.head_seq
        self._on_progress(self.report)
        reading = asyncio.create_task(self._gather(after, end))
        try:
            while (batch := await reading) is not None:
                reading = asyncio.create_task(self._gather(batch.through, end))
                for bad, text in batch.dead_letters:
                    key = await target.set_aside(batch.topic, bad, text)
                    _LOGGER.warning(
                        "record %d of %s %s and is not relayed; it is in %s",
                        bad.seq,
                        batch.topic,
                        bad.reason,
                        key,
                    )
                if batch.count:
                    self._unsettled = batch
                    await target.append(batch, committed)
                    committed = batch.through
                    self._settle(committed)
                else:
                    self.report.add(batch)
                self._on_progress(self.report)
        finally:
            await cancel_and_wait(reading)

    def _settle(self, committed: int | None) -> None:
        """Count the last batch if it is in the queue, even if the response was lost."""
        batch, self._unsettled = self._unsettled, None
        if batch is not None and batch.through == committed:
            self.report.add(batch)
            self._last = batch.last or self._last

    def _known(self, after: int, stored: Identity | None) -> Identity | None:
        """Return the record that the topic should have at the position, from the queue or from this run."""
        candidates = (stored, self._last)
        return next((known for known in candidates if known is not None and known.seq <= after), None)

    def _check_reached(self, after: int, state: TopicState, *, begun: bool) -> None:
        if after <= state.head_seq:
            return
        if not begun:
            raise errors.InvalidInput(f"start: {state.topic} ends at {state.head_seq}, before {after}")
        raise TopicChanged(changed(state.topic, after, state.head_seq))

    async def _check_identity(self, known: Identity | None) -> None:
        """Raise `TopicChanged` if a different record has the sequence of `known`. It may be missing."""
        if known is None:
            return
        page = await self._client.diff(self._config.topic, known.seq - 1, limit=1, include_meta=False)
        readable = page.fragments and page.tombstone is None and unreadable(page.fragments[0]) is None
        found = page.records()[0] if readable else None
        if found is not None and found.seq == known.seq and found.ts_ms != known.ts_ms:
            raise TopicChanged(
                f"record {known.seq} of {self._config.topic}, the last relayed, is a different record now: "
                "the topic was deleted and created again, or restored from an older copy. To start over, "
                "relay it under another name (app)"
            )

    async def _gather(self, after: int, end: int | None) -> RelayBatch | None:
        """Return the next batch: a full one, or the records until `flush_interval` after the first.

        Return None if there is nothing left to do.
        """
        queue = self._config.queue
        batch = self._new_batch(after)
        has_waited = end is not None
        while batch.record_bytes < queue.flush_size and (end is None or batch.through < end):
            wait_ms = 0 if has_waited or batch.count else WAIT_MS_MAX
            page = await self._unless_stopped(self._diff(batch.through, wait_ms))
            if page is None or not self._add(batch, page):
                break
            if not page.caught_up:
                continue
            if has_waited or (batch.through > after and not batch.count):
                break
            if batch.count:
                await self._unless_stopped(self._clock.sleep(queue.flush_interval_s))
                has_waited = True
        return batch if batch.through > after else None

    def _new_batch(self, after: int) -> RelayBatch:
        config = self._config
        return RelayBatch(topic=config.topic, after=after, value=config.value, on_gap=config.on_gap)

    def _add(self, batch: RelayBatch, page: Page) -> bool:
        """Add a page. Return False if its error must wait until the records before it are durable."""
        self.report.head = page.head_seq
        try:
            batch.add(page)
        except (RelayGap, TopicChanged):
            if not batch.count:
                raise
            return False
        return True

    async def _diff(self, from_seq: int, wait_ms: int) -> Page:
        return await self._client.diff(
            self._config.topic,
            from_seq,
            limit=DIFF_LIMIT_MAX,
            include_tags=True,
            wait_ms=wait_ms,
            max_batch_bytes=BATCH_BYTES_MAX,
        )

    async def _unless_stopped(self, work: Coroutine[None, None, T]) -> T | None:
        return await unless_set(self._stop, work)


def _start(start: Start, state: TopicState) -> int:
    if isinstance(start, int):
        return start
    return state.earliest_seq - 1 if start == "earliest" else state.head_seq
