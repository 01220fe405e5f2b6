"""The stateless buffer: any number of producers, object storage, one fenced consumer.

    async with Producer(ProducerConfig(store="s3://bucket")) as producer:
        handle = await producer.produce([b"a", b"b"], b"metadata")
        await handle.watcher.await_durable()

    consumer = await Consumer.open(ConsumerConfig(store="s3://bucket"), last_acked=None)
    batch = await consumer.next_batch()

`penstock.buffer.sync` has the same names for code without an event loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy import lazy_exports

if TYPE_CHECKING:
    from penstock.buffer.append import Appended, append_batches, last_version
    from penstock.buffer.batch import (
        BATCH_VERSION,
        FOOTER_BYTES,
        CompressionType,
        batch_minted_ms,
        decode_batch,
        record_count,
    )
    from penstock.buffer.config import (
        BadBatchPolicy,
        ConsumerConfig,
        GarbageCollectorConfig,
        ProducerConfig,
        QueueConfig,
        config_from_mapping,
    )
    from penstock.buffer.consumer import Consumer
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
        storage_error,
    )
    from penstock.buffer.fetch import BatchDescriptor, ConsumedBatch, FetchHandle
    from penstock.buffer.fsck import audit
    from penstock.buffer.gc import GarbageCollector, GcReport
    from penstock.buffer.inspect import QueueReader, QueueSurvey, entry_time_ms, survey
    from penstock.buffer.manifest import (
        MANIFEST_VERSION,
        Entry,
        EntryIndex,
        Manifest,
        Metadata,
        decode_manifest,
    )
    from penstock.buffer.manifest_file import ManifestFile, Snapshot
    from penstock.buffer.producer import Producer
    from penstock.buffer.sharded import (
        ShardedConsumer,
        ShardedProducer,
        Shards,
        read_layout,
        read_shards,
        shard_config,
        shard_of,
    )
    from penstock.buffer.side_objects import (
        NO_FLOOR,
        DeadLetter,
        Floor,
        dead_sequences,
        read_floor,
        store_dead_letter,
    )
    from penstock.buffer.transactions import NO_VERSION, Transaction, TransactionLog, find_tag, newest_version
    from penstock.buffer.upload import DurabilityWatcher, StoredBatch, WriteHandle, WriteOutcome, store_batch

__all__ = [
    "BATCH_VERSION",
    "FOOTER_BYTES",
    "MANIFEST_VERSION",
    "NO_FLOOR",
    "NO_VERSION",
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
    "Entry",
    "EntryIndex",
    "FencedError",
    "FetchHandle",
    "Floor",
    "GarbageCollector",
    "GarbageCollectorConfig",
    "GcReport",
    "InvalidInputError",
    "Manifest",
    "ManifestFile",
    "ManifestFull",
    "Metadata",
    "OutOfOrderAck",
    "OutcomeUnknown",
    "Producer",
    "ProducerClosed",
    "ProducerConfig",
    "QueueConfig",
    "QueueReader",
    "QueueSurvey",
    "RetriesExhausted",
    "SerializationError",
    "ShardedConsumer",
    "ShardedProducer",
    "Shards",
    "Snapshot",
    "StaleTransaction",
    "StorageError",
    "StorageRejected",
    "StorageUnavailable",
    "StoredBatch",
    "Transaction",
    "TransactionLog",
    "WriteHandle",
    "WriteOutcome",
    "append_batches",
    "audit",
    "batch_minted_ms",
    "config_from_mapping",
    "dead_sequences",
    "decode_batch",
    "decode_manifest",
    "entry_time_ms",
    "find_tag",
    "last_version",
    "newest_version",
    "read_floor",
    "read_layout",
    "read_shards",
    "record_count",
    "shard_config",
    "shard_of",
    "storage_error",
    "store_batch",
    "store_dead_letter",
    "survey",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "append": "Appended append_batches last_version",
            "batch": "BATCH_VERSION FOOTER_BYTES CompressionType batch_minted_ms decode_batch record_count",
            "config": (
                "BadBatchPolicy ConsumerConfig GarbageCollectorConfig ProducerConfig QueueConfig "
                "config_from_mapping"
            ),
            "consumer": "Consumer",
            "errors": (
                "BatchMissing BufferError FencedError InvalidInputError ManifestFull OutOfOrderAck "
                "OutcomeUnknown ProducerClosed RetriesExhausted SerializationError StaleTransaction "
                "StorageError StorageRejected StorageUnavailable storage_error"
            ),
            "fetch": "BatchDescriptor ConsumedBatch FetchHandle",
            "fsck": "audit",
            "gc": "GarbageCollector GcReport",
            "inspect": "QueueReader QueueSurvey entry_time_ms survey",
            "manifest": "MANIFEST_VERSION Entry EntryIndex Manifest Metadata decode_manifest",
            "manifest_file": "ManifestFile Snapshot",
            "producer": "Producer",
            "sharded": "ShardedConsumer ShardedProducer Shards read_layout read_shards shard_config shard_of",
            "side_objects": "NO_FLOOR DeadLetter Floor dead_sequences read_floor store_dead_letter",
            "transactions": "NO_VERSION Transaction TransactionLog find_tag newest_version",
            "upload": "DurabilityWatcher StoredBatch WriteHandle WriteOutcome store_batch",
        },
    )
