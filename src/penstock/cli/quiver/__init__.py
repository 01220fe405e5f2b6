"""`penstock quiver …`: look into a data directory of Quiver, and look after it."""

from __future__ import annotations

__all__ = []
