"""What can be wrong between a query and its table."""

from __future__ import annotations

from penstock.errors import ConfigError, Rejected

__all__ = ["SchemaMismatch", "VersionBehind", "version_behind"]


class SchemaMismatch(ConfigError):
    """The rows do not fit the table: the message names the column and what to do."""


class VersionBehind(Rejected):
    """The table already has a later micro-batch of this query than the one that is to be committed."""


def version_behind(where: str, app: str, version: int, last: int) -> VersionBehind:
    """The error for a micro-batch older than the last one the table has of the same query."""
    return VersionBehind(
        f"{where} already has micro-batch {last} of {app}, and this one is {version}: the checkpoint was "
        "rolled back, copied, or runs twice, and going on would skip or double records. Use the checkpoint "
        "that this query was last run with, or a new one"
    )
