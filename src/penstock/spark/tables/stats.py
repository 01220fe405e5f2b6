"""Statistics of a data file, from the Parquet footer that was just written. Pure."""

from __future__ import annotations

import datetime as dt
import decimal
import json
from typing import Final, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

__all__ = ["delta_stats", "statistics_columns"]

_COLUMNS_MAX: Final = 32
"""As many as other writers keep: a wide table would otherwise bloat the log."""
_TEXT_MAX: Final = 64

Plain: TypeAlias = str | int | float | bool


def statistics_columns(schema: pa.Schema) -> list[str]:
    """The columns worth knowing the least and greatest value of: plain ones, but not bytes."""
    plain = [field.name for field in schema if not (pa.types.is_nested(field.type) or _is_bytes(field.type))]
    return plain[:_COLUMNS_MAX]


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def delta_stats(footer: pq.FileMetaData, schema: pa.Schema) -> str:
    """The `stats` of an add action: rows, and of the plain columns least, greatest, and nulls.

    What cannot be said exactly is left out: bounds of long texts, and of floats, which may be NaN.
    """
    wanted = set(statistics_columns(schema))
    least: dict[str, Plain] = {}
    greatest: dict[str, Plain] = {}
    nulls: dict[str, int] = {}
    for index in range(footer.num_columns):
        name = footer.schema.column(index).path
        if name not in wanted:
            continue
        found = [footer.row_group(group).column(index).statistics for group in range(footer.num_row_groups)]
        if any(stats is None for stats in found):
            continue
        if all(stats.has_null_count for stats in found):
            nulls[name] = sum(stats.null_count for stats in found)
        filled = [stats for stats in found if stats.has_min_max]
        # A group of nulls alone has no least value, and takes none away from the others.
        if not filled or any(not s.has_min_max and s.num_values for s in found):
            continue
        bounds = _bounds(filled)
        if bounds is not None:
            least[name], greatest[name] = bounds
    return json.dumps(
        {"numRecords": footer.num_rows, "minValues": least, "maxValues": greatest, "nullCount": nulls},
        separators=(",", ":"),
    )


def _bounds(groups: list[pq.Statistics]) -> tuple[Plain, Plain] | None:
    try:
        low, high = _plain(min(s.min for s in groups)), _plain(max(s.max for s in groups))
    except (OverflowError, ValueError):
        return None  # a date beyond what Python can say
    return None if low is None or high is None else (low, high)


def _plain(value: object) -> Plain | None:
    if isinstance(value, str):
        return value if len(value) <= _TEXT_MAX else None
    if isinstance(value, dt.datetime):
        text = value.replace(tzinfo=None).isoformat(timespec="microseconds")
        return f"{text}Z" if value.tzinfo else text
    if isinstance(value, dt.date):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        # As a JSON number it would lose digits.
        number = float(value)
        return number if decimal.Decimal(number) == value else None
    return value if isinstance(value, bool | int) else None
