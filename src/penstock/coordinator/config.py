"""Settings of a coordinator. An invalid value raises `ConfigError` when the object is created."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from penstock.config import Setting, build, check_whole_numbers
from penstock.errors import ConfigError
from penstock.units import DurationLike, SizeLike, convert_units, seconds_of, size_of


class SyncMode(StrEnum):
    """When flushed data is synced. `close` and `flush(durable=True)` always sync."""

    EXPLICIT = "explicit"
    """Only on `close` and `flush(durable=True)`."""
    EVERY_FLUSH = "every_flush"
    """After every flush. DURABLE then follows FLUSHED, at the cost of one sync per flush."""
    INTERVAL = "interval"
    """Every `sync_interval`, if anything was flushed since the last sync."""


class SizeUnit(StrEnum):
    """The unit of `Delta.estimate_size` and of the two sizes in the configuration."""

    BYTES = "bytes"
    ITEMS = "items"


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    """Settings for flushing deltas, limiting pending data and making flushed data durable."""

    queue_capacity: int = 10_000
    """Number of writes that may wait in a channel that sets no capacity. When it is reached, `write` waits
    and `try_write` raises."""
    flush_interval: DurationLike = "10s"
    """Time between flushes. It bounds the staleness of readers when few writes arrive.

    With 0, a flush starts as soon as the previous one is stored, and synced if `sync_mode` requires it.
    Writers then wait only for the storage, and each flush takes all writes that arrived in the meantime.
    """
    flush_size_threshold: SizeLike = "64MiB"
    """Size at which a delta is flushed early, to bound one batch of the storage."""
    max_pending_size: SizeLike | None = None
    """Limit on the size of unflushed deltas plus queued writes of known size. Above it, writes wait.
    Defaults to twice the threshold."""
    size_unit: SizeUnit = SizeUnit.BYTES
    max_frozen_deltas: int = 2
    """Number of deltas that may wait for the current flush before the coordinator stops applying writes."""
    batch_writes_max: int = 256
    """Maximum number of writes applied before the event loop runs other tasks."""
    batch_time_max: DurationLike = "1ms"
    """Target time for applying one batch. After a slower batch, the next ones are smaller."""
    sync_mode: SyncMode = SyncMode.EXPLICIT
    sync_interval: DurationLike | None = None
    """With `sync_mode` interval: the longest time that flushed data stays unsynced. Defaults to the flush
    interval."""
    subscription_capacity: int = 16
    """Number of events a subscriber may lag before it must rebuild from a snapshot."""

    flush_interval_s = seconds_of("flush_interval")
    batch_time_max_s = seconds_of("batch_time_max")
    _sync_interval_s = seconds_of("sync_interval", optional=True)
    flush_threshold = size_of("flush_size_threshold")
    """`flush_size_threshold` as a number of `size_unit`."""
    _pending_max = size_of("max_pending_size", optional=True)

    def __post_init__(self) -> None:
        for name in ("sync_mode", "size_unit"):
            self._check_choice(name)
        for name in ("flush_size_threshold", "max_pending_size"):
            self._check_unit(name)
        convert_units(self)
        check_whole_numbers(self, 1, "queue_capacity", "batch_writes_max", "subscription_capacity")
        check_whole_numbers(self, 0, "max_frozen_deltas")
        if self.sync_interval_s <= 0 and (
            self.sync_interval is not None or self.sync_mode is SyncMode.INTERVAL
        ):
            raise ConfigError("sync_interval must be above 0; without one it is the flush_interval")
        if not 0 < self.flush_threshold <= self.pending_max:
            raise ConfigError(
                f"flush_size_threshold ({self.flush_threshold}) must be above 0 and at most max_pending_size"
                f" ({self.pending_max}), or writes would wait indefinitely"
            )

    def _check_choice(self, name: str) -> None:
        kind = SyncMode if name == "sync_mode" else SizeUnit
        try:
            object.__setattr__(self, name, kind(getattr(self, name)))
        except ValueError:
            choices = ", ".join(repr(choice.value) for choice in kind)
            raise ConfigError(f"{name} is one of {choices}, not {getattr(self, name)!r}") from None

    def _check_unit(self, name: str) -> None:
        value = getattr(self, name)
        if self.size_unit is SizeUnit.ITEMS and isinstance(value, str) and not value.strip().isdecimal():
            raise ConfigError(f"{name} counts items here: write a whole number, not {value!r}")

    @property
    def sync_interval_s(self) -> float:
        return self.flush_interval_s if self._sync_interval_s is None else self._sync_interval_s

    @property
    def pending_max(self) -> int:
        """`max_pending_size` as a number of `size_unit`."""
        return 2 * self.flush_threshold if self._pending_max is None else self._pending_max

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Setting], *, where: str = "coordinator") -> CoordinatorConfig:
        """Build the configuration from a mapping, such as a section of a YAML file. Raises `ConfigError`."""
        return build(cls, mapping, where=where)
