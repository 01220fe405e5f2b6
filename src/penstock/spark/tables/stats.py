"""Statistics of a data file, from the Parquet footer that was just written. Pure.

Bounds are given for all plain columns of a file or for none: readers take a bound that is missing beside
others for a null, which no row satisfies, and skip the file.
"""

from __future__ import annotations

import datetime as dt
import decimal
import math
from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

__all__ = ["delta_stats", "statistics_columns"]

_COLUMNS_MAX: Final = 128
"""More would bloat the log. Readers expect the first 32 of the table, whose order the rows need not have."""
_TEXT_MAX: Final = 64
_SURROGATES: Final = (0xD800, 0xDFFF)
_FLOAT_MAX: Final = {"FLOAT": (2 - 2**-23) * 2.0**127, "DOUBLE": (2 - 2**-52) * 2.0**1023}

Plain: TypeAlias = str | int | float | bool | msgspec.Raw
Bounds: TypeAlias = tuple[Plain, Plain]


def statistics_columns(schema: pa.Schema) -> list[str]:
    """The columns worth knowing the least and greatest value of: plain ones, but not bytes."""
    return _plain_columns(schema)[:_COLUMNS_MAX]


def _plain_columns(schema: pa.Schema) -> list[str]:
    return [field.name for field in schema if not (pa.types.is_nested(field.type) or _is_bytes(field.type))]


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def delta_stats(footer: pq.FileMetaData, schema: pa.Schema) -> str:
    """The `stats` of an add action: rows, nulls of the plain columns, and bounds no value lies outside of.

    Bounds may be wider than the values: long texts are cut, and a float may be any number. They are left out
    altogether if a column that has values cannot get any.
    """
    wanted = set(statistics_columns(schema))
    nulls: dict[str, int] = {}
    bounds: dict[str, Bounds | None] = {}
    for index in range(footer.num_columns):
        name = footer.schema.column(index).path
        if name not in wanted:
            continue
        groups = [footer.row_group(group).column(index).statistics for group in range(footer.num_row_groups)]
        known = all(group is not None and group.has_null_count for group in groups)
        if known:
            nulls[name] = sum(group.null_count for group in groups)
        if not known or nulls[name] < footer.num_rows:
            bounds[name] = _bounds(groups)
    found: dict[str, object] = {"numRecords": footer.num_rows}
    told = {name: pair for name, pair in bounds.items() if pair is not None}
    if told and len(told) == len(bounds) and len(_plain_columns(schema)) <= _COLUMNS_MAX:
        found["minValues"] = {name: low for name, (low, _) in told.items()}
        found["maxValues"] = {name: high for name, (_, high) in told.items()}
    found["nullCount"] = nulls
    return msgspec.json.encode(found).decode()


def _bounds(groups: Sequence[pq.Statistics | None]) -> Bounds | None:
    # A group of nulls alone has no least value, and takes none away from the others.
    filled = [group for group in groups if group is not None and group.num_values]
    if not filled or any(group is None for group in groups):
        return None
    if filled[0].physical_type in _FLOAT_MAX:
        return _float_bounds(filled)
    if not all(group.has_min_max for group in filled):
        return None
    try:
        low, high = min(group.min for group in filled), max(group.max for group in filled)
    except (OverflowError, ValueError):
        return None  # a date beyond what Python can say, or a text that is none
    if isinstance(low, str):
        end = _cut_up(high)
        return None if end is None else (low[:_TEXT_MAX], end)
    least, greatest = _plain(low), _plain(high)
    return None if least is None or greatest is None else (least, greatest)


def _float_bounds(groups: Sequence[pq.Statistics]) -> Bounds | None:
    """Any number: the footer does not tell of NaN, which engines place differently. JSON has no infinity."""
    ends = [end for group in groups if group.has_min_max for end in (group.min, group.max)]
    most = _FLOAT_MAX[groups[0].physical_type]
    return None if any(math.isinf(end) for end in ends) else (-most, most)


def _cut_up(text: str) -> str | None:
    """A short text that is not less than `text`; None if there is none."""
    if len(text) <= _TEXT_MAX:
        return text
    cut = text[:_TEXT_MAX].rstrip(chr(0x10FFFF))
    if not cut:
        return None
    following = ord(cut[-1]) + 1
    return cut[:-1] + chr(_SURROGATES[1] + 1 if following == _SURROGATES[0] else following)


def _plain(value: object) -> Plain | None:
    if isinstance(value, dt.datetime):
        text = value.replace(tzinfo=None).isoformat(timespec="microseconds")
        return f"{text}Z" if value.tzinfo else text
    if isinstance(value, dt.date):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        # A number with all its digits; readers do not know exponents here.
        return msgspec.Raw(format(value, "f").encode())
    return value if isinstance(value, bool | int) else None
