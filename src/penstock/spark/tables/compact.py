"""Compaction: a Spark batch job that replaces the small files of streams with fewer, larger ones.

Readers and a running stream are not disturbed: new files replace old ones in a commit of their own, the rows
stay the same, and the versions of the stream's micro-batches are not touched. The old files stay on disk for
readers that still use them; remove them when none can be left, for Delta with
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
"""A file of at least this part of the target is left alone: rewriting it would gain little."""
_DELTA_ATTEMPTS: Final = 5
_ICEBERG_ATTEMPTS: Final = 20
_SUMMARY: Final = {"penstock.compaction": "true"}

_log = logging.getLogger(__name__)

J = TypeVar("J")


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallFiles(Generic[J]):
    """Files of one partition that are to become one, or a few."""

    partition: PartitionValues
    files: tuple[J, ...]
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionReport:
    """The result of a compaction. `skipped` names what it left alone, and why."""

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
        return _compact_delta(spark, spec, target_bytes, min_files, tell)
    if spec.kind == "iceberg":
        return _compact_iceberg(spark, spec, target_bytes, min_files, tell)
    raise Unsupported(
        f"{spec.where}: a folder without a table format cannot be compacted under its readers; write it as a "
        "new folder with spark.read.parquet(old).repartition(n).write.parquet(new) and have them read that "
        "one, or use a Delta table"
    )


def pack(
    sized: Mapping[PartitionValues, Sequence[tuple[J, int]]], target_bytes: int, min_files: int
) -> list[SmallFiles[J]]:
    """Group the small files of each partition that has enough, in groups of about `target_bytes`."""
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
    """Run `work` for each job in a Spark task of its own. Return the results, in no order."""
    if not jobs:
        return []

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            results = [work(jobs[number]) for number in batch.column(0).to_pylist()]
            yield pa.record_batch([pa.array(results, pa.binary())], schema=_ROW)

    numbers = spark.range(0, len(jobs), 1, len(jobs))
    return [bytes(row[0]) for row in numbers.mapInArrow(run, "result binary").collect()]


def _compact_delta(
    spark: SparkSession, spec: TableSpec, target_bytes: int, min_files: int, tell: OnProgress
) -> CompactionReport:
    """Compact with one task and one commit for each partition that has small files.

    A partition that other writers keep changing is skipped and reported.
    """
    from penstock.spark.tables.delta import load_delta

    table = load_delta(spec)
    if table is None:
        raise NotFound(f"{spec.where} does not exist; check the path")
    partitions = sorted(
        {found.partition for found in pack(_delta_files(table), target_bytes, min_files)}, key=repr
    )
    tell(f"{spec.where}: {len(partitions)} partitions have small files")

    def work(partition: PartitionValues) -> bytes:
        return msgspec.json.encode(_optimize(spec, partition, target_bytes))

    results = in_tasks(spark, partitions, work)
    report = CompactionReport.total(msgspec.json.decode(found, type=CompactionReport) for found in results)
    tell(f"{spec.where}: {report}")
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
    """Compact one partition, in a task. After a lost race, start again from the new state."""
    from deltalake.exceptions import CommitFailedError

    from penstock.spark.tables.delta import load_delta

    # Its filters know null as the empty string, as the log does.
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
    return CompactionReport(skipped=(f"{place}: other writers changed it each time",))


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
    spark: SparkSession, spec: TableSpec, target_bytes: int, min_files: int, tell: OnProgress
) -> CompactionReport:
    """Merge small files in tasks, and swap them in one commit.

    Files with deletes, of an older schema or outside the data folder are left alone. The commit rests on the
    snapshot it was made for. If a stream has committed in the meantime, the swap is made again on the new
    snapshot, after checking that every file it replaces is still there and nothing was deleted from it.
    """
    from penstock.spark.tables.iceberg import IcebergTable, load_iceberg

    table = load_iceberg(spec)
    if table is None:
        raise NotFound(f"{spec.where} does not exist; check the options table and catalog.*")
    layout = replace(IcebergTable(spec).layout_of(table), target_file_bytes=target_bytes)
    packs = pack(_sized(table, layout), target_bytes, min_files)
    tell(f"{spec.where}: {len(packs)} groups of small files")

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
    tell(f"{spec.where}: {report}")
    return report


def _live(table: CatalogTable) -> dict[str, ManifestFile]:
    """Return the files of the current snapshot that nothing was deleted from."""
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
    """Store the rows of small files as files of the usual size, in a task."""
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
    """A file's columns are not the table's."""


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
                f"{spec.where}: {len(gone)} of the files that were merged have been rewritten or deleted "
                "from meanwhile; nothing was changed, compact again"
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
        f"{spec.where}: {_ICEBERG_ATTEMPTS} attempts lost against other writers; nothing was changed, "
        "compact again"
    )
