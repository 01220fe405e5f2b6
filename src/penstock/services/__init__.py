"""Processes that join engines: a topic relayed into a queue, a database fed from one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy import lazy_exports

if TYPE_CHECKING:
    from penstock.services.feeding import (
        AdoptQueue,
        FedDatabase,
        Feed,
        FeedConfig,
        FeedReport,
        RefusedRecord,
        SetAside,
    )
    from penstock.services.relay import Relay, RelayReport
    from penstock.services.relay_config import GAPS, VALUES, OnGap, RelayConfig, Start, Value
    from penstock.services.relay_errors import RelayGap, RelayTaken, TopicChanged
    from penstock.services.timeseries_feed import FedTimeSeries
    from penstock.services.vector_feed import FedVectors

__all__ = [
    "GAPS",
    "VALUES",
    "AdoptQueue",
    "FedDatabase",
    "FedTimeSeries",
    "FedVectors",
    "Feed",
    "FeedConfig",
    "FeedReport",
    "OnGap",
    "RefusedRecord",
    "Relay",
    "RelayConfig",
    "RelayGap",
    "RelayReport",
    "RelayTaken",
    "SetAside",
    "Start",
    "TopicChanged",
    "Value",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "feeding": "AdoptQueue FedDatabase Feed FeedConfig FeedReport RefusedRecord SetAside",
            "relay": "Relay RelayReport",
            "relay_config": "GAPS VALUES OnGap RelayConfig Start Value",
            "relay_errors": "RelayGap RelayTaken TopicChanged",
            "timeseries_feed": "FedTimeSeries",
            "vector_feed": "FedVectors",
        },
    )
