"""Settings of a time-series database. An invalid value raises `ConfigError` when the object is created."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.config import Setting, build, check_whole_numbers
from penstock.coordinator import CoordinatorConfig, SizeUnit, SyncMode
from penstock.errors import ConfigError
from penstock.timeseries.promql import EngineConfig
from penstock.units import DurationLike, SizeLike, convert_units, seconds_of, size_of


def _coordinator() -> CoordinatorConfig:
    return CoordinatorConfig(flush_interval="1s", sync_mode=SyncMode.EVERY_FLUSH)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSeriesConfig:
    """Settings for retention, flushing, compaction and query limits."""

    open_timeout: DurationLike = "60s"
    """Time limit for opening the database."""
    retention: DurationLike | None = None
    """Age, counted from its start, at which an hourly bucket is deleted. Without it, everything is kept."""
    coordinator: CoordinatorConfig = field(default_factory=_coordinator)
    """Settings of the coordinator. By default it flushes and syncs every second, for writers that wait for
    DURABLE. A flush costs one request, with one record for each bucket written to."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    fold_after: DurationLike = "5m"
    """Time after the end of a bucket when its blocks are compacted into its series. Most late samples
    arrive before that."""
    fold_size: SizeLike = "32MiB"
    """Size of a bucket's blocks at which they are compacted early. It bounds the data that a query of the
    last hour reads."""
    fold_blocks: int = 1000
    """Number of blocks of a bucket at which they are compacted early."""
    fold_samples: int = 1_000_000
    """Approximate number of samples that one flush compacts. An hour with more samples takes several
    flushes."""
    queries_max: int = 4
    """Number of concurrent queries. Others wait. Each may use `engine.samples_max` samples."""

    open_timeout_s = seconds_of("open_timeout")
    _retention_s = seconds_of("retention", optional=True)
    _fold_after_s = seconds_of("fold_after")
    fold_bytes = size_of("fold_size")

    def __post_init__(self) -> None:
        convert_units(self)
        if self.coordinator.size_unit is not SizeUnit.BYTES:
            raise ConfigError("coordinator.size_unit must be 'bytes', the unit of a delta of series")
        if self.retention_ms is not None and self.retention_ms < 3_600_000:
            raise ConfigError("retention must be at least an hour, because whole hours are deleted")
        check_whole_numbers(self, 1, "queries_max", "fold_blocks", "fold_samples")
        if self.open_timeout_s <= 0:
            raise ConfigError("open_timeout must be above 0")

    @property
    def retention_ms(self) -> int | None:
        return None if self._retention_s is None else round(self._retention_s * 1000)

    @property
    def fold_after_ms(self) -> int:
        return round(self._fold_after_s * 1000)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Setting], *, where: str = "timeseries") -> TimeSeriesConfig:
        """Build the configuration from a mapping, such as a section of a YAML file. Raises `ConfigError`.

        Keys missing in the nested section `coordinator` keep the defaults of a time-series database.
        """
        settings = dict(mapping)
        nested = settings.get("coordinator")
        if isinstance(nested, Mapping):
            settings["coordinator"] = {"flush_interval": "1s", "sync_mode": "every_flush", **nested}
        return build(cls, settings, where=where)
