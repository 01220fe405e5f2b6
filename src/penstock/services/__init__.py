"""Processes that join engines: a topic relayed into a queue."""

from __future__ import annotations

from penstock.services.relay import Relay, RelayReport
from penstock.services.relay_config import RelayConfig
from penstock.services.relay_errors import RelayGap, RelayTaken, TopicChanged

__all__ = ["Relay", "RelayConfig", "RelayGap", "RelayReport", "RelayTaken", "TopicChanged"]
