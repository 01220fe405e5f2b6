"""Totals in a Delta table: rows with known keys are added up, others are inserted, each micro-batch once."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable
from pyspark.sql.pandas.types import from_arrow_schema

from penstock.errors import ConfigError, InvalidInput, Unsupported
from penstock.spark.tables.delta import DeltaLog
from penstock.spark.tables.schema import arrow_schema
from penstock.spark.tables.spec import TableSpec

__all__ = ["check_merge_columns", "merge_into"]


def merge_into(
    spec: TableSpec, rows: pa.Table, *, keys: Sequence[str], add: Sequence[str], app: str, version: int
) -> bool:
    """Merge `rows` into the Delta table `spec` as micro-batch `version` of `app`; False if it was before.

    A row whose `keys` are equal to a row's in the table (null equals null) adds its `add` columns to it and
    replaces the others; any other row is inserted. Null in an `add` column adds nothing. The table is created
    if it is absent. Runs on the driver: for aggregates, not for records. Raises as `Table.prepare` and
    `Table.commit`, `InvalidInput` when two of the rows have the same keys, and `Unsupported` for other
    tables.
    """
    if spec.kind != "delta":
        raise Unsupported(f"{spec.where}: only Delta tables can be merged into; use kind delta")
    check_merge_columns(rows.schema.names, keys, add)
    schema = from_arrow_schema(rows.schema)
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
            _quoted(name): _sum(name) if name in add else f"s.{_quoted(name)}"
            for name in target.names
            if name not in keys
        }
        if updates:
            merger = merger.when_matched_update(updates)
        merger.when_not_matched_insert(
            {_quoted(name): f"s.{_quoted(name)}" for name in target.names}
        ).execute()

    return log.change(app, version, given.num_rows, merge)


def check_merge_columns(names: Sequence[str], keys: Sequence[str], add: Sequence[str]) -> None:
    """Raise `ConfigError` unless rows with these columns can be merged by `keys`."""
    if not keys:
        raise ConfigError("merge: give at least one key column")
    for name in (*keys, *add):
        if name not in names:
            nearest = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"they are {', '.join(names)}"
            raise ConfigError(f"merge: the rows have no column {name!r}; {hint}")
    both = set(keys) & set(add)
    if both:
        raise ConfigError(f"merge: {', '.join(sorted(both))} cannot be a key and be added up")


def _check_unique(rows: pa.Table, keys: Sequence[str]) -> None:
    if rows.num_rows and rows.group_by(list(keys)).aggregate([]).num_rows != rows.num_rows:
        raise InvalidInput(
            f"merge: several rows of a micro-batch have the same {', '.join(keys)}, so what to store is not "
            f"defined; end the query with GROUP BY {', '.join(keys)}"
        )


def _sum(name: str) -> str:
    old, new = f"t.{_quoted(name)}", f"s.{_quoted(name)}"
    return f"CASE WHEN {new} IS NULL THEN {old} WHEN {old} IS NULL THEN {new} ELSE {old} + {new} END"


def _quoted(name: str) -> str:
    # The library parses plain names as lower case.
    return '"' + name.replace('"', '""') + '"'
