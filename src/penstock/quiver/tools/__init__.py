"""Offline tools: reading, checking and exporting a data directory without an engine."""

from __future__ import annotations

__all__ = []
