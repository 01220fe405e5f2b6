"""One topic: its index, watermarks, ages and write keys; and the catalog of all topics."""

from __future__ import annotations

__all__ = []
