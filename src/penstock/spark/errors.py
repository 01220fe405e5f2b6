"""Errors of pipelines, their SQL and their tables. Each message says what is wrong and what to do.

PenstockError
  ConfigError
    TransformError    the SQL of a pipeline is not valid
    SchemaMismatch    the rows do not fit a table
  Rejected
    VersionBehind     the table has a later micro-batch
    InvalidInput
      BadRecord       a record does not decode
  LimitExceeded
    SumTooLarge       a total does not fit its column
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import ConfigError, InvalidInput, LimitExceeded, Rejected


class BadRecord(InvalidInput):
    """A record does not decode, and the pipeline is configured to stop at it."""


class TransformError(ConfigError):
    """The SQL of a pipeline is not valid for the columns it reads."""


class SchemaMismatch(ConfigError):
    """The rows do not fit the table. The message names the column and the remedy."""


class SumTooLarge(LimitExceeded):
    """A total does not fit the type of its column. The table is unchanged."""


class VersionBehind(Rejected):
    """The table already has a later micro-batch of this query than the one being committed."""


def version_behind(where: str, app: str, version: int, last: int) -> VersionBehind:
    """Return the error for a micro-batch older than the last one that the query committed to the table."""
    return VersionBehind(
        f"{where} already has micro-batch {last} of {app}, and this one is {version}: the checkpoint was "
        "rolled back, copied, or runs twice, and continuing would skip or double records. Use the checkpoint "
        "that this query was last run with, or a new one"
    )


def sum_too_large(where: str, add: Sequence[str]) -> SumTooLarge:
    """Return the error for a merge that cannot store a total."""
    return SumTooLarge(
        f"merge: a total of {', '.join(add)} is too large for its column in {where}, and nothing was merged; "
        "write to a new table whose column has more room: CAST(... AS DECIMAL(38, 0)), or AS DOUBLE"
    )
