"""The `/v0` API over an event-log engine."""

from __future__ import annotations

from penstock.servers.topics.routes import TopicsApi, topics_app

__all__ = ["TopicsApi", "topics_app"]
