"""`penstock run`: a pipeline in the foreground, shown, supervised and started again."""

from __future__ import annotations

__all__ = []
