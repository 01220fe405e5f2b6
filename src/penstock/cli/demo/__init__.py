"""`penstock demo`: producers, a pipeline, kills, and totals that must balance."""

from __future__ import annotations

__all__ = []
