"""Consumer offsets: the state, its log and its checkpoints."""

from __future__ import annotations

__all__ = []
