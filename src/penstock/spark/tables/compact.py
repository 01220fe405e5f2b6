"""Compaction: a Spark batch job that replaces the small files of streams with fewer, larger ones.

Readers and a running stream are not disturbed. New files replace old ones in a separate commit, the rows
stay the same, and the recorded micro-batch versions of the stream do not change. The old files stay on disk
for readers that still use them. Remove them once no reader can: for Delta with
`DeltaTable(path).vacuum(dry_run=False)`, for Iceberg by expiring snapshots and removing orphan files with the
catalog's own tools.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Generic, TypeAlias, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.blocking import loop_thread
from penstock.errors import ConfigError, Conflict, NotFound, Unsupported
from penstock.spark.tables.parts import write_parts
from penstock.spark.tables.spec import TARGET_FILE_BYTES, TableSpec
from penstock.spark.tables.table import DataFile, FileLayout, PartitionValues
from penstock.spark.worker import worker_store

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyiceberg.manifest import DataFile as ManifestFile
    from pyiceberg.table import Table as CatalogTable
    from pyspark.sql import SparkSession

OnProgress: TypeAlias = Callable[[str], None]

_ROW: Final = pa.schema([("result", pa.binary())])
_SMALL: Final = 0.75
"""Files of at least this fraction of the target size are not rewritten: it would gain little."""
_DELTA_ATTEMPTS: Final = 5
_ICEBERG_ATTEMPTS: Final = 20
_SUMMARY: Final = {"penstock.compaction": "true"}

_log = logging.getLogger(__name__)

J = TypeVar("J")


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallFiles(Generic[J]):
    """A group of files in one partition to merge into one file, or a few."""

    partition: PartitionValues
    files: tuple[J, ...]
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionReport:
    """The result of a compaction. `skipped` lists the reason for each partition or group left unchanged."""

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

    Raise `Unsupported` for a Parquet folder. Its readers read every file they find, so during a replacement
    they would see rows twice or not at all.
    """
    if target_bytes < 1 or min_files < 2:
        raise ConfigError("compaction: expected target_bytes of at least 1 and min_files of at least 2")
    report_progress = on_progress or (lambda _: None)
    if spec.kind == "delta":
        return _compact_delta(spark, spec, target_bytes, min_files, report_progress)
    if spec.kind == "iceberg":
        return _compact_iceberg(spark, spec, target_bytes, min_files, report_progress)
    raise Unsupported(
        f"{spec.where}: a folder without a table format cannot be compacted under its readers; write it as a "
        "new folder with spark.read.parquet(old).repartition(n).write.parquet(new) and have them read that "
        "one, or use a Delta table"
    )


def pack(
    sized: Mapping[PartitionValues, Sequence[tuple[J, int]]], target_bytes: int, min_files: int
) -> list[SmallFiles[J]]:
    """Group the small files of each partition into groups of about `target_bytes`.

    Skip partitions with fewer than `min_files` small files.
    """
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
    """Run `work` for each job in a separate Spark task. Return the results in arbitrary order."""
    if not jobs:
        return []

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            results = [work(jobs[number]) for number in batch.column(0).to_pylist()]
            yield pa.record_batch([pa.array(results, pa.binary())], schema=_ROW)

    numbers = spark.range(0, len(jobs), 1, len(jobs))
    return [bytes(row[0]) for row in numbers.mapInArrow(run, "result binary").collect()]


def _compact_delta(
    spark: SparkSession, spec: TableSpec, target_bytes: int, min_files: int, report_progress: OnProgress
) -> CompactionReport:
    """Compact each partition that has small files, with one task and one commit per partition.

    Skip and report a partition that other writers keep changing.
    """
    from penstock.spark.tables.delta import load_delta

    table = load_delta(spec)
    if table is None:
        raise NotFound(f"{spec.where} does not exist; check the path")
    partitions = sorted(
        {found.partition for found in pack(_delta_files(table), target_bytes, min_files)}, key=repr
    )
    report_progress(f"{spec.where}: {len(partitions)} partitions have small files")

    def work(partition: PartitionValues) -> bytes:
        return msgspec.json.encode(_optimize(spec, partition, target_bytes))

    results = in_tasks(spark, partitions, work)
    report = CompactionReport.total(msgspec.json.decode(found, type=CompactionReport) for found in results)
    report_progress(f"{spec.where}: {report}")
    return report


def _delta_files(table: DeltaTable) -> dict[PartitionValues, list[tuple[str, int]]]:
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
    """Compact one partition, in a task. After a commit conflict, start again from the new state."""
    from deltalake.exceptions import CommitFailedError

    from penstock.spark.tables.delta import load_delta

    # The filters represent null as the empty string, as the log does.
    chosen = [(name, "=", value or "") for name, value in partition]
    for _ in range(_DELTA_ATTEMPTS):
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
    return CompactionReport(skipped=(f"{place}: other writers changed it during every attempt",))


def _total(reported: str | dict[str, int]) -> int:
    found = json.loads(reported) if isinstance(reported, str) else reported
    return int(found.get("totalSize", 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Merged:
    old: tuple[str, ...]
    new: tuple[DataFile, ...]
    before: int
    reason: str = ""


def _compact_iceberg(
    spark: SparkSession, spec: TableSpec, target_bytes: int, min_files: int, report_progress: OnProgress
) -> CompactionReport:
    """Merge small files in tasks, then replace them in one commit.

    Skip files that have deletes, an older schema, or a path outside the data folder. The commit is
    conditional on the snapshot it was prepared for. If a stream has committed in the meantime, repeat the
    commit on the new snapshot, after checking that every replaced file is still there without deletes.
    """
    from penstock.spark.tables.iceberg import IcebergTable, load_iceberg

    table = load_iceberg(spec)
    if table is None:
        raise NotFound(f"{spec.where} does not exist; check the options table and catalog.*")
    layout = replace(IcebergTable(spec).layout_of(table), target_file_bytes=target_bytes)
    packs = pack(_sized(table, layout), target_bytes, min_files)
    report_progress(f"{spec.where}: {len(packs)} groups of small files")

    def work(small: SmallFiles[str]) -> bytes:
        return msgspec.json.encode(_merge(layout, small))

    merged = [msgspec.json.decode(result, type=_Merged) for result in in_tasks(spark, packs, work)]
    done = [found for found in merged if not found.reason]
    if done:
        _swap(spec, done)
    report = CompactionReport(
        partitions=len({file.partition for found in done for file in found.new}),
        files_before=sum(len(found.old) for found in done),
        files_after=sum(len(found.new) for found in done),
        bytes_before=sum(found.before for found in done),
        bytes_after=sum(file.size for found in done for file in found.new),
        skipped=tuple(found.reason for found in merged if found.reason),
    )
    report_progress(f"{spec.where}: {report}")
    return report


def _live(table: CatalogTable) -> dict[str, ManifestFile]:
    """Return the files of the current snapshot that have no deletes."""
    return {task.file.file_path: task.file for task in table.scan().plan_files() if not task.delete_files}


def _sized(table: CatalogTable, layout: FileLayout) -> dict[PartitionValues, list[tuple[str, int]]]:
    spec = table.spec()
    found: dict[PartitionValues, list[tuple[str, int]]] = defaultdict(list)
    for path, file in _live(table).items():
        if file.spec_id == spec.spec_id and path.startswith(f"{layout.address}/"):
            values = tuple((field.name, str(file.partition[n])) for n, field in enumerate(spec.fields))
            found[values].append((path, file.file_size_in_bytes))
    return found


def _merge(layout: FileLayout, small: SmallFiles[str]) -> _Merged:
    """Rewrite the rows of small files into files of the target size. Runs in a task."""
    store = worker_store(layout.store)

    def rows() -> Iterator[pa.RecordBatch]:
        for path in small.files:
            blob = loop_thread().run(store.get(path[len(layout.address) + 1 :]))
            found = pq.read_table(pa.BufferReader(pa.py_buffer(blob.data)))
            if _ids(found.schema) != _ids(layout.files):
                raise _OlderSchema(path)
            yield from found.cast(layout.rows).to_batches()

    try:
        new = tuple(write_parts(layout, rows()))
    except _OlderSchema as error:
        return _Merged(old=small.files, new=(), before=0, reason=f"{error}: written with an older schema")
    return _Merged(old=small.files, new=new, before=small.size)


class _OlderSchema(Exception):
    """The columns of a file differ from the table's."""


def _ids(schema: pa.Schema) -> list[tuple[str, bytes | None]]:
    return [(field.name, (field.metadata or {}).get(b"PARQUET:field_id")) for field in schema]


def _swap(spec: TableSpec, merged: Sequence[_Merged]) -> None:
    from pyiceberg.exceptions import CommitFailedException

    from penstock.spark.tables.iceberg import load_iceberg, manifest_file, without_blind_retries

    for _ in range(_ICEBERG_ATTEMPTS):
        table = load_iceberg(spec)
        live = _live(table) if table is not None else {}
        gone = [path for found in merged for path in found.old if path not in live]
        if table is None or gone:
            raise Conflict(
                f"{spec.where}: {len(gone)} of the merged files were rewritten or had rows deleted in the "
                "meantime; nothing was changed, compact again"
            )
        try:
            change = without_blind_retries(table).transaction()
            with change.update_snapshot(snapshot_properties=_SUMMARY).overwrite() as swap:
                for found in merged:
                    for path in found.old:
                        swap.delete_data_file(live[path])
                    for file in found.new:
                        swap.append_data_file(manifest_file(table, file))
            change.commit_transaction()
        except CommitFailedException:
            continue
        return
    raise Conflict(
        f"{spec.where}: {_ICEBERG_ATTEMPTS} attempts conflicted with other writers; nothing was changed, "
        "compact again"
    )
