"""The stateless buffer: any number of producers, object storage, one fenced consumer.

    async with Producer(ProducerConfig(store="s3://bucket")) as producer:
        handle = await producer.produce([b"a", b"b"], b"metadata")
        await handle.watcher.await_durable()

    consumer = await Consumer.open(ConsumerConfig(store="s3://bucket"), last_acked=None)
    batch = await consumer.next_batch()

`penstock.buffer.sync` has the same names for code without an event loop.
"""

from __future__ import annotations

from penstock.buffer.append import Appended, append_batches, last_version
from penstock.buffer.batch import CompressionType
from penstock.buffer.config import BadBatchPolicy, ConsumerConfig, GarbageCollectorConfig, ProducerConfig
from penstock.buffer.consumer import Consumer
from penstock.buffer.dead_letter import DeadLetter
from penstock.buffer.errors import (
    BatchMissing,
    BufferError,
    FencedError,
    InvalidInputError,
    ManifestFull,
    OutcomeUnknown,
    OutOfOrderAck,
    ProducerClosed,
    RetriesExhausted,
    SerializationError,
    StaleTransaction,
    StorageError,
    StorageRejected,
    StorageUnavailable,
)
from penstock.buffer.fetch import BatchDescriptor, ConsumedBatch, FetchHandle
from penstock.buffer.gc import GarbageCollector, GcReport
from penstock.buffer.handle import DurabilityWatcher, WriteHandle, WriteOutcome
from penstock.buffer.manifest import Metadata
from penstock.buffer.producer import Producer
from penstock.buffer.sharded import ShardedConsumer, ShardedProducer
from penstock.buffer.stored_batch import StoredBatch, store_batch
from penstock.buffer.transaction import Transaction

__all__ = [
    "Appended",
    "BadBatchPolicy",
    "BatchDescriptor",
    "BatchMissing",
    "BufferError",
    "CompressionType",
    "ConsumedBatch",
    "Consumer",
    "ConsumerConfig",
    "DeadLetter",
    "DurabilityWatcher",
    "FencedError",
    "FetchHandle",
    "GarbageCollector",
    "GarbageCollectorConfig",
    "GcReport",
    "InvalidInputError",
    "ManifestFull",
    "Metadata",
    "OutOfOrderAck",
    "OutcomeUnknown",
    "Producer",
    "ProducerClosed",
    "ProducerConfig",
    "RetriesExhausted",
    "SerializationError",
    "ShardedConsumer",
    "ShardedProducer",
    "StaleTransaction",
    "StorageError",
    "StorageRejected",
    "StorageUnavailable",
    "StoredBatch",
    "Transaction",
    "WriteHandle",
    "WriteOutcome",
    "append_batches",
    "last_version",
    "store_batch",
]
