"""`penstock demo`: producers, a pipeline, kills, and the books that must balance."""

from __future__ import annotations

__all__ = []
