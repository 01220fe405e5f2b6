"""Settings of a coordinator.

Durations and sizes as everywhere; a wrong value fails when the object is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from penstock.config import Setting, build
from penstock.errors import ConfigError
from penstock.units import DurationLike, SizeLike, parse_duration, parse_size

__all__ = ["CoordinatorConfig", "SizeUnit", "SyncMode"]


class SyncMode(StrEnum):
    """Who asks the storage to persist what was flushed. `close` always does, `flush(durable=True)` too."""

    EXPLICIT = "explicit"
    """Nobody else."""
    EVERY_FLUSH = "every_flush"
    """Every flush: DURABLE follows FLUSHED by itself, at the price of one sync per flush."""
    INTERVAL = "interval"
    """The timer, every `sync_interval`, if anything was flushed since."""


class SizeUnit(StrEnum):
    """What `Delta.estimate_size` counts, and so what the two sizes of the configuration mean."""

    BYTES = "bytes"
    ITEMS = "items"


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    """When a delta is flushed, how much may be pending, and when flushed data is made durable."""

    queue_capacity: int = 10_000
    """Writes that may wait in a channel that does not say otherwise.

    Then `write` waits and `try_write` raises.
    """
    flush_interval: DurationLike = "10s"
    """A delta is flushed this long after the last flush: how old the readers' data gets on a quiet day.

    With 0 as soon as the flush before it is stored, and synced if it is to be: those who wait get on at the
    pace of the storage, and each flush takes what has come meanwhile, at the price of one batch after the
    other.
    """
    flush_size_threshold: SizeLike = "64MiB"
    """Or as soon as it is this large: one batch of the storage stays a size that it takes well."""
    max_pending_size: SizeLike | None = None
    """Deltas not flushed yet, and queued writes whose size is known: above it nothing more is taken.

    Twice the threshold if not given.
    """
    size_unit: SizeUnit = SizeUnit.BYTES
    max_frozen_deltas: int = 2
    """Deltas that may wait behind the one being flushed before the coordinator stops to take writes."""
    batch_writes_max: int = 256
    """Writes applied in one go, before the timer and everybody else on the loop get their turn."""
    batch_time_max: DurationLike = "1ms"
    """Batches are made smaller when applying one takes longer than this."""
    sync_mode: SyncMode = SyncMode.EXPLICIT
    sync_interval: DurationLike | None = None
    """With `sync_mode` interval: how long flushed data may stay volatile. The flush interval if not given."""
    subscription_capacity: int = 16
    """Events a subscriber may be behind before it has to rebuild from a snapshot."""

    def __post_init__(self) -> None:
        for name in ("queue_capacity", "batch_writes_max", "subscription_capacity"):
            _whole(name, getattr(self, name), at_least=1)
        _whole("max_frozen_deltas", self.max_frozen_deltas, at_least=0)
        for name in ("sync_mode", "size_unit"):
            self._check_choice(name)
        if self.flush_interval_s < 0:
            raise ConfigError("flush_interval must be at least 0")
        if self.sync_interval_s <= 0 and (
            self.sync_interval is not None or self.sync_mode is SyncMode.INTERVAL
        ):
            raise ConfigError(
                "sync_interval must be longer than nothing; it is the flush_interval if not given"
            )
        _ = self.batch_time_max_s
        if not 0 < self.flush_threshold <= self.pending_max:
            raise ConfigError(
                f"flush_size_threshold ({self.flush_threshold}) must be above 0 and at most max_pending_size"
                f" ({self.pending_max}), or nothing would ever make room"
            )

    def _check_choice(self, name: str) -> None:
        kind = SyncMode if name == "sync_mode" else SizeUnit
        try:
            object.__setattr__(self, name, kind(getattr(self, name)))
        except ValueError:
            choices = ", ".join(repr(choice.value) for choice in kind)
            raise ConfigError(f"{name} is one of {choices}, not {getattr(self, name)!r}") from None

    @property
    def flush_interval_s(self) -> float:
        return parse_duration(self.flush_interval)

    @property
    def sync_interval_s(self) -> float:
        return self.flush_interval_s if self.sync_interval is None else parse_duration(self.sync_interval)

    @property
    def batch_time_max_s(self) -> float:
        return parse_duration(self.batch_time_max)

    @property
    def flush_threshold(self) -> int:
        """`flush_size_threshold` as a number of `size_unit`."""
        return self._size("flush_size_threshold", self.flush_size_threshold)

    @property
    def pending_max(self) -> int:
        """`max_pending_size` as a number of `size_unit`."""
        if self.max_pending_size is None:
            return 2 * self.flush_threshold
        return self._size("max_pending_size", self.max_pending_size)

    def _size(self, name: str, value: SizeLike) -> int:
        if self.size_unit is SizeUnit.ITEMS and isinstance(value, str) and not value.strip().isdecimal():
            raise ConfigError(f"{name} counts items here: write a whole number, not {value!r}")
        return parse_size(value)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Setting], *, where: str = "coordinator") -> CoordinatorConfig:
        """The configuration in a mapping, such as a part of a YAML file. Raises `ConfigError`."""
        return build(cls, mapping, where=where)


def _whole(name: str, value: int, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ConfigError(f"{name} must be a whole number of at least {at_least}, not {value!r}")
