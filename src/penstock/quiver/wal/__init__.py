"""The write-ahead log: its entries, its files and the cursor, and what a start reads back."""

from __future__ import annotations

__all__ = []
