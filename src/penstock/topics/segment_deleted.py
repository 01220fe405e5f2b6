"""Which records of a segment were deleted after it was written: one bit each, in a file of its own.

The file is replaced as a whole, so it is old or new. It only ever gains bits: a deleted record stays deleted.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.storage import Buffer
from penstock.topics.segment_sidecar import close_sidecar, open_sidecar, sidecar_damaged

__all__ = ["DeletedRows", "decode_deleted", "encode_deleted"]

DeletedRows: TypeAlias = npt.NDArray[np.bool_]
"""One item per record of the segment, true if it was deleted."""

_MAGIC: Final = b"PTD1"


def encode_deleted(first_seq: int, deleted: DeletedRows) -> bytes:
    """The `.del` file for a segment's records."""
    return close_sidecar(_MAGIC, first_seq, len(deleted), np.packbits(deleted, bitorder="little").tobytes())


def decode_deleted(raw: Buffer, first_seq: int, count: int) -> DeletedRows:
    """The bits of the first `count` records, false for those the file does not know. Raises `Damaged`."""
    known, body = open_sidecar(raw, _MAGIC, first_seq)
    if len(body) != (known + 7) // 8:
        raise sidecar_damaged(first_seq, f"{len(body)} bytes cannot speak for {known} records")
    deleted = np.zeros(count, np.bool_)
    bits = np.unpackbits(np.frombuffer(body, np.uint8), count=known, bitorder="little")[:count]
    deleted[: len(bits)] = bits
    return deleted
