"""Posting lists in storage: the vectors that belong to one centroid, as they are compared.

u32 count, count x (id u64 big-endian, u32), then float32 data; little-endian but for the ids, and sorted by
id. The u32 is the number of the vector's row in the data, or FFFFFFFF for an id that is not in the list any
more. A merge takes the newer entry of each id.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.errors import Corrupt
from penstock.vector.model import Floats

__all__ = ["Ids", "Posting", "decode_posting", "encode_posting", "merge_postings"]

Ids = npt.NDArray[np.uint64]

_COUNT: Final = struct.Struct("<I")
_ENTRY: Final = np.dtype([("id", ">u8"), ("row", "<u4")])
_REMOVED: Final = 0xFFFFFFFF
_FLOAT: Final = np.dtype("<f4")


class Posting(NamedTuple):
    """What a list holds, or what a merge changes about it."""

    ids: Ids
    rows: Floats
    removed: Ids


def encode_posting(ids: Ids, rows: Floats, removed: Ids | None = None) -> bytes:
    """Entries for `ids`, whose vectors are `rows`, and for ids that left the list."""
    gone = np.empty(0, np.uint64) if removed is None else removed
    entries = np.empty(len(ids) + len(gone), _ENTRY)
    entries["id"] = np.concatenate((ids, gone))
    entries["row"] = _REMOVED
    entries["row"][: len(ids)] = np.arange(len(ids), dtype=np.uint32)
    entries = entries[np.argsort(entries["id"], kind="stable")]
    return b"".join((_COUNT.pack(len(entries)), entries.tobytes(), rows.astype(_FLOAT).tobytes()))


def decode_posting(value: bytes, dimensions: int) -> Posting:
    """Raises `Corrupt` if the bytes break the format."""
    entries, data = _split(value)
    if len(data) % (dimensions * _FLOAT.itemsize):
        raise Corrupt(f"the data of a posting list is not in rows of {dimensions}")
    table = np.frombuffer(data, _FLOAT).reshape(-1, dimensions)
    there = entries["row"] != _REMOVED
    rows = entries["row"][there]
    if len(rows) and int(rows.max()) >= len(table):
        raise Corrupt("an entry of a posting list points behind its data")
    return Posting(
        ids=entries["id"][there].astype(np.uint64),
        rows=np.ascontiguousarray(table[rows], dtype=np.float32),
        removed=entries["id"][~there].astype(np.uint64),
    )


def merge_postings(operands: Sequence[bytes]) -> bytes:
    """The newer entry of each id. How wide a row is follows from the data.

    Raises `Corrupt` if an operand breaks the format, or has rows of another width than the others.
    """
    split = [_split(operand) for operand in operands]
    counts = [int((entries["row"] != _REMOVED).sum()) for entries, _ in split]
    width = next((len(data) // count for (_, data), count in zip(split, counts, strict=True) if count), 0)
    for (part, data), count in zip(split, counts, strict=True):
        rows = part["row"][part["row"] != _REMOVED]
        if len(data) != count * width or (count and (not width or int(rows.max()) >= count)):
            raise Corrupt("the entries of a posting list do not fit its data")
    # Without the type, joining would turn big-endian ids into native ones.
    entries = np.concatenate([entries for entries, _ in split], dtype=_ENTRY)
    starts = np.cumsum([0, *counts])[:-1]
    shift = np.repeat(starts, [len(part) for part, _ in split]).astype(np.uint32)
    there = entries["row"] != _REMOVED
    entries["row"][there] += shift[there]
    # The newest comes first among equal ids, and the first is what `unique` keeps.
    newest = entries[::-1]
    newest = newest[np.unique(newest["id"], return_index=True)[1]]
    kept = newest["row"] != _REMOVED
    rows = newest["row"][kept]
    newest["row"][kept] = np.arange(len(rows), dtype=np.uint32)
    table = np.frombuffer(b"".join(data for _, data in split), np.uint8).reshape(-1, width or 1)
    return b"".join((_COUNT.pack(len(newest)), newest.tobytes(), table[rows].tobytes()))


def _split(value: bytes) -> tuple[npt.NDArray[np.void], bytes]:
    """The entries, and the data behind them. Raises `Corrupt`."""
    if len(value) < _COUNT.size:
        raise Corrupt("a posting list is cut")
    (count,) = _COUNT.unpack_from(value)
    end = _COUNT.size + count * _ENTRY.itemsize
    if end > len(value):
        raise Corrupt(f"a posting list of {count} entries is cut")
    entries = np.frombuffer(value, _ENTRY, count, _COUNT.size).copy()
    ids = entries["id"]
    if count > 1 and not bool((ids[1:] > ids[:-1]).all()):
        raise Corrupt("the entries of a posting list are not sorted by id")
    return entries, value[end:]
