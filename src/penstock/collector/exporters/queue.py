"""A queue in object storage per signal: what a record holds, and the plain exporter that appends to it."""

from __future__ import annotations

import asyncio

import pyarrow as pa

from penstock.buffer import Producer, ProducerConfig
from penstock.collector.outcome import Outcome, Verdict, delivered, refused
from penstock.collector.payload import Payload
from penstock.collector.settings import BufferSettings
from penstock.errors import InvalidInput, LimitExceeded, PenstockError
from penstock.otlp.schema import Signal

__all__ = ["QueueExporter", "producer_config", "record_of"]


def producer_config(settings: BufferSettings, signal: Signal) -> ProducerConfig:
    """The queue of one signal."""
    return ProducerConfig(
        store=settings.store,
        manifest_path=settings.manifest_path.replace("{signal}", signal.value),
        data_path_prefix=settings.data_path_prefix.replace("{signal}", signal.value),
        batch_compression=settings.batch_compression,
        flush_size_bytes=settings.flush_size,
        append_deadline=settings.append_deadline,
    )


def record_of(payload: Payload, record_format: str) -> bytes:
    """A bundle as one record: an Arrow stream of the flat columns, or the OTLP request."""
    if record_format == "otlp":
        return payload.otlp()
    batch = payload.batch()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(memoryview(sink.getvalue()))


class QueueExporter:
    """Appends each bundle as a record; taken when durable. A bundle that comes again is appended again."""

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
