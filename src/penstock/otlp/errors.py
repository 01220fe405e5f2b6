"""What the quick ways of this room raise among themselves; no caller ever sees it."""

from __future__ import annotations

__all__ = ["Unflattenable"]


class Unflattenable(Exception):
    """Something that only the messages can tell: go through them, one by one."""
