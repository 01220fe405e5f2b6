"""What `penstock up` gives the console: the books of pipelines, and commands as child processes."""

from __future__ import annotations

__all__ = []
