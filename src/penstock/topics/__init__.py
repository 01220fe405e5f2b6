"""Topics: a durable event log with dense sequences, a durability per topic, and explicit loss."""

from __future__ import annotations

from penstock.topics.config import Durability, EngineConfig, TopicConfig
from penstock.topics.engine import Engine
from penstock.topics.errors import (
    BatchTooLarge,
    CommitFailed,
    Damaged,
    IncompatibleTopic,
    InvalidRequest,
    NotReady,
    RecordTooLarge,
    ShuttingDown,
    Throttled,
    TopicError,
    TopicFull,
    TopicNotEmpty,
    TopicNotFound,
)
from penstock.topics.model import (
    DeleteResult,
    NewRecord,
    Page,
    Predicate,
    PutResult,
    Record,
    RemoveResult,
    Tombstone,
    TopicState,
    WriteResult,
)

__all__ = [
    "BatchTooLarge",
    "CommitFailed",
    "Damaged",
    "DeleteResult",
    "Durability",
    "Engine",
    "EngineConfig",
    "IncompatibleTopic",
    "InvalidRequest",
    "NewRecord",
    "NotReady",
    "Page",
    "Predicate",
    "PutResult",
    "Record",
    "RecordTooLarge",
    "RemoveResult",
    "ShuttingDown",
    "Throttled",
    "Tombstone",
    "TopicConfig",
    "TopicError",
    "TopicFull",
    "TopicNotEmpty",
    "TopicNotFound",
    "TopicState",
    "WriteResult",
]
