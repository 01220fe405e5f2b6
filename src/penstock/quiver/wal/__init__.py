"""The write-ahead log: its entries, files and cursor, and reading it back at startup."""

from __future__ import annotations

__all__ = []
