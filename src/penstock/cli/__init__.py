"""The `penstock` command: a module per group, imported only when a verb of it is used."""

from __future__ import annotations

__all__ = []
