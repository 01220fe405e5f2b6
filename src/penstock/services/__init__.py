"""Services that connect engines: relaying a topic into a queue, and feeding a database from a queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy import lazy_exports

if TYPE_CHECKING:
    from penstock.services.feed import (
        AdoptQueue,
        FedDatabase,
        Feed,
        FeedConfig,
        FeedReport,
        RefusedRecord,
        SetAside,
        read_dead_letters,
    )
    from penstock.services.relay import Relay, RelayReport
    from penstock.services.relay_batch import (
        GAPS,
        VALUES,
        OnGap,
        RelayConfig,
        RelayGap,
        RelayRun,
        RelayTaken,
        Start,
        TopicChanged,
        Value,
        decode_run,
    )
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
    "RelayRun",
    "RelayTaken",
    "SetAside",
    "Start",
    "TopicChanged",
    "Value",
    "decode_run",
    "read_dead_letters",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "feed": (
                "AdoptQueue FedDatabase Feed FeedConfig FeedReport RefusedRecord SetAside read_dead_letters"
            ),
            "relay": "Relay RelayReport",
            "relay_batch": (
                "GAPS VALUES OnGap RelayConfig RelayGap RelayRun RelayTaken Start TopicChanged Value "
                "decode_run"
            ),
            "timeseries_feed": "FedTimeSeries",
            "vector_feed": "FedVectors",
        },
    )
