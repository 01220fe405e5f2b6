"""The settings of Quiver.

Sizes are bytes or text such as "32MB" (10^6) and "1GiB" (2^30). Durations are seconds or text such as "25ms".
Both become numbers when the object is created. A wrong value raises `ConfigError` at that time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from penstock.config import Setting, build
from penstock.errors import ConfigError
from penstock.quiver.quota import largest_bundle, max_core_quota, min_quota
from penstock.units import DurationLike, SizeLike, convert_units, format_size, seconds_of, size_of

DurabilityLike: TypeAlias = Literal["wal", "segment_only"]
_TARGET_BYTES_MAX: Final = 1024**3
_STREAMS_MAX: Final = 100_000
_BUNDLE_LEAST: Final = 1024


def _at_least(settings: object, minimum: float, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if value < minimum:
            raise ConfigError(f"{name} must be at least {minimum:g}, not {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentConfig:
    """The size limit of segments, how long they stay open, and how they are read."""

    target_size: SizeLike = "32MB"
    """The limit for the data that waits in memory over all streams, and for the size of a segment."""
    max_open_duration: DurationLike = "5s"
    """The longest time that data waits for its segment to be written, which also delays its delivery."""
    max_stream_count: int = 512
    """The number of schemas that may be open at the same time. Each needs a segment."""
    layout: Literal["flat", "otap"] = "flat"
    read_mode: Literal["mmap", "read"] = "read"
    """The way of reading files. `mmap` avoids a copy, but a bad sector or a truncated file kills the process
    (SIGBUS).
    """
    verify_on_open: Literal["metadata", "full"] = "metadata"

    target_bytes = size_of("target_size")
    max_open_s = seconds_of("max_open_duration")

    def __post_init__(self) -> None:
        convert_units(self)
        _at_least(self, 1, "target_size", "max_stream_count")
        if self.target_bytes > _TARGET_BYTES_MAX:
            raise ConfigError(f"target_size must be at most {format_size(_TARGET_BYTES_MAX)}")
        if self.max_stream_count > _STREAMS_MAX:
            raise ConfigError(f"max_stream_count must be at most {_STREAMS_MAX}")
        if self.layout == "otap":
            raise ConfigError("layout 'otap' is not implemented; use 'flat'")


@dataclass(frozen=True, slots=True, kw_only=True)
class WalConfig:
    """The size of the log, and when an accepted bundle counts as durable."""

    max_size: SizeLike = "128MB"
    rotation_target: SizeLike = "64MB"
    max_rotated_files: int = 10
    flush: Literal["always", "group", "interval", "none"] = "group"
    """When a write is acknowledged: `always` and `group` after a sync, the others after the write.

    `group` shares one sync among writers.
    """
    flush_interval: DurationLike = "25ms"
    """For `group`, how long a sync may wait to be shared; for `interval`, how long bytes may stay unsynced.
    """
    on_corruption: Literal["continue", "fail"] = "continue"

    max_bytes = size_of("max_size")
    _rotation_target_bytes = size_of("rotation_target")
    flush_interval_s = seconds_of("flush_interval")

    def __post_init__(self) -> None:
        convert_units(self)
        _at_least(self, 1, "max_rotated_files")
        _at_least(self, 4096, "max_size", "rotation_target")

    @property
    def rotation_bytes(self) -> int:
        """The size of one file. Two must fit into the log, otherwise it could never free space."""
        return min(self._rotation_target_bytes, max(4096, self.max_bytes // 2))

    @property
    def syncs(self) -> bool:
        """Whether an acknowledgement waits for a sync."""
        return self.flush in ("always", "group")


@dataclass(frozen=True, slots=True, kw_only=True)
class AckConfig:
    """When outcomes become durable, and when a checkpoint replaces the log of outcomes."""

    flush_interval: DurationLike = "100ms"
    checkpoint_bytes: SizeLike = "16MB"
    checkpoint_records: int = 100_000
    checkpoint_interval: DurationLike = "60s"

    flush_interval_s = seconds_of("flush_interval")
    checkpoint_log_bytes = size_of("checkpoint_bytes")
    """The log size at which a checkpoint replaces the log."""
    checkpoint_interval_s = seconds_of("checkpoint_interval")

    def __post_init__(self) -> None:
        convert_units(self)
        _at_least(self, 1, "checkpoint_bytes", "checkpoint_records")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionConfig:
    """The disk space that may be used, and what happens when it is full."""

    size_cap: SizeLike = "10GiB"
    size_cap_policy: Literal["backpressure", "drop_oldest"] = "backpressure"
    max_retain_after_ingestion_hours: float | None = None
    steady_state_headroom: SizeLike = 0
    min_free: SizeLike = "1GB"

    cap_bytes = size_of("size_cap")
    headroom_bytes = size_of("steady_state_headroom")
    min_free_bytes = size_of("min_free")

    def __post_init__(self) -> None:
        convert_units(self)
        if self.max_retain_after_ingestion_hours is not None:
            _at_least(self, 0, "max_retain_after_ingestion_hours")

    @property
    def max_age_s(self) -> float | None:
        hours = self.max_retain_after_ingestion_hours
        return None if hours is None else hours * 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestConfig:
    """How long a write may wait for space before it is refused."""

    block_timeout: DurationLike = "0s"

    block_s = seconds_of("block_timeout")

    def __post_init__(self) -> None:
        convert_units(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryConfig:
    """The retry schedule of bundles that a consumer returned. Without `max_attempts` there is no limit."""

    initial: DurationLike = "1s"
    max: DurationLike = "30s"
    multiplier: float = 2.0
    max_attempts: int | None = None

    initial_s = seconds_of("initial")
    max_s = seconds_of("max")

    def __post_init__(self) -> None:
        convert_units(self)
        _at_least(self, 1, "multiplier")
        if self.max_attempts is not None:
            _at_least(self, 1, "max_attempts")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryConfig:
    """The order of delivery and the limits of claims."""

    max_in_flight: int = 1000
    claim_timeout: DurationLike = "5m"
    order: Literal["oldest_first", "newest_first"] = "oldest_first"

    claim_timeout_s = seconds_of("claim_timeout")

    def __post_init__(self) -> None:
        convert_units(self)
        _at_least(self, 1, "max_in_flight")


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriberConfig:
    """When an unused subscriber is removed. Without a timeout it is never removed."""

    orphan_timeout: DurationLike | None = None

    orphan_timeout_s = seconds_of("orphan_timeout", optional=True)

    def __post_init__(self) -> None:
        convert_units(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadConfig:
    """The object store that receives a copy of every committed segment. Without one nothing is uploaded."""

    store: str | None = None
    prefix: str = "quiver"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuiverConfig:
    """All settings of a Quiver directory."""

    path: str = "./quiver_data"
    durability: DurabilityLike = "wal"
    segment: SegmentConfig = field(default_factory=SegmentConfig)
    wal: WalConfig = field(default_factory=WalConfig)
    ack: AckConfig = field(default_factory=AckConfig)
    retention: RetentionConfig = field(default_factory=RetentionConfig)
    ingest: IngestConfig = field(default_factory=IngestConfig)
    retry: RetryConfig = field(default_factory=RetryConfig)
    delivery: DeliveryConfig = field(default_factory=DeliveryConfig)
    subscription: Literal["per_destination", "shared"] = "per_destination"
    subscribers: SubscriberConfig = field(default_factory=SubscriberConfig)
    otlp_handling: Literal["arrow", "pass_through"] = "arrow"
    upload: UploadConfig = field(default_factory=UploadConfig)
    maintenance_interval: DurationLike = "100ms"

    maintenance_interval_s = seconds_of("maintenance_interval")

    def __post_init__(self) -> None:
        convert_units(self)
        if not self.path:
            raise ConfigError("path must name a directory")
        if self.maintenance_interval_s <= 0:
            raise ConfigError("maintenance_interval must be above 0")

    @property
    def has_wal(self) -> bool:
        return self.durability == "wal"

    @property
    def wal_bytes(self) -> int:
        return self.wal.max_bytes if self.has_wal else 0

    def cap_per_core(self, cores: int) -> int:
        """Return the share of one core. Raise `ConfigError` if it cannot hold a log and two segments."""
        share = self.retention.cap_bytes // cores
        minimum = min_quota(wal_bytes=self.wal_bytes, target_bytes=self.segment.target_bytes)
        if share < minimum:
            raise ConfigError(
                f"retention.size_cap must be at least {minimum * cores} bytes for {cores} core(s): "
                f"each needs wal.max_size and twice segment.target_size"
            )
        if self.largest_bundle(cores) < _BUNDLE_LEAST:
            raise ConfigError(
                f"retention.size_cap of {format_size(self.retention.cap_bytes)} leaves each of {cores} cores "
                f"no room for a bundle of {format_size(_BUNDLE_LEAST)}; raise it, or lower "
                "segment.target_size"
            )
        return share

    def largest_bundle(self, cores: int) -> int:
        """Return the size of the largest encoded bundle that fits under the cap."""
        target = self.segment.target_bytes
        most = max_core_quota(self.retention.cap_bytes, cores, target)
        return largest_bundle(most, target_bytes=target, has_wal=self.has_wal)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Setting], *, where: str = "quiver") -> QuiverConfig:
        """Read settings from a mapping. Keys may be dotted: `retention.size_cap: 1GB` is allowed.

        Raise `ConfigError` with the location and, for an unknown key, the closest known key.
        """
        return build(cls, _undotted(mapping, where), where=where)

    def with_path(self, path: str) -> QuiverConfig:
        """Return the same settings for another directory."""
        return dataclasses.replace(self, path=path)


def _undotted(mapping: Mapping[str, Setting], where: str) -> dict[str, Setting]:
    nested: dict[str, Setting] = {}
    for key, value in mapping.items():
        section, dot, name = str(key).partition(".")
        if dot:
            value = {name: value}
        below = nested.get(section)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            twice = sorted(set(below) & set(value))
            if twice:
                raise ConfigError(f"{where}: {section}.{twice[0]}: set twice")
            value = {**below, **value}
        elif section in nested:
            raise ConfigError(f"{where}: {section}: set twice")
        nested[section] = value
    return nested
