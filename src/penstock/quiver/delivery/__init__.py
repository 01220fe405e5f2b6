"""Delivery of bundles to consumers under leases."""

from __future__ import annotations

__all__ = []
