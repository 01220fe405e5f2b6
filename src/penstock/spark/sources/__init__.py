"""The sources: queues, topics and segments of Quiver as rows, for batch queries and streams.

Each format has options, offsets (plain arithmetic over positions), a source with a stream reader, and a
reader that runs in tasks.
"""

from __future__ import annotations

__all__ = []
