"""Routers: copy the records of one topic into another, exactly once."""

from __future__ import annotations

__all__ = []
