"""A client of the `/v0` contract: it retries safely, reports every gap, and raises typed errors.

`Client` is for an event loop. `penstock.topics.client.sync` has the blocking variant.
"""

from __future__ import annotations

from penstock.topics.client.client import DEFAULT_URL, Client
from penstock.topics.client.errors import (
    Forbidden,
    PayloadTooLarge,
    RequestRefused,
    ServerFailed,
    Unanswered,
    Unauthorized,
    UnexpectedAnswer,
    Unreachable,
)
from penstock.topics.client.models import Health, Readiness, TopicSummary
from penstock.topics.client.queues import JobRef
from penstock.topics.client.routers import RouterSummary
from penstock.topics.client.watch import WatchEvent

__all__ = [
    "DEFAULT_URL",
    "Client",
    "Forbidden",
    "Health",
    "JobRef",
    "PayloadTooLarge",
    "Readiness",
    "RequestRefused",
    "RouterSummary",
    "ServerFailed",
    "TopicSummary",
    "Unanswered",
    "Unauthorized",
    "UnexpectedAnswer",
    "Unreachable",
    "WatchEvent",
]
