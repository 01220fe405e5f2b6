"""Settings of a vector store. An invalid value raises `ConfigError` when the object is created."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from penstock.config import Setting, build, check_whole_numbers
from penstock.coordinator import CoordinatorConfig, SizeUnit, SyncMode
from penstock.errors import ConfigError
from penstock.units import DurationLike, convert_units, seconds_of
from penstock.vector.index import Tuning
from penstock.vector.model import Claim, Field, Metric

_LEAST: Final = {"exact_max": 0, "split_at": 4, "merge_below": 0, "flush_vectors": 1, "searches_max": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorConfig:
    """Settings for the location, schema, flushing and search of a collection."""

    store: str = "memory:///"
    """URL of the store: `file:///dir`, `s3://bucket/dir`, `az://…`, `gs://…`."""
    name: str = "vectors"
    """The folder of the database in the store."""
    store_options: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    """Settings of the store's client, such as `aws_endpoint`. Hidden in `repr`, because some are secret."""
    open_timeout: DurationLike = "60s"
    """Time limit for opening the database, excluding the time to read the vectors."""
    dimensions: int | None = None
    """Number of dimensions, required for a new collection. None accepts any existing collection."""
    metric: str | None = None
    """`l2`, `cosine` or `dot`. None accepts any existing collection, and selects `l2` for a new one."""
    fields: tuple[Field, ...] | None = None
    """The schema. An empty one allows any attribute and indexes none. None accepts any existing
    collection."""
    exact_max: int = 50_000
    """Maximum number of vectors for which a search compares all of them."""
    split_at: int = 150
    """Size at which a posting list is split in two."""
    merge_below: int = 50
    """Size below which a posting list is dissolved."""
    searches_max: int = 64
    """Maximum number of searches that run or wait for a thread. More are refused and must be retried."""
    search_timeout: DurationLike = "30s"
    """Time limit of a search."""
    queue_capacity: int = 1000
    """Maximum number of waiting writes. A write may have any number of vectors."""
    flush_interval: DurationLike = "5s"
    """Time between flushes. It bounds the staleness of search results."""
    flush_vectors: int = 10_000
    """Number of vectors at which a flush starts early. A vector larger than 8 KiB counts as several."""
    sync_mode: SyncMode = SyncMode.EVERY_FLUSH
    """By default every flush is synced. Flushes are large, so one more request is cheap."""

    open_timeout_s = seconds_of("open_timeout")
    search_timeout_s = seconds_of("search_timeout")

    def __post_init__(self) -> None:
        convert_units(self)
        if self.metric is not None:
            object.__setattr__(self, "metric", Metric.named(self.metric).name.lower())
        for name, least in _LEAST.items():
            check_whole_numbers(self, least, name)
        if self.search_timeout_s <= 0:
            raise ConfigError("search_timeout must be above 0")
        if self.open_timeout_s <= 0:
            raise ConfigError("open_timeout must be above 0")
        if 2 * self.merge_below > self.split_at:
            raise ConfigError(
                "merge_below must be at most half of split_at, or a split list would be merged again"
            )
        if not self.name.strip("/"):
            raise ConfigError("name: expected a name, found an empty one")
        _ = self.claim, self.coordinator

    @property
    def claim(self) -> Claim:
        """Expected properties of the collection."""
        return Claim(
            dimensions=self.dimensions,
            metric=None if self.metric is None else Metric.named(self.metric),
            fields=None if self.fields is None else tuple(self.fields),
        )

    @property
    def tuning(self) -> Tuning:
        return Tuning(exact_max=self.exact_max, split_at=self.split_at, merge_below=self.merge_below)

    @property
    def coordinator(self) -> CoordinatorConfig:
        return CoordinatorConfig(
            queue_capacity=self.queue_capacity,
            flush_interval=self.flush_interval,
            flush_size_threshold=self.flush_vectors,
            size_unit=SizeUnit.ITEMS,
            sync_mode=self.sync_mode,
        )

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Setting], *, where: str = "vector") -> VectorConfig:
        """Build the configuration from a mapping, such as a section of a YAML file. Raises `ConfigError`."""
        return build(cls, mapping, where=where)
