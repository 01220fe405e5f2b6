"""Reading and checking a directory without running it, and copies of it elsewhere."""

from __future__ import annotations

__all__ = []
