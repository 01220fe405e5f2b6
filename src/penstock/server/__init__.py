"""The HTTP edge: `penstock.http` is any server's transport, `penstock.server.topics` the `/v0` API."""

from __future__ import annotations

__all__ = []
