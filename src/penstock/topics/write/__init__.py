"""The write path, which checks, numbers, commits and publishes records."""

from __future__ import annotations

__all__ = []
