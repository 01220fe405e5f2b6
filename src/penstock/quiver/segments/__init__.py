"""Segments: batches that wait in memory, the files they are written to, and reading these files."""

from __future__ import annotations

__all__ = []
