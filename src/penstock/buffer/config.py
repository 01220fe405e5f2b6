"""Settings of producers, consumers and the garbage collector.

Names and defaults are those of the format's other clients; durations take seconds, a `timedelta` or
text such as "100ms", sizes take bytes or text such as "64MiB". A wrong value fails when the object is made.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from penstock.buffer.batch import CompressionType
from penstock.config import Setting, build
from penstock.errors import ConfigError, InvalidInput
from penstock.limits import BATCH_BYTES_MAX, MANIFEST_BYTES_MAX
from penstock.objects import ObjectStore, StoreAddress, StoreConfig, normalise_key
from penstock.units import DurationLike, SizeLike, parse_duration, parse_size

DEFAULT_PREFIX = "ingest"
DEFAULT_MANIFEST = "ingest/manifest"

C = TypeVar("C")


class BadBatchPolicy(enum.Enum):
    """What a consumer does with a batch that is missing or does not decode."""

    RAISE = "raise"
    """Stop at it: every `next_batch` raises until it is readable again."""
    SKIP = "skip"
    """Record it as a dead letter, durably, and continue with the next."""


def _compression(value: CompressionType | str) -> CompressionType:
    try:
        return value if isinstance(value, CompressionType) else CompressionType[value.upper()]
    except (KeyError, AttributeError):
        raise ConfigError(f"batch_compression is 'none' or 'zstd', not {value!r}") from None


def _positive(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}")
    return value


def _check_store(store: str | StoreConfig | ObjectStore) -> None:
    if isinstance(store, str):
        StoreAddress.parse(store)
    elif not isinstance(store, StoreConfig | ObjectStore):
        raise ConfigError(f"store must be a url, a StoreConfig or a store, not {type(store).__name__}")


def _flag(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, not {value!r}")


def _path(name: str, value: str) -> str:
    try:
        return normalise_key(value)
    except InvalidInput as error:
        raise ConfigError(f"{name}: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueConfig:
    """Which queue: a store, and where in it the manifest and the batches are."""

    store: str | StoreConfig | ObjectStore
    """A URL (`file:///…`, `s3://…`, `az://…`, `gs://…`, `memory://…`), a `StoreConfig`, or a store."""
    data_path_prefix: str = DEFAULT_PREFIX
    manifest_path: str = DEFAULT_MANIFEST

    def __post_init__(self) -> None:
        _check_store(self.store)
        _ = self.prefix, self.manifest_key

    @property
    def prefix(self) -> str:
        return _path("data_path_prefix", self.data_path_prefix)

    @property
    def manifest_key(self) -> str:
        return _path("manifest_path", self.manifest_path)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerConfig(QueueConfig):
    """Where and how a producer stores what it is given."""

    flush_interval: DurationLike = "100ms"
    """A batch is stored this long after it was opened: the latency people accept for an ack. Calls that
    waited for a free upload are stored together, as many as there are."""
    flush_size_bytes: SizeLike = "64MiB"
    """Or as soon as it holds this many bytes: requests stay cheap and memory small."""
    max_buffered_inputs: int = 1000
    """Calls that may wait to be taken into a batch; then `produce` waits."""
    batch_compression: CompressionType | str = CompressionType.NONE
    max_inflight_bytes: SizeLike = "512MiB"
    """Memory for records that are not durable yet; half for them as given, half for their encoded form."""
    max_parallel_uploads: int = 4
    append_deadline: DurationLike = "60s"
    """How long to retry the store before the callers get an error."""
    max_manifest_bytes: SizeLike = "256MiB"
    """Refuse to grow the manifest beyond this: every append transfers all of it."""
    merge_metadata: bool = False
    """Keep one metadata item for neighbouring calls with equal payload in the same millisecond."""

    def __post_init__(self) -> None:
        QueueConfig.__post_init__(self)
        _positive("max_buffered_inputs", self.max_buffered_inputs)
        _positive("max_parallel_uploads", self.max_parallel_uploads)
        for name, value in (
            ("flush_size_bytes", self.flush_size),
            ("max_inflight_bytes", self.inflight_bytes_max),
            ("max_manifest_bytes", self.manifest_bytes_max),
        ):
            _positive(name, value)
        if self.manifest_bytes_max > MANIFEST_BYTES_MAX:
            raise ConfigError(f"max_manifest_bytes must be at most {MANIFEST_BYTES_MAX} bytes")
        _flag("merge_metadata", self.merge_metadata)
        if self.flush_size > BATCH_BYTES_MAX // 2:
            raise ConfigError(f"flush_size_bytes must be at most {BATCH_BYTES_MAX // 2} bytes")
        _ = self.flush_interval_s, self.append_deadline_s, self.compression

    @property
    def flush_interval_s(self) -> float:
        return parse_duration(self.flush_interval)

    @property
    def flush_size(self) -> int:
        return parse_size(self.flush_size_bytes)

    @property
    def inflight_bytes_max(self) -> int:
        return parse_size(self.max_inflight_bytes)

    @property
    def manifest_bytes_max(self) -> int:
        return parse_size(self.max_manifest_bytes)

    @property
    def append_deadline_s(self) -> float:
        return parse_duration(self.append_deadline)

    @property
    def compression(self) -> CompressionType:
        return _compression(self.batch_compression)


@dataclass(frozen=True, slots=True, kw_only=True)
class GarbageCollectorConfig(QueueConfig):
    """Which objects are looked at, how often, and how old they must be."""

    gc_interval: DurationLike = "5m"
    gc_grace_period: DurationLike = "10m"
    """Politeness towards clients that do not know the floor: longer than any upload and append takes."""

    def __post_init__(self) -> None:
        QueueConfig.__post_init__(self)
        if self.gc_interval_s <= 0:
            raise ConfigError("gc_interval must be longer than zero")
        _ = self.gc_grace_period_s

    @property
    def gc_interval_s(self) -> float:
        return parse_duration(self.gc_interval)

    @property
    def gc_grace_period_s(self) -> float:
        return parse_duration(self.gc_grace_period)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerConfig(GarbageCollectorConfig):
    """Where a consumer reads, how it collects garbage, and what it does about trouble."""

    gc_enabled: bool = True
    prefetch: int = 4
    """Batches fetched ahead of `next_batch`; 0 fetches each when it is asked for."""
    prefetch_bytes_max: SizeLike = "256MiB"
    """Bound on what is fetched ahead: bytes that wait, and those under way taken at the usual size."""
    max_batch_bytes: SizeLike = BATCH_BYTES_MAX
    """The largest block, decompressed, that is worth memory; a larger one is a bad batch."""
    on_bad_batch: BadBatchPolicy | str = BadBatchPolicy.RAISE
    retry_deadline: DurationLike = "30s"
    """How long to retry the store before a call raises."""
    strict_resume: bool = False
    """Raise when `last_acked` lies beyond the queue, instead of warning."""

    def __post_init__(self) -> None:
        GarbageCollectorConfig.__post_init__(self)
        _ = self.bad_batch_policy, self.retry_deadline_s
        _flag("gc_enabled", self.gc_enabled)
        _flag("strict_resume", self.strict_resume)
        _positive("max_batch_bytes", self.batch_bytes_max)
        _positive("prefetch_bytes_max", self.prefetch_bytes)
        if isinstance(self.prefetch, bool) or not isinstance(self.prefetch, int) or self.prefetch < 0:
            raise ConfigError(f"prefetch must be a whole number of at least 0, not {self.prefetch!r}")

    @property
    def prefetch_bytes(self) -> int:
        return parse_size(self.prefetch_bytes_max)

    @property
    def batch_bytes_max(self) -> int:
        return parse_size(self.max_batch_bytes)

    @property
    def retry_deadline_s(self) -> float:
        return parse_duration(self.retry_deadline)

    @property
    def bad_batch_policy(self) -> BadBatchPolicy:
        try:
            return BadBatchPolicy(self.on_bad_batch)
        except ValueError:
            raise ConfigError(f"on_bad_batch is 'raise' or 'skip', not {self.on_bad_batch!r}") from None


_MILLISECOND_FIELDS = ("flush_interval", "gc_interval", "gc_grace_period")


def config_from_mapping(cls: type[C], mapping: Mapping[str, Setting], *, where: str) -> C:
    """A config from the settings file of the format's other clients.

    They write `object_store: {type: InMemory | Aws | Local, …}` for the store and whole milliseconds for
    durations; `store: URL` and text such as "100ms" are taken as well.
    """
    settings = dict(mapping)
    if "object_store" in settings:
        if "store" in settings:
            raise ConfigError(f"{where}: give 'store' or 'object_store', not both")
        settings["store"] = _store_url(settings.pop("object_store"), where)
    for name in _MILLISECOND_FIELDS:
        value = settings.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            settings[name] = f"{value}ms"
    return build(cls, settings, where=where)


def _store_url(value: Setting, where: str) -> Setting:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: object_store must be a mapping with a 'type'")
    kind = value.get("type")
    if kind == "InMemory":
        return "memory://"
    if kind == "Local" and isinstance(value.get("path"), str):
        return f"{value['path']}"
    if kind == "Aws" and isinstance(value.get("bucket"), str):
        region = value.get("region")
        options = {"region": str(region)} if region else {}
        return StoreConfig(url=f"s3://{value['bucket']}", options=options)
    raise ConfigError(
        f"{where}: object_store is InMemory, Local with 'path', or Aws with 'region' and 'bucket'"
    )
