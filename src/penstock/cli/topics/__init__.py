"""`penstock topics …`: run the event-log server, use one, and look after its data."""

from __future__ import annotations

__all__ = []
