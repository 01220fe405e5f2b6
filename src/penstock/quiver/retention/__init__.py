"""Deleting segments: what may go, and in which order."""

from __future__ import annotations

__all__ = []
