"""The sources: queues, topics and segments of Quiver as rows, read once or as a stream.

Each format has its options, its offsets (plain arithmetic over places), a source with its stream, and a
reader that runs in tasks.
"""

from __future__ import annotations

__all__ = []
