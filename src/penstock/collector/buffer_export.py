"""Delivery of bundles into queues of object storage, each once, whichever process crashes.

Every append to a queue is a transaction of (this directory, place of its last bundle), see
`penstock.buffer`; so records and position become durable in the same write.

1. Bundles are taken oldest first, and held until they are in the queue. Nothing is appended while an older
   one that was handed out is not leased, because its lease ended or it could not be read: that one is
   waited for. So when the queue is at a position, everything pending before it is in the queue too.
2. A bundle at or before the position has been appended, and only its ack was lost: it is acknowledged.
3. An append whose response was lost is repeated under the same transaction and recognised.
4. Numbers of segments start over in a new directory; its identity is part of the name.

This requires the oldest bundle first and a separate subscriber. Without them `QueueExporter` is used, which
appends a bundle again if it is delivered again.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from penstock.buffer import (
    NO_VERSION,
    Producer,
    ProducerConfig,
    StaleTransaction,
    Transaction,
    append_batches,
    last_version,
    store_batch,
)
from penstock.clock import Clock
from penstock.collector.dead_letters import DeadLetters
from penstock.collector.export_worker import ExportCounts, Source, SparseLog, payload_of
from penstock.collector.outcome import Outcome, Verdict, delivered, refused
from penstock.collector.payload import Payload
from penstock.collector.settings import BufferSettings
from penstock.errors import InvalidInput, LimitExceeded, PenstockError
from penstock.metrics import Registry
from penstock.objects import ObjectStore, open_store
from penstock.otlp import Signal
from penstock.retry import Backoff, RetryPolicy

if TYPE_CHECKING:
    from penstock.quiver import Bundle


def producer_config(settings: BufferSettings, signal: Signal) -> ProducerConfig:
    """Return the settings of the queue of one signal."""
    return ProducerConfig(
        store=settings.store,
        manifest_path=settings.manifest_path.replace("{signal}", signal.value),
        data_path_prefix=settings.data_path_prefix.replace("{signal}", signal.value),
        batch_compression=settings.batch_compression,
        flush_size_bytes=settings.flush_size,
        append_deadline=settings.append_deadline,
    )


def record_of(payload: Payload, record_format: str) -> bytes:
    """Return a bundle as one record: an Arrow stream of the flat columns, or the OTLP request."""
    if record_format == "otlp":
        return payload.otlp()
    batch = payload.batch()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(memoryview(sink.getvalue()))


class QueueExporter:
    """Appends each bundle as a record. A bundle that is delivered again is appended again."""

    def __init__(self, settings: BufferSettings) -> None:
        self._settings = settings
        self._producers: dict[Signal, Producer] = {}

    async def start(self) -> None:
        for signal in Signal:
            producer_config(self._settings, signal)

    async def send(self, payload: Payload) -> Outcome:
        try:
            record = await asyncio.to_thread(record_of, payload, self._settings.format)
            handle = await self._producer(payload.signal).produce([record], payload.signal.value.encode())
            await handle.watcher.await_durable()
        except (InvalidInput, LimitExceeded) as error:
            return refused(str(error))
        except PenstockError as error:
            # Also what the store refuses: credentials and full queues are mended, the data stays good.
            return Outcome(verdict=Verdict.RETRY, reason=str(error), is_down=True)
        return delivered()

    def _producer(self, signal: Signal) -> Producer:
        producer = self._producers.get(signal)
        if producer is None:
            producer = self._producers[signal] = Producer(producer_config(self._settings, signal))
        return producer

    async def close(self) -> None:
        for producer in self._producers.values():
            await producer.close()


_LOG = logging.getLogger(__name__)
_POLL_S: Final = 0.25
_BUNDLE_BITS: Final = 24
"""A segment has at most ten million bundles."""
_FOREVER_S: Final = 10.0**9


def version_of(delivery: Bundle) -> int:
    """Return the position of a bundle as a version, which rises in the order of delivery."""
    return delivery.ref.segment_seq << _BUNDLE_BITS | delivery.ref.bundle


class BufferExportWorker:
    """`run` until `stop`. One append for as many bundles as are there, up to the configured size."""

    def __init__(
        self,
        name: str,
        source: Source,
        settings: BufferSettings,
        *,
        app: str,
        dead_letters: DeadLetters,
        origin: str,
        clock: Clock,
        rng: random.Random,
        registry: Registry,
        store: ObjectStore | None = None,
    ) -> None:
        self.name = name
        self._source = source
        self._settings = settings
        self._app = app
        self._dead_letters = dead_letters
        self._origin = origin
        self._clock = clock
        self._rng = rng
        self._store = store
        self._counts = ExportCounts(registry, name)
        self._said = SparseLog(_LOG, clock)
        self._positions: dict[Signal, int] = {}
        self._flush_size = settings.flush_bytes
        self._stopping = False

    def stop(self) -> None:
        """End as soon as nothing is left that can be delivered now."""
        self._stopping = True

    async def run(self) -> None:
        """Deliver. Cancelling it gives what is under way back to the store."""
        opened = self._store or open_store(self._settings.store, deadline_s=self._settings.append_deadline_s)
        try:
            while True:
                group = await self._gather()
                if group and not await self._deliver(opened, list(group.values())):
                    return
                if not group and self._stopping:
                    return
        finally:
            if self._store is None:
                await opened.close()

    async def _gather(self) -> dict[int, Bundle]:
        """Return available bundles up to a batch, in order and without a hole; wait for the first."""
        group: dict[int, Bundle] = {}
        size = 0
        try:
            while size < self._flush_size and len(group) < self._settings.flush_bundles:
                found = await self._source.next(0.0 if group or self._stopping else _POLL_S)
                if found is None:
                    break
                group[version_of(found)] = found
                size += found.batch.nbytes
            while group and self._source.unacked_unleased():
                found = await self._source.next(_POLL_S)
                if found is not None:
                    group[version_of(found)] = found
        except PenstockError as error:
            self._said.warning(self.name, f"the next bundle cannot be read: {error}")
            _give_back(group.values())
            group = {}
            await self._clock.sleep(_POLL_S)
        except asyncio.CancelledError:
            _give_back(group.values())
            raise
        return dict(sorted(group.items()))

    async def _deliver(self, store: ObjectStore, group: list[Bundle]) -> bool:
        """Retry until all of the group is in its queues; return False if it was given back at a stop."""
        policy = RetryPolicy(floor_s=0.5, ceiling_s=30.0, deadline_s=_FOREVER_S)
        backoff = Backoff(policy, clock=self._clock, rng=self._rng)
        try:
            while not await self._is_delivered(store, group):
                if self._stopping or not await backoff.pause():
                    _give_back(group)
                    return False
        except asyncio.CancelledError:
            _give_back(group)
            raise
        for delivery in group:
            self._acknowledge(delivery)
        return True

    async def _is_delivered(self, store: ObjectStore, group: list[Bundle]) -> bool:
        try:
            for signal in Signal:
                await self._append(store, signal, group)
        except StaleTransaction as error:
            # Another process moved it, or our response was lost: read the position again before appending.
            self._positions.clear()
            self._note_failure(error)
            return False
        except PenstockError as error:
            self._note_failure(error)
            return False
        self._counts.circuit.set(0)
        return True

    def _note_failure(self, error: PenstockError) -> None:
        self._counts.outcomes[Verdict.RETRY].inc()
        self._counts.circuit.set(2)
        self._said.warning(self.name, f"{self._settings.store} does not take it, and is tried again: {error}")

    async def _append(self, store: ObjectStore, signal: Signal, group: list[Bundle]) -> None:
        mine = [delivery for delivery in group if str(delivery.signal) == signal.value]
        if not mine:
            return
        config = producer_config(self._settings, signal)
        position = await self._position(store, signal)
        fresh = [delivery for delivery in mine if version_of(delivery) > position]
        records = await self._records(fresh, group)
        if not records:
            return
        deadline_s = self._settings.append_deadline_s
        batch = await store_batch(
            store,
            config.prefix,
            records,
            compression=config.compression,
            metadata=signal.value.encode(),
            clock=self._clock,
            rng=self._rng,
            policy=RetryPolicy(deadline_s=deadline_s),
        )
        version = version_of(fresh[-1])
        await append_batches(
            config,
            [batch],
            Transaction(app=self._app, version=version),
            follows=position,
            store=store,
            clock=self._clock,
            rng=self._rng,
        )
        self._positions[signal] = version

    async def _position(self, store: ObjectStore, signal: Signal) -> int:
        known = self._positions.get(signal)
        if known is None:
            config = producer_config(self._settings, signal)
            last = await last_version(config, self._app, store=store, clock=self._clock, rng=self._rng)
            known = self._positions[signal] = NO_VERSION if last is None else last
        return known

    async def _records(self, fresh: list[Bundle], group: list[Bundle]) -> list[bytes]:
        """Encode a record for each; store the others as dead letters, and remove them from both lists."""
        records: list[bytes] = []
        for delivery in list(fresh):
            payload = payload_of(delivery, self._origin)
            try:
                records.append(await asyncio.to_thread(record_of, payload, self._settings.format))
            except (InvalidInput, LimitExceeded) as error:
                await self._reject(delivery, payload, str(error))
                fresh.remove(delivery)
                group.remove(delivery)
        return records

    async def _reject(self, delivery: Bundle, payload: Payload, reason: str) -> None:
        await asyncio.to_thread(self._dead_letters.keep, self.name, payload, reason, delivery.attempt)
        delivery.reject(reason)
        self._counts.outcomes[Verdict.REJECT].inc()

    def _acknowledge(self, delivery: Bundle) -> None:
        self._counts.outcomes[Verdict.ACK].inc()
        self._counts.items.inc(delivery.items)
        # Without its lease it is delivered again, and found to be in the queue.
        delivery.ack()


def _give_back(group: Iterable[Bundle]) -> None:
    for delivery in group:
        delivery.defer(0.0)
