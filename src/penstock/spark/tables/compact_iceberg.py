"""Compaction of an Iceberg table: tasks merge small files, one commit swaps them.

The commit rests on the snapshot it was made for. When a stream has committed meanwhile, the swap is made
again on the new snapshot, after seeing that every file it replaces is still there and nothing was deleted
from it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.exceptions import CommitFailedException

from penstock.blocking import loop_thread
from penstock.errors import Conflict, NotFound
from penstock.spark.tables.compact import CompactionReport, OnProgress, SmallFiles, in_tasks, pack
from penstock.spark.tables.iceberg import IcebergTable, load_iceberg, manifest_file, without_blind_retries
from penstock.spark.tables.parts import write_parts
from penstock.spark.tables.spec import TableSpec
from penstock.spark.tables.table import DataFile, FileLayout, PartitionValues
from penstock.spark.worker import worker_store

if TYPE_CHECKING:
    from pyiceberg.manifest import DataFile as ManifestFile
    from pyiceberg.table import Table as CatalogTable
    from pyspark.sql import SparkSession

__all__ = ["compact_iceberg"]

_ATTEMPTS: Final = 20
_SUMMARY: Final = {"penstock.compaction": "true"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Merged:
    old: tuple[str, ...]
    new: tuple[DataFile, ...]
    before: int
    reason: str = ""


def compact_iceberg(
    spark: SparkSession, spec: TableSpec, target_bytes: int, min_files: int, tell: OnProgress
) -> CompactionReport:
    """See `compact`. Files with deletes, of an older schema or outside the data folder are left alone."""
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
    """The files of the current snapshot that nothing was deleted from."""
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
    """In a task: the rows of all files, in files of the usual size."""
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
    for _ in range(_ATTEMPTS):
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
        f"{spec.where}: {_ATTEMPTS} attempts lost against other writers; nothing was changed, compact again"
    )
