"""The hard limits of the `/v0` contract."""

from __future__ import annotations

from typing import Final

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
ROUTER_HOPS_MAX: Final = 8
"""A copy that went through so many routers is not copied again: a cycle ends here."""
ROUTER_PASS_RECORDS_MAX: Final = 256
"""How many records a router copies in one pass, and so how many numbers one of its frames gives out."""
WATCH_TOPICS_MAX: Final = 256
"""Topics of one watch session, and of one WebSocket."""
WATCH_BATCH_BYTES_DEFAULT: Final = 256 * 1024
SEQ_MAX: Final = 2**64 - 1
CLAIM_MAX: Final = 1000
"""Jobs in one claim, and on one work stream."""
SEQS_MAX: Final = 1000
"""Jobs that one call acknowledges, gives back or extends."""
LEASE_MS_MIN: Final = 100
LEASE_MS_MAX: Final = 86_400_000
NACK_DELAY_MS_MAX: Final = 86_400_000
