"""The merge operator of a collection: what kind of value a key holds decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

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
_DAMAGED: Final = b"\xff" * 8
"""More entries, a longer set and more parts of a set than any value has: no reader takes it for one."""


def merge_records(key: bytes, operands: Sequence[bytes]) -> bytes:
    """Associative for every type that is merged.

    Operands that are damaged, or that nothing should have merged, are kept as they are behind a mark, so that
    whoever reads them is told `Corrupt`.
    """
    try:
        return _MERGES[record_type(key)](operands)
    except (Corrupt, KeyError):
        return _DAMAGED + b"".join(operand.removeprefix(_DAMAGED) for operand in operands)
