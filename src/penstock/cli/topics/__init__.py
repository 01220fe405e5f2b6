"""`penstock topics …`: run the event-log server, and use one."""

from __future__ import annotations

__all__ = []
