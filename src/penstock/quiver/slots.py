"""The slot table: which kind of payload each number stands for. It is on disk, so numbers never change."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from penstock.errors import InvalidInput
from penstock.quiver.model import Signal

__all__ = ["SLOTS", "SLOT_MAX", "event_columns", "flat_slot", "raw_slot", "signal_of", "slot_name"]

SLOT_MAX: Final = 63

SLOTS: Final[Mapping[int, str]] = MappingProxyType(
    {
        1: "resource_attrs",
        2: "scope_attrs",
        10: "metrics",
        11: "number_points",
        12: "summary_points",
        13: "histogram_points",
        14: "exp_histogram_points",
        15: "number_point_attrs",
        16: "summary_point_attrs",
        17: "histogram_point_attrs",
        18: "exp_histogram_point_attrs",
        19: "number_exemplars",
        20: "histogram_exemplars",
        21: "exp_histogram_exemplars",
        22: "number_exemplar_attrs",
        23: "histogram_exemplar_attrs",
        24: "exp_histogram_exemplar_attrs",
        25: "multivariate",
        26: "metric_attrs",
        30: "logs",
        31: "log_attrs",
        40: "spans",
        41: "span_attrs",
        42: "span_events",
        43: "span_links",
        44: "span_event_attrs",
        45: "span_link_attrs",
        50: "spans_flat",
        51: "logs_flat",
        52: "metrics_flat",
        60: "logs_otlp",
        61: "traces_otlp",
        62: "metrics_otlp",
        63: "other",
    }
)
"""Every slot that has a meaning; 63 is for batches that are no telemetry."""

_FLAT: Final = {Signal.TRACES: 50, Signal.LOGS: 51, Signal.METRICS: 52, Signal.OTHER: 63}
_RAW: Final = {Signal.LOGS: 60, Signal.TRACES: 61, Signal.METRICS: 62}
_SINGLES: Final = {
    50: Signal.TRACES,
    51: Signal.LOGS,
    52: Signal.METRICS,
    60: Signal.LOGS,
    61: Signal.TRACES,
    62: Signal.METRICS,
}
_SPAN_TIMES: Final = ("start_time",)
_TIMES: Final = ("time", "observed_time", "timestamp", "start_time")


def slot_name(slot: int) -> str:
    """What the slot is called. Raises `InvalidInput` for a number without a meaning."""
    name = SLOTS.get(slot)
    if name is None:
        raise InvalidInput(f"slot {slot} is not in the slot table; batches of your own go into slot 63")
    return name


def signal_of(slot: int) -> Signal:
    """The signal that a slot belongs to; `OTHER` for the slots that all signals share."""
    slot_name(slot)
    if 10 <= slot < 30:
        return Signal.METRICS
    if 30 <= slot < 40:
        return Signal.LOGS
    if 40 <= slot < 50:
        return Signal.TRACES
    return _SINGLES.get(slot, Signal.OTHER)


def flat_slot(signal: Signal) -> int:
    """The slot of the one wide table of a signal."""
    return _FLAT[signal]


def raw_slot(signal: Signal) -> int:
    """The slot of requests that are kept as they came. Raises `InvalidInput` for a signal without one."""
    slot = _RAW.get(signal)
    if slot is None:
        raise InvalidInput(
            f"signal {signal.value!r} has no raw form; raw requests are logs, traces or metrics"
        )
    return slot


def event_columns(slot: int) -> tuple[str, ...]:
    """The columns that may hold the event time of this slot's rows, best first."""
    return _SPAN_TIMES if slot in (40, 50) else _TIMES
