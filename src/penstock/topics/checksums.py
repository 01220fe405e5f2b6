"""XXH3-64 of many pieces at once."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_digest

__all__ = ["checksums", "checksums_between"]


def checksums(pieces: Iterable[bytes]) -> npt.NDArray[np.uint64]:
    """The checksum of each piece, as one array."""
    # The digests as bytes: an array made of Python integers this large costs as much as the hashing.
    return np.frombuffer(b"".join(map(xxh3_64_digest, pieces)), ">u8").astype("<u8")


def checksums_between(
    buffer: bytes, starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint64]:
    """The checksum of each part of a buffer. No part is kept, so all are copied to the same few bytes."""
    spans = zip(starts.tolist(), ends.tolist(), strict=True)
    return np.frombuffer(b"".join([xxh3_64_digest(buffer[start:end]) for start, end in spans]), ">u8")
