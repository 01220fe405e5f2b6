"""Handing bundles out to consumers under leases, and taking their answers."""

from __future__ import annotations

__all__ = []
