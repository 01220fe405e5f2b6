"""The hard limits of the `/v0` contract."""

from __future__ import annotations

from typing import Final

__all__ = [
    "BATCH_BYTES_DEFAULT",
    "BATCH_BYTES_MAX",
    "BATCH_RECORDS_MAX",
    "DIFF_LIMIT_DEFAULT",
    "DIFF_LIMIT_MAX",
    "KEY_BYTES_MAX",
    "META_BYTES_MAX",
    "META_KEYS_MAX",
    "NODE_BYTES_MAX",
    "PAGE_SIZE_DEFAULT",
    "PAGE_SIZE_MAX",
    "RECORD_BYTES_MAX",
    "SEQ_MAX",
    "TAG_BYTES_MAX",
    "WAIT_MS_MAX",
]

BATCH_RECORDS_MAX: Final = 10_000
"""Records in one write: they are committed together or not at all."""
RECORD_BYTES_MAX: Final = 1024**2
"""Compact JSON of `data` and `meta` together; exactly this many are allowed."""
META_BYTES_MAX: Final = 16 * 1024
META_KEYS_MAX: Final = 64
TAG_BYTES_MAX: Final = 256
NODE_BYTES_MAX: Final = 128
KEY_BYTES_MAX: Final = 256
"""An idempotency key."""
DIFF_LIMIT_DEFAULT: Final = 256
DIFF_LIMIT_MAX: Final = 1000
BATCH_BYTES_DEFAULT: Final = 1024**2
"""Accounted bytes of one answer to a diff, unless the caller says otherwise."""
BATCH_BYTES_MAX: Final = 8 * 1024**2
WAIT_MS_MAX: Final = 30_000
PAGE_SIZE_DEFAULT: Final = 100
PAGE_SIZE_MAX: Final = 1000
SEQ_MAX: Final = 2**64 - 1
