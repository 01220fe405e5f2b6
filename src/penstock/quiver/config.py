"""The settings of Quiver, as a file or a caller writes them.

Sizes take bytes or text such as "32MB" (10^6) and "1GiB" (2^30), durations seconds or text such as "25ms".
After construction every field holds a number. A wrong value fails when the object is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from penstock.config import Setting, build
from penstock.errors import ConfigError
from penstock.quiver.quota import largest_bundle, max_core_quota, min_quota
from penstock.units import DurationLike, SizeLike, format_size, parse_duration, parse_size

DurabilityLike: TypeAlias = Literal["wal", "segment_only"]
_TARGET_BYTES_MAX: Final = 1024**3
_STREAMS_MAX: Final = 100_000

_BUNDLE_LEAST: Final = 1024


def _sizes(settings: object, *names: str) -> None:
    for name in names:
        _put(settings, name, parse_size(getattr(settings, name)))


def _durations(settings: object, *names: str) -> None:
    for name in names:
        _put(settings, name, parse_duration(getattr(settings, name)))


def _bytes(size: SizeLike) -> int:
    """A size that was converted when its settings were made."""
    assert isinstance(size, int)
    return size


def _seconds(duration: DurationLike) -> float:
    """A duration that was converted when its settings were made."""
    assert isinstance(duration, int | float)
    return duration


def _put(settings: object, name: str, value: object) -> None:
    object.__setattr__(settings, name, value)


def _at_least(settings: object, least: float, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if value < least:
            raise ConfigError(f"{name} must be at least {least:g}, not {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentConfig:
    """How large segments get, how long they stay open, and how they are read."""

    target_size: SizeLike = "32MB"
    """What may wait in memory, over all streams; a segment is at most this large."""
    max_open_duration: DurationLike = "5s"
    """Nothing waits longer for its segment, and thereby for its delivery."""
    max_stream_count: int = 512
    """Schemas that may be open at once; each costs a segment."""
    layout: Literal["flat", "otap"] = "flat"
    read_mode: Literal["mmap", "read"] = "read"
    """`mmap` reads without a copy, but a bad sector or a file that was cut ends the process (SIGBUS)."""
    verify_on_open: Literal["metadata", "full"] = "metadata"

    def __post_init__(self) -> None:
        _sizes(self, "target_size")
        _durations(self, "max_open_duration")
        _at_least(self, 1, "target_size", "max_stream_count")
        if self.target_bytes > _TARGET_BYTES_MAX:
            raise ConfigError(f"target_size must be at most {format_size(_TARGET_BYTES_MAX)}")
        if self.max_stream_count > _STREAMS_MAX:
            raise ConfigError(f"max_stream_count must be at most {_STREAMS_MAX}")
        if self.layout == "otap":
            raise ConfigError("layout 'otap' is not built; 'flat' is the one there is")

    @property
    def target_bytes(self) -> int:
        return _bytes(self.target_size)

    @property
    def max_open_s(self) -> float:
        return _seconds(self.max_open_duration)


@dataclass(frozen=True, slots=True, kw_only=True)
class WalConfig:
    """How much the log may hold, and when an accepted bundle counts as safe."""

    max_size: SizeLike = "128MB"
    rotation_target: SizeLike = "64MB"
    max_rotated_files: int = 10
    flush: Literal["always", "group", "interval", "none"] = "group"
    """`always` and `group` answer after a sync, of its own or a shared one; the others after the write."""
    flush_interval: DurationLike = "25ms"
    """`group`: how long a sync may wait for more to share it. `interval`: how long bytes stay unsynced."""
    on_corruption: Literal["continue", "fail"] = "continue"

    def __post_init__(self) -> None:
        _sizes(self, "max_size", "rotation_target")
        _durations(self, "flush_interval")
        _at_least(self, 1, "max_rotated_files")
        _at_least(self, 4096, "max_size", "rotation_target")

    @property
    def max_bytes(self) -> int:
        return _bytes(self.max_size)

    @property
    def rotation_bytes(self) -> int:
        """The size of one file: two must fit, or the log could never give room back."""
        return min(_bytes(self.rotation_target), max(4096, self.max_bytes // 2))

    @property
    def flush_interval_s(self) -> float:
        return _seconds(self.flush_interval)

    @property
    def syncs(self) -> bool:
        """Whether an acknowledgement waits for a sync."""
        return self.flush in ("always", "group")


@dataclass(frozen=True, slots=True, kw_only=True)
class AckConfig:
    """When outcomes become durable, and when the log of them is summed up."""

    flush_interval: DurationLike = "100ms"
    checkpoint_bytes: SizeLike = "16MB"
    checkpoint_records: int = 100_000
    checkpoint_interval: DurationLike = "60s"

    def __post_init__(self) -> None:
        _durations(self, "flush_interval", "checkpoint_interval")
        _sizes(self, "checkpoint_bytes")
        _at_least(self, 1, "checkpoint_bytes", "checkpoint_records")

    @property
    def flush_interval_s(self) -> float:
        return _seconds(self.flush_interval)

    @property
    def checkpoint_log_bytes(self) -> int:
        """How large the log gets before it is summed up."""
        return _bytes(self.checkpoint_bytes)

    @property
    def checkpoint_interval_s(self) -> float:
        return _seconds(self.checkpoint_interval)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionConfig:
    """How much of the disk may be used, and what gives when it is not enough."""

    size_cap: SizeLike = "10GiB"
    size_cap_policy: Literal["backpressure", "drop_oldest"] = "backpressure"
    max_retain_after_ingestion_hours: float | None = None
    steady_state_headroom: SizeLike = 0
    min_free: SizeLike = "1GB"

    def __post_init__(self) -> None:
        _sizes(self, "size_cap", "steady_state_headroom", "min_free")
        if self.max_retain_after_ingestion_hours is not None:
            _at_least(self, 0, "max_retain_after_ingestion_hours")

    @property
    def cap_bytes(self) -> int:
        return _bytes(self.size_cap)

    @property
    def headroom_bytes(self) -> int:
        return _bytes(self.steady_state_headroom)

    @property
    def min_free_bytes(self) -> int:
        return _bytes(self.min_free)

    @property
    def max_age_s(self) -> float | None:
        hours = self.max_retain_after_ingestion_hours
        return None if hours is None else hours * 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestConfig:
    """How long a writer may be held up before it is refused."""

    block_timeout: DurationLike = "0s"

    def __post_init__(self) -> None:
        _durations(self, "block_timeout")

    @property
    def block_s(self) -> float:
        return _seconds(self.block_timeout)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryConfig:
    """When a bundle that was given back is handed out again. Without `max_attempts` it always is."""

    initial: DurationLike = "1s"
    max: DurationLike = "30s"
    multiplier: float = 2.0
    max_attempts: int | None = None

    def __post_init__(self) -> None:
        _durations(self, "initial", "max")
        _at_least(self, 1, "multiplier")
        if self.max_attempts is not None:
            _at_least(self, 1, "max_attempts")

    @property
    def initial_s(self) -> float:
        return _seconds(self.initial)

    @property
    def max_s(self) -> float:
        return _seconds(self.max)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryConfig:
    """How bundles are handed out."""

    max_in_flight: int = 1000
    claim_timeout: DurationLike = "5m"
    order: Literal["oldest_first", "newest_first"] = "oldest_first"

    def __post_init__(self) -> None:
        _durations(self, "claim_timeout")
        _at_least(self, 1, "max_in_flight")

    @property
    def claim_timeout_s(self) -> float:
        return _seconds(self.claim_timeout)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriberConfig:
    """What becomes of subscribers that nobody asks for any more; without a timeout they stay."""

    orphan_timeout: DurationLike | None = None

    def __post_init__(self) -> None:
        if self.orphan_timeout is not None:
            _durations(self, "orphan_timeout")

    @property
    def orphan_timeout_s(self) -> float | None:
        return None if self.orphan_timeout is None else _seconds(self.orphan_timeout)


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadConfig:
    """The object store that gets a copy of every committed segment; without one nothing is uploaded."""

    store: str | None = None
    prefix: str = "quiver"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuiverConfig:
    """Everything that can be set about one Quiver directory."""

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

    def __post_init__(self) -> None:
        _durations(self, "maintenance_interval")
        if not self.path:
            raise ConfigError("path must name a directory")
        if self.maintenance_interval_s <= 0:
            raise ConfigError("maintenance_interval must be longer than nothing")

    @property
    def maintenance_interval_s(self) -> float:
        return _seconds(self.maintenance_interval)

    @property
    def has_wal(self) -> bool:
        return self.durability == "wal"

    @property
    def wal_bytes(self) -> int:
        return self.wal.max_bytes if self.has_wal else 0

    def cap_per_core(self, cores: int) -> int:
        """The share of one core. Raises `ConfigError` if it cannot hold a log and two segments."""
        share = self.retention.cap_bytes // cores
        least = min_quota(wal_bytes=self.wal_bytes, target_bytes=self.segment.target_bytes)
        if share < least:
            raise ConfigError(
                f"retention.size_cap must be at least {least * cores} bytes for {cores} core(s): "
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
        """The largest bundle, encoded, that the cap ever has room for."""
        target = self.segment.target_bytes
        most = max_core_quota(self.retention.cap_bytes, cores, target)
        return largest_bundle(most, target_bytes=target, has_wal=self.has_wal)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Setting], *, where: str = "quiver") -> QuiverConfig:
        """Settings as a file has them. Keys may be dotted: `retention.size_cap: 1GB` is allowed.

        Raises `ConfigError` that names the place, and for an unknown key the nearest one that is known.
        """
        return build(cls, _undotted(mapping, where), where=where)

    def with_path(self, path: str) -> QuiverConfig:
        """The same for another directory."""
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
