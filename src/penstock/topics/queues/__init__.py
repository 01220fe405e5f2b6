"""Queues: leases on the jobs of a topic, claims, acknowledgements and dead letters."""

from __future__ import annotations

__all__ = []
