"""Settings of producers, consumers and the garbage collector.

Names and defaults are those of the format's other clients. A duration is a number of seconds, a `timedelta`
or text such as "100ms". A size is a number of bytes or text such as "64MiB". The constructor converts both to
numbers, and raises `ConfigError` for an invalid value.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from penstock.buffer.batch import CompressionType
from penstock.config import Setting, build, check_whole_numbers
from penstock.errors import ConfigError, InvalidInput
from penstock.limits import BATCH_BYTES_MAX, MANIFEST_BYTES_MAX
from penstock.objects import ObjectStore, StoreAddress, StoreConfig, normalise_key
from penstock.units import DurationLike, SizeLike, convert_units, seconds_of, size_of

DEFAULT_PREFIX = "ingest"
DEFAULT_MANIFEST = "ingest/manifest"

C = TypeVar("C")


class BadBatchPolicy(enum.Enum):
    """How a consumer handles a batch that is missing or cannot be decoded."""

    RAISE = "raise"
    """Stop at the batch: every `next_batch` raises until it can be read."""
    SKIP = "skip"
    """Store the batch durably as a dead letter and continue with the next one."""


def _compression(value: CompressionType | str) -> CompressionType:
    try:
        return value if isinstance(value, CompressionType) else CompressionType[value.upper()]
    except (KeyError, AttributeError):
        raise ConfigError(f"batch_compression is 'none' or 'zstd', not {value!r}") from None


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
    """The location of a queue: a store, and the paths of its manifest and batches in that store."""

    store: str | StoreConfig | ObjectStore
    """A URL (`file:///…`, `s3://…`, `az://…`, `gs://…`, `memory://…`), a `StoreConfig`, or a store."""
    data_path_prefix: str = DEFAULT_PREFIX
    manifest_path: str = DEFAULT_MANIFEST

    def __post_init__(self) -> None:
        _check_store(self.store)
        convert_units(self)
        _ = self.prefix, self.manifest_key

    @property
    def prefix(self) -> str:
        return _path("data_path_prefix", self.data_path_prefix)

    @property
    def manifest_key(self) -> str:
        return _path("manifest_path", self.manifest_path)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerConfig(QueueConfig):
    """Where and how a producer stores records."""

    flush_interval: DurationLike = "100ms"
    """Age at which a batch is stored, which sets the latency of an ack. Calls that wait for a free upload are
    stored together."""
    flush_size_bytes: SizeLike = "64MiB"
    """Size at which a batch is stored early, to bound memory and the cost of a request."""
    max_buffered_inputs: int = 1000
    """Limit of the calls that wait for a batch. At the limit `produce` waits."""
    batch_compression: CompressionType | str = CompressionType.NONE
    max_inflight_bytes: SizeLike = "512MiB"
    """Memory for records that are not durable yet: half for the records, half for their encoded form."""
    max_parallel_uploads: int = 4
    append_deadline: DurationLike = "60s"
    """How long to retry the store before `produce` fails."""
    max_manifest_bytes: SizeLike = "256MiB"
    """Limit of the manifest's size, because every append transfers all of it."""
    merge_metadata: bool = False
    """Keep one metadata item for neighbouring calls with equal payload in the same millisecond."""

    flush_interval_s = seconds_of("flush_interval")
    flush_size = size_of("flush_size_bytes")
    inflight_bytes_max = size_of("max_inflight_bytes")
    manifest_bytes_max = size_of("max_manifest_bytes")
    append_deadline_s = seconds_of("append_deadline")

    def __post_init__(self) -> None:
        QueueConfig.__post_init__(self)
        check_whole_numbers(self, 1, "max_buffered_inputs", "max_parallel_uploads")
        check_whole_numbers(self, 1, "flush_size_bytes", "max_inflight_bytes", "max_manifest_bytes")
        if self.manifest_bytes_max > MANIFEST_BYTES_MAX:
            raise ConfigError(f"max_manifest_bytes must be at most {MANIFEST_BYTES_MAX} bytes")
        _flag("merge_metadata", self.merge_metadata)
        if self.flush_size > BATCH_BYTES_MAX // 2:
            raise ConfigError(f"flush_size_bytes must be at most {BATCH_BYTES_MAX // 2} bytes")
        _ = self.compression

    @property
    def compression(self) -> CompressionType:
        return _compression(self.batch_compression)


@dataclass(frozen=True, slots=True, kw_only=True)
class GarbageCollectorConfig(QueueConfig):
    """How often unused objects are collected, and how old they must be."""

    gc_interval: DurationLike = "5m"
    gc_grace_period: DurationLike = "10m"
    """Must be longer than any upload with its append, to protect clients that do not know the floor."""

    gc_interval_s = seconds_of("gc_interval")
    gc_grace_period_s = seconds_of("gc_grace_period")

    def __post_init__(self) -> None:
        QueueConfig.__post_init__(self)
        if self.gc_interval_s <= 0:
            raise ConfigError("gc_interval must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerConfig(GarbageCollectorConfig):
    """Where a consumer reads, how it collects garbage, and how it handles failures."""

    gc_enabled: bool = True
    prefetch: int = 4
    """Batches fetched ahead of `next_batch`; 0 fetches each one on demand."""
    prefetch_bytes_max: SizeLike = "256MiB"
    """Limit of the bytes fetched ahead. A fetch in progress counts as one batch of the usual size."""
    max_batch_bytes: SizeLike = BATCH_BYTES_MAX
    """Limit of a decompressed block; a larger one is a bad batch."""
    on_bad_batch: BadBatchPolicy | str = BadBatchPolicy.RAISE
    retry_deadline: DurationLike = "30s"
    """How long to retry the store before a call fails."""
    strict_resume: bool = False
    """Raise an error, instead of logging a warning, if `last_acked` is beyond the end of the queue."""

    prefetch_bytes = size_of("prefetch_bytes_max")
    batch_bytes_max = size_of("max_batch_bytes")
    retry_deadline_s = seconds_of("retry_deadline")

    def __post_init__(self) -> None:
        GarbageCollectorConfig.__post_init__(self)
        _ = self.bad_batch_policy
        _flag("gc_enabled", self.gc_enabled)
        _flag("strict_resume", self.strict_resume)
        check_whole_numbers(self, 1, "max_batch_bytes", "prefetch_bytes_max")
        check_whole_numbers(self, 0, "prefetch")

    @property
    def bad_batch_policy(self) -> BadBatchPolicy:
        try:
            return BadBatchPolicy(self.on_bad_batch)
        except ValueError:
            raise ConfigError(f"on_bad_batch is 'raise' or 'skip', not {self.on_bad_batch!r}") from None


_MILLISECOND_FIELDS = ("flush_interval", "gc_interval", "gc_grace_period")


def config_from_mapping(cls: type[C], mapping: Mapping[str, Setting], *, where: str) -> C:
    """Build a config from the settings of the format's other clients.

    These name the store as `object_store: {type: InMemory | Aws | Local, …}` and give durations in whole
    milliseconds. `store: URL` and text such as "100ms" are accepted as well.
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
