"""`penstock vector …`: a vector database."""

from __future__ import annotations

__all__ = []
