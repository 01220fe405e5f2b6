"""The write path: records are admitted, numbered, committed and published."""

from __future__ import annotations

__all__ = []
