"""The `penstock` command: one file per verb, heavy modules imported only by the verb that needs them."""

from __future__ import annotations

__all__ = []
