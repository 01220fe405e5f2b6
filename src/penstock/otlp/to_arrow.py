"""From the bytes of a request to a batch of rows.

The parser of the messages has the verdict on what is a request; it is so quick that asking it costs little.
The rows then come through native columns where ptars is installed, and from the messages where it is not,
where only they can tell, or where there are so few that setting up the columns costs more than walking them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from penstock.otlp.columns import Unflattenable
from penstock.otlp.messages import available, items_in, parse
from penstock.otlp.proto_to_arrow import flatten
from penstock.otlp.proto_to_arrow_py import walk
from penstock.otlp.schema import Signal

__all__ = ["Decoded", "decode"]

_FEW: Final = {Signal.TRACES: 20, Signal.LOGS: 20, Signal.METRICS: 150}
"""Up to so many items walking the messages is quicker; points have the most columns to set up."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """The rows of one request."""

    batch: pa.RecordBatch
    items: int
    """How many items were kept: the rows of the batch."""
    rejected: int
    """How many items were refused, because an id has a wrong length."""
    message: str
    """What to tell the sender about them; empty when none was."""


def decode(data: bytes, signal: Signal) -> Decoded:
    """The rows of a request, and how many of its items were refused.

    Raises `InvalidInput` for bytes that are no request, and `LimitExceeded` for one with more than
    `ITEMS_MAX` items, or whose rows would repeat more of their resources than a bundle may hold.
    """
    request = parse(data, signal)
    items = items_in(request, signal)
    if items > _FEW[signal] and available():
        try:
            batch = flatten(data, signal)
        except Unflattenable:
            pass
        else:
            if batch.num_rows == items:
                return Decoded(batch, batch.num_rows, 0, "")
    walked = walk(request, signal)
    return Decoded(walked.batch, walked.batch.num_rows, walked.refusals.count, walked.refusals.message)
