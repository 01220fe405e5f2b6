"""What a stream could not read, told as a row of its own.

A hole is a range of sequences that has left the queue, or a batch object that is missing or damaged. With
`onGap=record` each becomes one row instead of an error, and so goes the same way into a table as the records:

| column | |
|---|---|
| `sequence` | the first sequence of the hole |
| `index` | -1, which no record has |
| `metadata` | JSON: `{"gap": {"first": 2, "last": 3, "reason": "..."}}` |
| `location` | the batch object, or null for a range |
| `value`, `ingestion_time` | null |

A checkpoint that belongs to another queue is no hole, and always an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from penstock.spark.sources.offsets import Bounds

GAP_COLUMNS: Final = ("sequence", "index", "metadata")
"""Without these a row could not be told from a record."""
GAP_INDEX: Final = -1

_LEFT: Final = "the queue no longer held these sequences: somebody else has acknowledged them"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hole:
    """Sequences `first` to `last` of a shard could not be read."""

    shard: int
    first: int
    last: int
    reason: str
    location: str | None = None


def left_range(shard: int, start: int, end: int, held: Bounds) -> Hole | None:
    """The part of `start` to `end - 1` that has left the queue, if there is one.

    A micro-batch that is run again finds the same hole, unless somebody else has acknowledged more in
    between: then it is wider than the first time. Sinks that have the first run skip the second by its
    version; the others tell the wider hole, which is what they did not get.
    """
    edge = min(held.first, end)
    return Hole(shard=shard, first=start, last=edge - 1, reason=_LEFT) if start < edge else None


def hole_metadata(hole: Hole) -> bytes:
    """The hole in UTF-8 JSON."""
    gap: Mapping[str, object] = {"first": hole.first, "last": hole.last, "reason": hole.reason}
    return json.dumps({"gap": gap}, ensure_ascii=False).encode()
