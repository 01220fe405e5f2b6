"""Topics: a durable event log with dense sequences, a durability per topic, and explicit loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy import lazy_exports

if TYPE_CHECKING:
    from penstock.topics.checkpoints.layout import is_in_use
    from penstock.topics.client.client import DEFAULT_URL, Client
    from penstock.topics.client.connection import Call, Connection, Repeat
    from penstock.topics.client.errors import UnexpectedAnswer, failure_of_answer
    from penstock.topics.client.models import (
        Health,
        TopicSummary,
        diff_body,
        read_metrics,
        read_page,
        read_summaries,
        read_topic_state,
        write_body,
    )
    from penstock.topics.client.queues import JobRef
    from penstock.topics.client.routers import RouterSummary
    from penstock.topics.client.watch import WatchEvent
    from penstock.topics.config import WAL_SHARDS_MAX, Durability, EngineConfig, TopicConfig
    from penstock.topics.engine import Engine
    from penstock.topics.errors import (
        BatchTooLarge,
        CommitFailed,
        Damaged,
        IncompatibleTopic,
        InvalidRequest,
        NotAQueue,
        NotReady,
        RecordTooLarge,
        RouterCycle,
        RouterNotFound,
        ShuttingDown,
        Throttled,
        TopicError,
        TopicFull,
        TopicNotEmpty,
        TopicNotFound,
    )
    from penstock.topics.limits import (
        BATCH_BYTES_MAX,
        BATCH_RECORDS_MAX,
        DIFF_LIMIT_MAX,
        NODE_BYTES_MAX,
        PAGE_SIZE_DEFAULT,
        PAGE_SIZE_MAX,
        SEQ_MAX,
        TAG_BYTES_MAX,
        WAIT_MS_MAX,
        WATCH_BATCH_BYTES_DEFAULT,
        WATCH_TOPICS_MAX,
    )
    from penstock.topics.model import (
        AckResult,
        BareRecord,
        ClaimedJob,
        ClaimResult,
        DeleteResult,
        ExtendResult,
        NackResult,
        NewRecord,
        Page,
        Predicate,
        PutResult,
        QueueCounts,
        Record,
        RemoveResult,
        Tombstone,
        TopicState,
        UnreadableRecord,
        WriteResult,
        canonical,
        parse_match,
        unreadable,
    )
    from penstock.topics.names import (
        FreeText,
        TopicName,
        check_router_name,
        check_topic_name,
        is_topic_name,
        names_in,
    )
    from penstock.topics.queues.api import WorkStream
    from penstock.topics.read.subscription import DurableWatermark, Feed, SubscriptionFilter
    from penstock.topics.routers.model import RouterConfig, RouterPut, RouterRemoved, RouterState
    from penstock.topics.schedule.pressure import RETRY_AFTER_MS, Scheduler
    from penstock.topics.schedule.ready_set import ReadySet, band_of
    from penstock.topics.segments.store import SegmentRoot, open_cold_store
    from penstock.topics.stats import SYNC_BUCKETS_US, EngineStats, WalStats
    from penstock.topics.tools import (
        BackupManifest,
        FileFinding,
        VerifyReport,
        backup,
        restore,
        verify,
    )
    from penstock.topics.tools.verify import pluralise

__all__ = [
    "BATCH_BYTES_MAX",
    "BATCH_RECORDS_MAX",
    "DEFAULT_URL",
    "DIFF_LIMIT_MAX",
    "NODE_BYTES_MAX",
    "PAGE_SIZE_DEFAULT",
    "PAGE_SIZE_MAX",
    "RETRY_AFTER_MS",
    "SEQ_MAX",
    "SYNC_BUCKETS_US",
    "TAG_BYTES_MAX",
    "WAIT_MS_MAX",
    "WAL_SHARDS_MAX",
    "WATCH_BATCH_BYTES_DEFAULT",
    "WATCH_TOPICS_MAX",
    "AckResult",
    "BackupManifest",
    "BareRecord",
    "BatchTooLarge",
    "Call",
    "ClaimResult",
    "ClaimedJob",
    "Client",
    "CommitFailed",
    "Connection",
    "Damaged",
    "DeleteResult",
    "Durability",
    "DurableWatermark",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "ExtendResult",
    "Feed",
    "FileFinding",
    "FreeText",
    "Health",
    "IncompatibleTopic",
    "InvalidRequest",
    "JobRef",
    "NackResult",
    "NewRecord",
    "NotAQueue",
    "NotReady",
    "Page",
    "Predicate",
    "PutResult",
    "QueueCounts",
    "ReadySet",
    "Record",
    "RecordTooLarge",
    "RemoveResult",
    "Repeat",
    "RouterConfig",
    "RouterCycle",
    "RouterNotFound",
    "RouterPut",
    "RouterRemoved",
    "RouterState",
    "RouterSummary",
    "Scheduler",
    "SegmentRoot",
    "ShuttingDown",
    "SubscriptionFilter",
    "Throttled",
    "Tombstone",
    "TopicConfig",
    "TopicError",
    "TopicFull",
    "TopicName",
    "TopicNotEmpty",
    "TopicNotFound",
    "TopicState",
    "TopicSummary",
    "UnexpectedAnswer",
    "UnreadableRecord",
    "VerifyReport",
    "WalStats",
    "WatchEvent",
    "WorkStream",
    "WriteResult",
    "backup",
    "band_of",
    "canonical",
    "check_router_name",
    "check_topic_name",
    "diff_body",
    "failure_of_answer",
    "is_in_use",
    "is_topic_name",
    "names_in",
    "open_cold_store",
    "parse_match",
    "pluralise",
    "read_metrics",
    "read_page",
    "read_summaries",
    "read_topic_state",
    "restore",
    "unreadable",
    "verify",
    "write_body",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "client.client": "Client DEFAULT_URL",
            "client.connection": "Call Connection Repeat",
            "client.errors": "UnexpectedAnswer failure_of_answer",
            "client.models": (
                "Health TopicSummary diff_body read_metrics read_page read_summaries read_topic_state "
                "write_body"
            ),
            "client.queues": "JobRef",
            "client.routers": "RouterSummary",
            "client.watch": "WatchEvent",
            "config": "Durability EngineConfig TopicConfig WAL_SHARDS_MAX",
            "engine": "Engine",
            "errors": (
                "BatchTooLarge CommitFailed Damaged IncompatibleTopic InvalidRequest NotAQueue "
                "NotReady RecordTooLarge RouterCycle RouterNotFound ShuttingDown Throttled TopicError "
                "TopicFull TopicNotEmpty TopicNotFound"
            ),
            "limits": (
                "BATCH_BYTES_MAX BATCH_RECORDS_MAX DIFF_LIMIT_MAX NODE_BYTES_MAX PAGE_SIZE_DEFAULT "
                "PAGE_SIZE_MAX SEQ_MAX TAG_BYTES_MAX WAIT_MS_MAX WATCH_BATCH_BYTES_DEFAULT "
                "WATCH_TOPICS_MAX"
            ),
            "model": (
                "AckResult BareRecord ClaimResult ClaimedJob DeleteResult ExtendResult NackResult "
                "NewRecord Page Predicate PutResult QueueCounts Record RemoveResult Tombstone "
                "TopicState UnreadableRecord WriteResult canonical parse_match unreadable"
            ),
            "names": "FreeText TopicName check_router_name check_topic_name is_topic_name names_in",
            "queues.api": "WorkStream",
            "read.subscription": "DurableWatermark Feed SubscriptionFilter",
            "routers.model": "RouterConfig RouterPut RouterRemoved RouterState",
            "schedule.pressure": "RETRY_AFTER_MS Scheduler",
            "schedule.ready_set": "ReadySet band_of",
            "checkpoints.layout": "is_in_use",
            "segments.store": "SegmentRoot open_cold_store",
            "stats": "EngineStats SYNC_BUCKETS_US WalStats",
            "tools": "BackupManifest FileFinding VerifyReport backup restore verify",
            "tools.verify": "pluralise",
        },
    )
