"""The `penstock` command. Each group has a module, imported only when one of its commands is used."""

from __future__ import annotations

__all__ = []
