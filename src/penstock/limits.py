"""Every cap in one place, with its reason.

A value that a caller gives above its cap is `Rejected`; stored bytes above theirs are `Corrupt`.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "BATCH_BYTES_MAX",
    "BATCH_RECORDS_MAX",
    "JSON_DEPTH_MAX",
    "JSON_NUMBER_DIGITS_MAX",
    "JSON_STORED_DEPTH_MAX",
    "KEY_BYTES_MAX",
    "LOCATION_BYTES_MAX",
    "MANIFEST_BYTES_MAX",
    "METADATA_BYTES_MAX",
    "RECORD_BYTES_MAX",
]

RECORD_BYTES_MAX: Final = 2**32 - 1
"""A record's length is stored in four bytes."""

BATCH_BYTES_MAX: Final = 1024**3
"""A decompressed batch must fit in memory, so this also bounds one produce call and defuses zstd bombs."""

BATCH_RECORDS_MAX: Final = 2**32 - 1
"""A batch's record count is stored in four bytes."""

METADATA_BYTES_MAX: Final = 2**32 - 1
"""A metadata payload's length is stored in four bytes."""

MANIFEST_BYTES_MAX: Final = 1024**3
"""Every append rewrites the manifest whole; one this large means that nobody consumes."""

LOCATION_BYTES_MAX: Final = 65535
"""A location's length is stored in two bytes."""

KEY_BYTES_MAX: Final = 1024
"""The longest object key that S3, Azure and GCS all accept."""

JSON_DEPTH_MAX: Final = 128
"""Levels of a JSON document that enters. Python's decoders end near 970 levels, Spark's at 1,000, and both
count what is around a value."""

JSON_STORED_DEPTH_MAX: Final = JSON_DEPTH_MAX + 8
"""Levels of a stored record with what stages put around its values: envelopes, origins, dead letters."""

JSON_NUMBER_DIGITS_MAX: Final = 1000
"""Digits of one number. Spark's JSON reader takes 1,000, Python turns up to 4,300 into an integer."""
