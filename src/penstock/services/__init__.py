"""Processes that join engines: a topic relayed into a queue, a database fed from one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.services.feeding import (
    AdoptQueue,
    FedDatabase,
    Feed,
    FeedConfig,
    FeedReport,
    RefusedRecord,
    SetAside,
)
from penstock.services.relay_config import RelayConfig
from penstock.services.relay_errors import RelayGap, RelayTaken, TopicChanged

if TYPE_CHECKING:
    from penstock.services.relay import Relay, RelayReport

__all__ = [
    "AdoptQueue",
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


def __getattr__(name: str) -> object:
    """A relay needs the client of topics, so it is imported by the first who asks for one."""
    if name in ("Relay", "RelayReport"):
        from penstock.services import relay

        return getattr(relay, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
