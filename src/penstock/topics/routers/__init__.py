"""Routers: copy what is appended to one topic into another, exactly once."""

from __future__ import annotations

__all__ = []
