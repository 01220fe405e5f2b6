"""`penstock topics …`: run the event-log server, use it, and maintain its data."""

from __future__ import annotations

__all__ = []
