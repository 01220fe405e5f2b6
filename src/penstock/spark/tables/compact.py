"""Fewer, larger files: a Spark batch job for what streaming leaves behind.

Readers and a running stream go on undisturbed: new files replace old ones in a commit of their own, the rows
stay the same, and the versions of the stream's micro-batches are not touched. The old files stay on disk for
readers that still use them; remove them when none can be left, for Delta with
`DeltaTable(path).vacuum(dry_run=False)`, for Iceberg by expiring snapshots and removing orphan files with the
catalog's own tools.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Generic, TypeAlias, TypeVar

import pyarrow as pa

from penstock.errors import ConfigError, Unsupported
from penstock.spark.tables.spec import TARGET_FILE_BYTES, TableSpec
from penstock.spark.tables.table import PartitionValues

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["CompactionReport", "OnProgress", "SmallFiles", "compact", "in_tasks", "pack"]

OnProgress: TypeAlias = Callable[[str], None]

_ROW: Final = pa.schema([("result", pa.binary())])
_SMALL: Final = 0.75
"""A file this much of the target is left alone: rewriting it would gain little."""
J = TypeVar("J")


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallFiles(Generic[J]):
    """Files of one partition of the table that are to become one, or a few."""

    partition: PartitionValues
    files: tuple[J, ...]
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionReport:
    """What a compaction did. `skipped` says what it left alone, and why."""

    partitions: int = 0
    files_before: int = 0
    files_after: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    skipped: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        return (
            f"{self.files_before} files became {self.files_after} in {self.partitions} partitions "
            f"({self.bytes_before} to {self.bytes_after} bytes, {len(self.skipped)} skipped)"
        )

    @classmethod
    def total(cls, parts: Iterable[CompactionReport]) -> CompactionReport:
        found = list(parts)
        return cls(
            partitions=sum(part.partitions for part in found),
            files_before=sum(part.files_before for part in found),
            files_after=sum(part.files_after for part in found),
            bytes_before=sum(part.bytes_before for part in found),
            bytes_after=sum(part.bytes_after for part in found),
            skipped=tuple(reason for part in found for reason in part.skipped),
        )


def compact(
    spark: SparkSession,
    spec: TableSpec,
    *,
    target_bytes: int = TARGET_FILE_BYTES,
    min_files: int = 5,
    on_progress: OnProgress | None = None,
) -> CompactionReport:
    """Rewrite the small files of every partition of the table that has at least `min_files` of them.

    Raises `Unsupported` for a Parquet folder: its readers take every file they see, so that none can be
    replaced without being seen twice or not at all.
    """
    if target_bytes < 1 or min_files < 2:
        raise ConfigError("compaction: expected target_bytes of at least 1 and min_files of at least 2")
    tell = on_progress or (lambda _: None)
    if spec.kind == "delta":
        from penstock.spark.tables.compact_delta import compact_delta

        return compact_delta(spark, spec, target_bytes, min_files, tell)
    if spec.kind == "iceberg":
        from penstock.spark.tables.compact_iceberg import compact_iceberg

        return compact_iceberg(spark, spec, target_bytes, min_files, tell)
    raise Unsupported(
        f"{spec.where}: a folder without a table format cannot be compacted under its readers; write it as a "
        "new folder with spark.read.parquet(old).repartition(n).write.parquet(new) and have them read that "
        "one, or use a Delta table"
    )


def pack(
    sized: Mapping[PartitionValues, Sequence[tuple[J, int]]], target_bytes: int, min_files: int
) -> list[SmallFiles[J]]:
    """Small files of each partition in groups of about `target_bytes`, for partitions that have enough."""
    packs: list[SmallFiles[J]] = []
    for partition, files in sorted(sized.items(), key=repr):
        small = [(file, size) for file, size in files if size < _SMALL * target_bytes]
        if len(small) < min_files:
            continue
        group: list[J] = []
        held = 0
        for file, size in small:
            if group and held + size > target_bytes:
                packs.append(SmallFiles(partition=partition, files=tuple(group), size=held))
                group, held = [], 0
            group.append(file)
            held += size
        if len(group) > 1:
            packs.append(SmallFiles(partition=partition, files=tuple(group), size=held))
    return [found for found in packs if len(found.files) > 1]


def in_tasks(spark: SparkSession, jobs: Sequence[J], work: Callable[[J], bytes]) -> list[bytes]:
    """`work` for each job, each in a Spark task of its own; what they return, in no order."""
    if not jobs:
        return []

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            results = [work(jobs[number]) for number in batch.column(0).to_pylist()]
            yield pa.record_batch([pa.array(results, pa.binary())], schema=_ROW)

    numbers = spark.range(0, len(jobs), 1, len(jobs))
    return [bytes(row[0]) for row in numbers.mapInArrow(run, "result binary").collect()]
