"""`penstock run`: run a pipeline in the foreground, with a display, supervision and restarts."""

from __future__ import annotations

__all__ = []
