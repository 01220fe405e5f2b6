"""Records on their way into a block: an Arrow array to be encoded later, or a list encoded at once.

An array costs nothing to keep, so it is encoded piece by piece as the block is written. A list is worth a
look only once: its objects are scattered over memory, and reaching them costs more than copying them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from penstock.codec.block import Lengths, encode_records, record_lengths

__all__ = ["RecordChunk"]


@dataclass(frozen=True, slots=True)
class RecordChunk:
    """Some records, their lengths and, if that has been done, their encoded form instead of themselves."""

    values: pa.BinaryArray | None
    lengths: Lengths
    encoded: memoryview | None = None

    @classmethod
    def of_array(cls, values: pa.BinaryArray) -> RecordChunk:
        """A chunk of a `binary` array without nulls."""
        return cls(values, record_lengths(values))

    @classmethod
    def of_list(cls, records: Sequence[bytes]) -> RecordChunk:
        """A chunk of records that have been checked to be `bytes`."""
        values = pa.array(records, pa.binary())
        lengths = record_lengths(values)
        return cls(None, lengths, encode_records(values, lengths))

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def record_bytes(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))

    def pieces(self, piece_bytes: int) -> Iterator[RecordChunk]:
        """Slices of about `piece_bytes` each, at least one record long; nothing is copied."""
        values = self.values
        if values is None or self.record_bytes <= piece_bytes:
            yield self
            return
        ends = np.cumsum(self.lengths, dtype="<i8")
        marks = np.arange(piece_bytes, int(ends[-1]), piece_bytes)
        cuts = np.unique(np.searchsorted(ends, marks) + 1).tolist()
        start = 0
        for stop in (*(cut for cut in cuts if cut < len(ends)), len(ends)):
            yield RecordChunk(values[start:stop], self.lengths[start:stop])
            start = stop

    def encode(self) -> memoryview:
        """`(u32 length | data)*` for all records."""
        if self.encoded is not None:
            return self.encoded
        return encode_records(self.values, self.lengths)
