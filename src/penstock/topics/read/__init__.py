"""Reads of a topic: pages, their rendering, and live subscriptions."""

from __future__ import annotations

__all__ = []
