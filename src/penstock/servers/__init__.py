"""The HTTP edge: `penstock.http` is any server's transport, `penstock.servers.topics` the `/v0` API."""

from __future__ import annotations

__all__ = []
