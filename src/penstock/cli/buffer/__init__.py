"""`penstock buffer …`: commands for a queue in object storage."""

from __future__ import annotations

__all__ = []
