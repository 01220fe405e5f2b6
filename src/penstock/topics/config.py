"""The configuration of a topic and of the engine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final, Literal

import msgspec

from penstock.errors import ConfigError
from penstock.topics.errors import InvalidRequest
from penstock.topics.limits import SEQ_MAX
from penstock.topics.names import TopicName, is_topic_name

WAL_SHARDS_MAX: Final = 64
"""The limit of shards, because each has a thread and two preallocated files."""

_LEASE_MS: Final = (100, 86_400_000)
_JITTER_MS_MAX: Final = 5000
_U64_FIELDS: Final = (
    "cap_bytes",
    "cap_records",
    "claim_jitter_ms",
    "idempotency_window_ms",
    "lease_ms",
    "max_deliveries",
    "ttl_ms",
)

_LEAST: Final = {
    "wal_shards": 1,
    "wal_file_bytes": 256,
    "wal_queue_max": 1,
    "sync_interval_ms": 1,
    "segment_max_events": 1,
    "segment_max_bytes": 1,
    "segment_max_age_ms": 0,
    "hot_retain_segments": 0,
    "hot_retain_bytes": 0,
    "checkpoint_bytes": 1,
    "checkpoint_interval_ms": 1,
    "max_topics": 0,
    "max_routers": 0,
    "max_total_bytes": 0,
}
_MOST: Final = {"wal_shards": WAL_SHARDS_MAX}

_U64 = Annotated[int, msgspec.Meta(ge=0)]
_I32 = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]


class Durability(StrEnum):
    """The guarantee of an acknowledgement, from weak to strong."""

    EPHEMERAL = "ephemeral"
    """In memory only: lost with the process."""
    MEMORY = "memory"
    """Written to the log, without a guarantee."""
    DISK = "disk"
    """Written to the log, and synced soon after. Survives a killed process, not always a power failure."""
    FSYNC = "fsync"
    """Synced before the acknowledgement."""


class TopicConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The config object of the contract. `resolved()` returns what is stored and sent back to the client.

    `durability` is authoritative; without it `durable` chooses between `fsync` and `disk`.
    """

    type: Literal["log", "queue"] = "log"
    ttl_ms: _U64 = 0
    cap_records: _U64 = 0
    cap_bytes: _U64 = 0
    discard: Literal["old", "reject"] = "old"
    durable: bool = False
    durability: Durability | None = None
    priority: _I32 | None = None
    auto_priority: bool = True
    auto_create: bool = True
    idempotency_window_ms: _U64 = 120_000
    dedupe_node: bool = True
    lease_ms: _U64 = 30_000
    claim_jitter_ms: _U64 = 0
    max_deliveries: _U64 = 0
    dead_letter: TopicName | None = None
    leases_durable: bool = False

    def resolved(self, topic: str) -> TopicConfig:
        """Return the config with every alias resolved and every value in its range.

        Raises `InvalidRequest` if the dead-letter topic is not valid.
        """
        for field in _U64_FIELDS:
            if getattr(self, field) > SEQ_MAX:
                raise InvalidRequest(f"{field} must be below 2^64")
        if self.dead_letter is not None:
            self._check_dead_letter(topic, self.dead_letter)
        durability = self.durability or (Durability.FSYNC if self.durable else Durability.DISK)
        return msgspec.structs.replace(
            self,
            durability=durability,
            durable=durability is Durability.FSYNC,
            lease_ms=min(max(self.lease_ms, _LEASE_MS[0]), _LEASE_MS[1]),
            claim_jitter_ms=min(self.claim_jitter_ms, _JITTER_MS_MAX),
        )

    def _check_dead_letter(self, topic: str, name: str) -> None:
        if not is_topic_name(name):
            raise InvalidRequest(f"dead_letter {name[:80]!r} is not a topic name")
        if self.type == "queue" and name == topic:
            raise InvalidRequest("a queue cannot be its own dead_letter topic; name another one")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Where an engine stores topics, and when it seals and moves segments. The defaults are the contract's.

    Raises `ConfigError` for a value out of its range.
    """

    data_dir: str
    cold_dir: str | None = None
    """A directory or a store URL for old segments; None keeps everything in `data_dir`."""
    wal_shards: int = min(os.cpu_count() or 1, 8)
    wal_file_bytes: int = 64 * 1024**2
    wal_queue_max: int = 4096
    """Writes that may wait for the commit of a shard; more are throttled."""
    sync_interval_ms: int = 100
    """How long writes of the `disk` class may stay unsynced."""
    segment_max_events: int = 10_000
    segment_max_bytes: int = 64 * 1024**2
    segment_max_age_ms: int = 3_600_000
    """0 disables sealing by age."""
    hot_retain_segments: int = 4
    hot_retain_bytes: int = 0
    """0 means no limit by size."""
    checkpoint_bytes: int = 256 * 1024**2
    """Log bytes after which records move from the log into segments."""
    checkpoint_interval_ms: int = 60_000
    segment_process: bool = False
    """Build segments in another process, so that requests are not delayed."""
    max_topics: int = 100_000
    max_routers: int = 10_000
    """0 means no limit."""
    max_total_bytes: int = 0
    """Limit of the bytes of all topics; 0 means no limit."""

    def __post_init__(self) -> None:
        if not self.data_dir:
            raise ConfigError("data_dir: expected a directory, found nothing")
        if self.cold_dir is not None:
            _check_cold_dir(self.cold_dir, self.data_dir)
        for name, least in _LEAST.items():
            _check_number(name, getattr(self, name), least, _MOST.get(name))


def _check_cold_dir(cold: str, data: str) -> None:
    if not cold:
        raise ConfigError(
            "cold_dir: expected a directory or a store URL, or None to keep all segments in data_dir"
        )
    # Tiering finally removes the hot copy, which must not be the only copy.
    local = cold.removeprefix("file://")
    if "://" not in local and os.path.realpath(os.path.expanduser(local)) == os.path.realpath(data):
        raise ConfigError("cold_dir: expected a directory other than data_dir, found the same directory")


def _check_number(name: str, value: object, least: int, most: int | None) -> None:
    expected = f"a whole number of at least {least}" if most is None else f"{least} to {most}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}: expected {expected}, found {value!r}")
    if value < least or (most is not None and value > most):
        raise ConfigError(f"{name}: expected {expected}, found {value}")
