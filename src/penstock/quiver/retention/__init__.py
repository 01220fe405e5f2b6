"""Deleting segments: which may be deleted, and in which order."""

from __future__ import annotations

__all__ = []
