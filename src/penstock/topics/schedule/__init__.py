"""Scheduling: which topic is served next, and what the server does under overload."""

from __future__ import annotations

__all__ = []
