"""Settings of a database of time series; a wrong value fails when the object is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.config import Setting, build
from penstock.coordinator import CoordinatorConfig, SizeUnit, SyncMode
from penstock.errors import ConfigError
from penstock.timeseries.promql import EngineConfig
from penstock.units import DurationLike, SizeLike, parse_duration, parse_size

__all__ = ["TimeSeriesConfig"]


def _coordinator() -> CoordinatorConfig:
    return CoordinatorConfig(flush_interval="1s", sync_mode=SyncMode.EVERY_FLUSH)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSeriesConfig:
    """How long samples are kept, when they are stored, and what a query may take."""

    open_timeout: DurationLike = "60s"
    """How long the store may take to open the database."""
    retention: DurationLike | None = None
    """A bucket of an hour is gone this long after it began. Without it everything is kept."""
    coordinator: CoordinatorConfig = field(default_factory=_coordinator)
    """A flush is one request and one record for each bucket written to, so a second is cheap enough to let
    writers wait for DURABLE."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    fold_after: DurationLike = "5m"
    """Blocks of a bucket are folded into its series when it has been over for this long: late samples come
    soon or not at all."""
    fold_size: SizeLike = "32MiB"
    """Or as soon as the blocks of one bucket are this large: what a query of the last hour reads of them."""
    fold_blocks: int = 1000
    """Or when there are this many of them."""
    fold_samples: int = 1_000_000
    """Samples that one flush folds, or some more: an hour with more of them takes several flushes."""
    queries_max: int = 4
    """Queries worked on at the same time; others wait. Each may take what `engine.samples_max` allows."""

    def __post_init__(self) -> None:
        if self.coordinator.size_unit is not SizeUnit.BYTES:
            raise ConfigError("coordinator.size_unit must be 'bytes': that is what a delta of series counts")
        if self.retention_ms is not None and self.retention_ms < 3_600_000:
            raise ConfigError("retention must be at least an hour, which is what is dropped at a time")
        for name in ("queries_max", "fold_blocks", "fold_samples"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}")
        if self.open_timeout_s <= 0:
            raise ConfigError(f"open_timeout must be longer than nothing, not {self.open_timeout!r}")
        _ = self.fold_after_ms, self.fold_bytes

    @property
    def open_timeout_s(self) -> float:
        return parse_duration(self.open_timeout)

    @property
    def retention_ms(self) -> int | None:
        return None if self.retention is None else round(parse_duration(self.retention) * 1000)

    @property
    def fold_after_ms(self) -> int:
        return round(parse_duration(self.fold_after) * 1000)

    @property
    def fold_bytes(self) -> int:
        return parse_size(self.fold_size)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Setting], *, where: str = "timeseries") -> TimeSeriesConfig:
        """The configuration in a mapping, such as a part of a YAML file. Raises `ConfigError`.

        What a nested part does not name keeps the default of a database of time series.
        """
        settings = dict(mapping)
        nested = settings.get("coordinator")
        if isinstance(nested, Mapping):
            settings["coordinator"] = {"flush_interval": "1s", "sync_mode": "every_flush", **nested}
        return build(cls, settings, where=where)
