"""Segments: the batches that wait in memory, the files they become, and reading those."""

from __future__ import annotations

__all__ = []
