"""The ends of the way: OTLP to another place, files, a queue in object storage, and some for trials."""

from __future__ import annotations

__all__ = []
