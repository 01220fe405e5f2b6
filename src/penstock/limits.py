"""Global limits, each with its reason.

A value from a caller above its limit is `Rejected`; stored bytes above their limit are `Corrupt`.
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
"""A decompressed batch must fit in memory. Also limits one produce call and stops zstd bombs."""

BATCH_RECORDS_MAX: Final = 2**32 - 1
"""A batch's record count is stored in four bytes."""

METADATA_BYTES_MAX: Final = 2**32 - 1
"""A metadata payload's length is stored in four bytes."""

MANIFEST_BYTES_MAX: Final = 1024**3
"""Every append rewrites the whole manifest. A manifest this large means that no consumer is running."""

LOCATION_BYTES_MAX: Final = 65535
"""A location's length is stored in two bytes."""

KEY_BYTES_MAX: Final = 1024
"""The longest object key that S3, Azure and GCS all accept."""

JSON_DEPTH_MAX: Final = 128
"""Nesting levels of an incoming JSON document. Python's decoders fail near 970 levels, Spark's at 1,000, and
both count the levels around a value."""

JSON_STORED_DEPTH_MAX: Final = JSON_DEPTH_MAX + 8
"""Nesting levels of a stored record, including added envelopes: origins and dead letters."""

JSON_NUMBER_DIGITS_MAX: Final = 1000
"""Digits of one number. Spark's JSON reader accepts 1,000; Python converts at most 4,300 to an integer."""
