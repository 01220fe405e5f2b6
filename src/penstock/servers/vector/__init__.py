"""A vector collection over HTTP: upserts, deletions and searches in JSON."""

from __future__ import annotations

from penstock.servers.vector.routes import serve_vector as serve
from penstock.servers.vector.settings import VectorSettings

__all__ = ["VectorSettings", "serve"]
