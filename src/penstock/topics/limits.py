"""The hard limits of the `/v0` contract."""

from __future__ import annotations

from typing import Final

BATCH_RECORDS_MAX: Final = 10_000
"""Records in one write, which is atomic."""
RECORD_BYTES_MAX: Final = 1024**2
"""Bytes of compact JSON of `data` and `meta` together, inclusive."""
META_BYTES_MAX: Final = 16 * 1024
META_KEYS_MAX: Final = 64
TAG_BYTES_MAX: Final = 256
NODE_BYTES_MAX: Final = 128
KEY_BYTES_MAX: Final = 256
"""Bytes of an idempotency key."""
DIFF_LIMIT_DEFAULT: Final = 256
DIFF_LIMIT_MAX: Final = 1000
BATCH_BYTES_DEFAULT: Final = 1024**2
"""Accounted bytes of one response to a diff, by default."""
BATCH_BYTES_MAX: Final = 8 * 1024**2
WAIT_MS_MAX: Final = 30_000
PAGE_SIZE_DEFAULT: Final = 100
PAGE_SIZE_MAX: Final = 1000
ROUTER_HOPS_MAX: Final = 8
"""Routers that a copy may pass. It is not copied further, which ends a cycle."""
ROUTER_PASS_RECORDS_MAX: Final = 256
"""Records that a router copies in one pass, and so the sequence numbers that one of its frames assigns."""
WATCH_TOPICS_MAX: Final = 256
"""Topics of one watch session, and of one WebSocket."""
WATCH_BATCH_BYTES_DEFAULT: Final = 256 * 1024
SEQ_MAX: Final = 2**64 - 1
CLAIM_MAX: Final = 1000
"""Jobs in one claim, and on one work stream."""
SEQS_MAX: Final = 1000
"""Jobs that one call acks, nacks or extends."""
LEASE_MS_MIN: Final = 100
LEASE_MS_MAX: Final = 86_400_000
NACK_DELAY_MS_MAX: Final = 86_400_000
