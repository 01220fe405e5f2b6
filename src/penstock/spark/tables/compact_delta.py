"""Compaction of a Delta table: one task and one commit for each partition that has small files."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from typing import TYPE_CHECKING, Final

import msgspec
import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError

from penstock.errors import NotFound
from penstock.spark.tables.compact import CompactionReport, OnProgress, in_tasks, pack
from penstock.spark.tables.delta import load_delta
from penstock.spark.tables.spec import TableSpec
from penstock.spark.tables.table import PartitionValues

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["compact_delta"]

_log = logging.getLogger(__name__)

_ATTEMPTS: Final = 5


def compact_delta(
    spark: SparkSession, spec: TableSpec, target_bytes: int, min_files: int, tell: OnProgress
) -> CompactionReport:
    """See `compact`. A partition that other writers keep changing is skipped and told."""
    table = load_delta(spec)
    if table is None:
        raise NotFound(f"{spec.where} does not exist; check the path")
    partitions = sorted({found.partition for found in pack(_files(table), target_bytes, min_files)}, key=repr)
    tell(f"{spec.where}: {len(partitions)} partitions have small files")

    def work(partition: PartitionValues) -> bytes:
        return msgspec.json.encode(_optimize(spec, partition, target_bytes))

    results = in_tasks(spark, partitions, work)
    report = CompactionReport.total(msgspec.json.decode(found, type=CompactionReport) for found in results)
    tell(f"{spec.where}: {report}")
    return report


def _files(table: DeltaTable) -> dict[PartitionValues, list[tuple[str, int]]]:
    columns = table.metadata().partition_columns
    actions = pa.table(table.get_add_actions(flatten=True)).to_pylist()
    found: dict[PartitionValues, list[tuple[str, int]]] = defaultdict(list)
    for action in actions:
        values = tuple((name, _text(action[f"partition.{name}"])) for name in columns)
        found[values].append((action["path"], action["size_bytes"]))
    return found


def _text(value: object) -> str | None:
    if isinstance(value, bool):
        return "true" if value else "false"
    return None if value is None else str(value)


def _optimize(spec: TableSpec, partition: PartitionValues, target_bytes: int) -> CompactionReport:
    """In a task. The library reads, writes and commits; a lost race is tried again on the new state."""
    # Its filters know null as the empty string, as the log does.
    chosen = [(name, "=", value or "") for name, value in partition]
    for _ in range(_ATTEMPTS):
        table = load_delta(spec)
        if table is None:
            break
        try:
            done = table.optimize.compact(partition_filters=chosen or None, target_size=target_bytes)
        except CommitFailedError as error:
            _log.info("%s: %s; trying again", spec.where, error)
            continue
        return CompactionReport(
            partitions=1,
            files_before=done["numFilesRemoved"],
            files_after=done["numFilesAdded"],
            bytes_before=_total(done["filesRemoved"]),
            bytes_after=_total(done["filesAdded"]),
        )
    place = ", ".join(f"{name}={value}" for name, value in partition) or "the table"
    return CompactionReport(skipped=(f"{place}: other writers changed it each time",))


def _total(told: str | dict[str, int]) -> int:
    found = json.loads(told) if isinstance(told, str) else told
    return int(found.get("totalSize", 0))
