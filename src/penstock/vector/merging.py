"""The merge operator of a collection: what kind of value a key holds decides."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import Corrupt
from penstock.vector.keys import RecordType, record_type
from penstock.vector.postings import merge_postings
from penstock.vector.values import merge_ids, merge_metadata

__all__ = ["merge_records"]

_MERGES = {
    RecordType.POSTING: merge_postings,
    RecordType.METADATA: merge_metadata,
    RecordType.DELETIONS: merge_ids,
}


def merge_records(key: bytes, operands: Sequence[bytes]) -> bytes:
    """Associative for every type that is merged. Raises `Corrupt` if an operand breaks its format."""
    kind = record_type(key)
    if kind not in _MERGES:
        raise Corrupt(f"{key[:32].hex()} holds a value that is not merged")
    return _MERGES[kind](operands)
