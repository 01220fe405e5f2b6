"""Merging totals into a Delta table: add to rows with known keys, insert others, each micro-batch once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable
from deltalake.exceptions import CommitFailedError, DeltaError
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import DataType, DecimalType, DoubleType, FloatType, LongType, StructType

from penstock.config import closest
from penstock.errors import ConfigError, InvalidInput, Unsupported
from penstock.spark.errors import sum_too_large
from penstock.spark.tables.delta import DeltaLog
from penstock.spark.tables.schema import arrow_schema
from penstock.spark.tables.spec import TableSpec

_SUMMABLE: Final = (DecimalType, DoubleType, FloatType, LongType)


def merge_into(
    spec: TableSpec, rows: pa.Table, *, keys: Sequence[str], add: Sequence[str], app: str, version: int
) -> bool:
    """Merge `rows` into the Delta table `spec` as micro-batch `version` of `app`.

    Return False if that micro-batch was merged before. If a row of the table has the same `keys` (null equals
    null), add the `add` columns to it and replace its other columns; otherwise insert the row. A null in an
    `add` column adds nothing. Create the table if it is absent. The merge runs on the driver, so use it for
    aggregates, not for records.

    Raise as `Table.prepare` and `Table.commit`, `InvalidInput` if two of the rows have the same keys,
    `SumTooLarge` if a total does not fit its column (the table is unchanged), and `Unsupported` for other
    kinds of table.
    """
    if spec.kind != "delta":
        raise Unsupported(f"{spec.where}: only Delta tables can be merged into; use kind delta")
    schema = from_arrow_schema(rows.schema)
    check_merge_columns(rows.schema.names, keys, add, schema)
    log = DeltaLog(spec)
    log.prepare(schema)
    target = arrow_schema(schema)
    given = rows.select(target.names).cast(target)
    _check_unique(given, keys)

    def merge(table: DeltaTable, properties: CommitProperties) -> None:
        merger = table.merge(
            given,
            " AND ".join(f"(t.{_quoted(key)} IS NOT DISTINCT FROM s.{_quoted(key)})" for key in keys),
            source_alias="s",
            target_alias="t",
            commit_properties=properties,
        )
        updates = {
            _quoted(name): _sum(name, schema) if name in add else f"s.{_quoted(name)}"
            for name in target.names
            if name not in keys
        }
        if updates:
            merger = merger.when_matched_update(updates)
        merger = merger.when_not_matched_insert(
            {_quoted(name): f"s.{_quoted(name)}" for name in target.names}
        )
        try:
            merger.execute()
        except (ValueError, DeltaError) as error:
            # The overflow occurs while the rows are computed, before anything is committed.
            if _is_overflow(error):
                raise sum_too_large(spec.where, add) from None
            raise

    return log.change(app, version, given.num_rows, merge, own_files=False)


def check_merge_columns(
    names: Sequence[str], keys: Sequence[str], add: Sequence[str], schema: StructType | None = None
) -> None:
    """Raise `ConfigError` unless rows with these columns can be merged by `keys`.

    With `schema`, also check that the types of `add` columns have room for sums.
    """
    if not keys:
        raise ConfigError("merge: give at least one key column")
    for name in (*keys, *add):
        if name not in names:
            near = closest(name, names)
            hint = f"did you mean {near!r}?" if near else f"they are {', '.join(names)}"
            raise ConfigError(f"merge: the rows have no column {name!r}; {hint}")
    both = set(keys) & set(add)
    if both:
        raise ConfigError(f"merge: {', '.join(sorted(both))} cannot be a key and be added up")
    if schema is not None:
        for name in add:
            _check_summable(name, schema)


def _check_summable(name: str, schema: StructType) -> None:
    kind = schema[name].dataType
    if not isinstance(kind, _SUMMABLE):
        raise ConfigError(
            f"merge: column {name!r} is {kind.simpleString()}, which has no room for sums; cast it in the "
            f"query: CAST({name} AS BIGINT) AS {name}"
        )


def _is_overflow(error: Exception) -> bool:
    if isinstance(error, CommitFailedError):
        return False
    overflow = re.search(r"overflow|out of range|too (large|small) to store", str(error), re.IGNORECASE)
    return overflow is not None


def _check_unique(rows: pa.Table, keys: Sequence[str]) -> None:
    if rows.num_rows and rows.group_by(list(keys)).aggregate([]).num_rows != rows.num_rows:
        raise InvalidInput(
            f"merge: several rows of a micro-batch have the same {', '.join(keys)}, so the result is "
            f"undefined; end the query with GROUP BY {', '.join(keys)}"
        )


def _sum(name: str, schema: StructType) -> str:
    old, new = f"t.{_quoted(name)}", f"s.{_quoted(name)}"
    total, room = f"{old} + {new}", _room(schema[name].dataType)
    if room is not None:
        # A plain sum of large numbers overflows silently; the cast back to the column's type fails.
        wide, fitting = room
        total = f"CAST(CAST({old} AS {wide}) + CAST({new} AS {wide}) AS {fitting})"
    return f"CASE WHEN {new} IS NULL THEN {old} WHEN {old} IS NULL THEN {new} ELSE {total} END"


def _room(kind: DataType) -> tuple[str, str] | None:
    """Return a type that holds the sum of two values of `kind`, and `kind` itself. Return None for floats."""
    if isinstance(kind, LongType):
        return "DECIMAL(20, 0)", "BIGINT"
    if isinstance(kind, DecimalType):
        return f"DECIMAL({kind.precision + 1}, {kind.scale})", f"DECIMAL({kind.precision}, {kind.scale})"
    return None


def _quoted(name: str) -> str:
    # The library parses unquoted names as lower case.
    return '"' + name.replace('"', '""') + '"'
