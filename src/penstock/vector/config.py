"""Settings of a vector store. A wrong value fails when the object is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from penstock.config import Setting, build
from penstock.coordinator import CoordinatorConfig, SizeUnit, SyncMode
from penstock.errors import ConfigError
from penstock.units import DurationLike, parse_duration
from penstock.vector.index import Tuning
from penstock.vector.model import Claim, Field, Metric

__all__ = ["VectorConfig"]

_LEAST: Final = {"exact_max": 0, "split_at": 4, "merge_below": 0, "flush_vectors": 1, "searches_max": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorConfig:
    """Where a collection is, what it holds, when it is flushed, and how it is searched."""

    store: str = "memory:///"
    """`file:///dir`, `s3://bucket/dir`, `az://…`, `gs://…`."""
    name: str = "vectors"
    """The database below it."""
    store_options: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    """Of the store's client, such as `aws_endpoint`; not shown, because keys may be among them."""
    open_timeout: DurationLike = "60s"
    """How long the store may take to open the database; to read the vectors afterwards does not count."""
    dimensions: int | None = None
    """Needed for a new collection; None takes the collection as it is."""
    metric: str | None = None
    """`l2`, `cosine` or `dot`; None takes the collection as it is, and makes a new one `l2`."""
    fields: tuple[Field, ...] | None = None
    """The schema; empty takes any attribute and indexes none. None takes the collection as it is."""
    exact_max: int = 50_000
    """Up to this many vectors a search compares them all."""
    split_at: int = 150
    """A posting list of this many vectors is cut in two."""
    merge_below: int = 50
    """A posting list of fewer vectors is dissolved."""
    searches_max: int = 64
    """Searches under way, each on one of a few threads or waiting for one; more are told to come back."""
    search_timeout: DurationLike = "30s"
    """A search that takes longer is given up."""
    queue_capacity: int = 1000
    """Writes, each of any number of vectors, that may wait."""
    flush_interval: DurationLike = "5s"
    """How old searches get when nobody asks for a flush."""
    flush_vectors: int = 10_000
    """A flush begins at this many vectors; one larger than 8 KiB counts as several."""
    sync_mode: SyncMode = SyncMode.EVERY_FLUSH
    """Every flush is made durable: a flush of vectors is large, so that one request more does not count."""

    def __post_init__(self) -> None:
        if self.metric is not None:
            object.__setattr__(self, "metric", Metric.named(self.metric).name.lower())
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} must be a whole number of at least {least}, not {value!r}")
        if self.search_timeout_s <= 0:
            raise ConfigError(f"search_timeout must be longer than nothing, not {self.search_timeout!r}")
        if self.open_timeout_s <= 0:
            raise ConfigError(f"open_timeout must be longer than nothing, not {self.open_timeout!r}")
        if 2 * self.merge_below > self.split_at:
            raise ConfigError("merge_below is at most half of split_at, or a cut would be undone at once")
        if not self.name.strip("/"):
            raise ConfigError("name: a collection needs one")
        _ = self.claim, self.coordinator

    @property
    def claim(self) -> Claim:
        """What the caller says about the collection."""
        return Claim(
            dimensions=self.dimensions,
            metric=None if self.metric is None else Metric.named(self.metric),
            fields=None if self.fields is None else tuple(self.fields),
        )

    @property
    def open_timeout_s(self) -> float:
        return parse_duration(self.open_timeout)

    @property
    def search_timeout_s(self) -> float:
        return parse_duration(self.search_timeout)

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
        """The configuration in a mapping, such as a part of a YAML file. Raises `ConfigError`."""
        return build(cls, mapping, where=where)
