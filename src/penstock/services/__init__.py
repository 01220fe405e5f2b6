"""Processes that join engines: a topic relayed into a queue, a database fed from one."""

from __future__ import annotations

from penstock.services.feeding import FedDatabase, Feed, FeedConfig, FeedReport, RefusedRecord, SetAside
from penstock.services.relay import Relay, RelayReport
from penstock.services.relay_config import RelayConfig
from penstock.services.relay_errors import RelayGap, RelayTaken, TopicChanged

__all__ = [
    "FedDatabase",
    "Feed",
    "FeedConfig",
    "FeedReport",
    "RefusedRecord",
    "Relay",
    "RelayConfig",
    "RelayGap",
    "RelayReport",
    "RelayTaken",
    "SetAside",
    "TopicChanged",
]
