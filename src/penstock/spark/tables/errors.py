"""What can be wrong between a query and its table."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import ConfigError, LimitExceeded, Rejected

__all__ = ["SchemaMismatch", "SumTooLarge", "VersionBehind", "sum_too_large", "version_behind"]


class SchemaMismatch(ConfigError):
    """The rows do not fit the table: the message names the column and what to do."""


class SumTooLarge(LimitExceeded):
    """A total does not fit the type of its column; the table was left as it is."""


class VersionBehind(Rejected):
    """The table already has a later micro-batch of this query than the one that is to be committed."""


def version_behind(where: str, app: str, version: int, last: int) -> VersionBehind:
    """The error for a micro-batch older than the last one the table has of the same query."""
    return VersionBehind(
        f"{where} already has micro-batch {last} of {app}, and this one is {version}: the checkpoint was "
        "rolled back, copied, or runs twice, and going on would skip or double records. Use the checkpoint "
        "that this query was last run with, or a new one"
    )


def sum_too_large(where: str, add: Sequence[str]) -> SumTooLarge:
    """The error for a merge that cannot store a total."""
    return SumTooLarge(
        f"merge: a total of {', '.join(add)} is too large for its column in {where}, and nothing was merged; "
        "write to a new table whose column has more room: CAST(... AS DECIMAL(38, 0)), or AS DOUBLE"
    )
