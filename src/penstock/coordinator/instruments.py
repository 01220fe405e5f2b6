"""Every metric of a coordinator, by its public name."""

from __future__ import annotations

from typing import Final

from penstock.coordinator.watermarks import Durability
from penstock.metrics import DEFAULT_REGISTRY, SECONDS_BUCKETS, Registry

__all__ = ["Instruments"]

_FINE: Final = (0.00001, 0.0001, *SECONDS_BUCKETS)
"""From an admission without a wait to a flush that has gone badly wrong."""


class Instruments:
    """The metrics in one registry, below `product.` if the coordinator is part of a product."""

    def __init__(self, registry: Registry | None = None, product: str = "") -> None:
        self.registry = r = registry or DEFAULT_REGISTRY
        prefix = f"{product}.write_coordinator" if product else "write_coordinator"
        self.send_duration = r.histogram(
            f"{prefix}.send_duration_seconds",
            "Until a call was taken or refused.",
            ("command", "status"),
            _FINE,
        )
        self.backpressure = r.counter(
            f"{prefix}.queue_backpressure_total", "Calls that met no room.", ("command", "reason")
        )
        self.queue_depth = r.gauge(f"{prefix}.queue_depth", "Writes that wait to be applied.", ("channel",))
        self.apply_duration = r.histogram(
            f"{prefix}.delta_apply_duration_seconds", "Applying one batch of writes.", (), _FINE
        ).labels()
        self.estimated_bytes = r.gauge(
            f"{prefix}.delta_estimated_bytes", "Size of the current delta, in the unit of its threshold."
        ).labels()
        marks = r.gauge(f"{prefix}.watermark", "The last epoch that has reached a level.", ("level",))
        self.marks = {level: marks.labels(level=level.name.lower()) for level in Durability}
        self.freeze_duration = r.histogram(
            f"{prefix}.delta_freeze_duration_seconds", "Freezing a delta and starting the next.", (), _FINE
        ).labels()
        self.event_send_duration = r.histogram(
            f"{prefix}.flush_event_send_duration_seconds", "Until a frozen delta's flush began.", (), _FINE
        ).labels()
        self.event_queue_depth = r.gauge(
            f"{prefix}.flush_event_queue_depth", "Frozen deltas that wait for their flush."
        ).labels()
        self.flushes = r.counter(f"{prefix}.flush_total", "Deltas frozen for a flush.", ("reason",))
        self.flush_duration = r.histogram(
            f"{prefix}.flush_delta_duration_seconds", "Storing one delta.", (), _FINE
        ).labels()
        self.sync_duration = r.histogram(
            f"{prefix}.flush_storage_duration_seconds", "Persisting what was stored.", (), _FINE
        ).labels()
