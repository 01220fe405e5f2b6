"""Delivery of bundles into queues of object storage exactly once, even after a crash.

Every append to a queue is a transaction identified by this directory and the place of its last bundle, see
`penstock.buffer`. Records and position therefore become durable in the same write.

1. Bundles are taken oldest first and held until they are in the queue. Nothing is appended while an older
   bundle was handed out but is not leased, because its lease ended or it could not be read; the worker waits
   for that bundle. When the queue is at a position, everything pending before it is in the queue too.
2. A bundle at or before the position has been appended and only its ack was lost, so it is acknowledged.
3. An append whose response was lost is repeated under the same transaction and recognised.
4. Segment numbers start over in a new directory, so the identity of the directory is part of the name.

This requires oldest-first delivery and a separate subscriber. Otherwise `QueueExporter` is used, which
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
    """Return the producer configuration for the queue of one signal."""
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
            # Retry even refusals by the store: credentials and full queues can be fixed, and the data is
            # valid.
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
"""Enough for the maximum number of bundles in a segment, ten million."""
_NO_DEADLINE_S: Final = 10.0**9


def version_of(delivery: Bundle) -> int:
    """Return the position of a bundle as a version number, which rises in delivery order."""
    return delivery.ref.segment_seq << _BUNDLE_BITS | delivery.ref.bundle


class BufferExportWorker:
    """Delivers until `stop`. Each append has all available bundles, up to the configured size."""

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
        self._log = SparseLog(_LOG, clock)
        self._positions: dict[Signal, int] = {}
        self._flush_size = settings.flush_bytes
        self._stopping = False

    def stop(self) -> None:
        """Stop as soon as no bundle is left that can be delivered now."""
        self._stopping = True

    async def run(self) -> None:
        """Deliver bundles. Cancelling it returns active bundles to the source."""
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
        """Return available bundles up to a batch, in order and without a gap. Wait for the first one."""
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
            self._log.warning(self.name, f"cannot read the next bundle: {error}")
            _give_back(group.values())
            group = {}
            await self._clock.sleep(_POLL_S)
        except asyncio.CancelledError:
            _give_back(group.values())
            raise
        return dict(sorted(group.items()))

    async def _deliver(self, store: ObjectStore, group: list[Bundle]) -> bool:
        """Retry until the whole group is in its queues. Return False if a stop ended the attempts."""
        policy = RetryPolicy(floor_s=0.5, ceiling_s=30.0, deadline_s=_NO_DEADLINE_S)
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
            # Another process appended, or a response was lost, so read the position before the next attempt.
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
        self._log.warning(self.name, f"appending to {self._settings.store} failed, retrying: {error}")

    async def _append(self, store: ObjectStore, signal: Signal, group: list[Bundle]) -> None:
        matching = [delivery for delivery in group if str(delivery.signal) == signal.value]
        if not matching:
            return
        config = producer_config(self._settings, signal)
        position = await self._position(store, signal)
        unappended = [delivery for delivery in matching if version_of(delivery) > position]
        records = await self._records(unappended, group)
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
        version = version_of(unappended[-1])
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

    async def _records(self, unappended: list[Bundle], group: list[Bundle]) -> list[bytes]:
        """Encode a record for each bundle. Move bundles that cannot be encoded to the dead letters."""
        records: list[bytes] = []
        for delivery in list(unappended):
            payload = payload_of(delivery, self._origin)
            try:
                records.append(await asyncio.to_thread(record_of, payload, self._settings.format))
            except (InvalidInput, LimitExceeded) as error:
                await self._reject(delivery, payload, str(error))
                unappended.remove(delivery)
                group.remove(delivery)
        return records

    async def _reject(self, delivery: Bundle, payload: Payload, reason: str) -> None:
        await asyncio.to_thread(self._dead_letters.keep, self.name, payload, reason, delivery.attempt)
        delivery.reject(reason)
        self._counts.outcomes[Verdict.REJECT].inc()

    def _acknowledge(self, delivery: Bundle) -> None:
        self._counts.outcomes[Verdict.ACK].inc()
        self._counts.items.inc(delivery.items)
        # If its lease has ended, it is delivered again, and then found in the queue.
        delivery.ack()


def _give_back(group: Iterable[Bundle]) -> None:
    for delivery in group:
        delivery.defer(0.0)
