"""What a task does with its rows: Parquet files in the table's folder that no reader sees yet.

Rows are gathered per partition value until they fill a row group, row groups until they fill a file. What
waits in memory is bounded for the whole task: the largest file is finished early when the rows have many
values.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.blocking import loop_thread
from penstock.clock import SYSTEM_CLOCK
from penstock.ids import SYSTEM_RNG, mint_ulid
from penstock.objects import ObjectStore
from penstock.retry import RetryPolicy, retry
from penstock.spark.reader import worker_store
from penstock.spark.tables.split import exact_folder, safe_folder, split
from penstock.spark.tables.stats import delta_stats, statistics_columns
from penstock.spark.tables.table import DataFile, FileLayout, PartitionValues

__all__ = ["PartBuffer", "staged_key", "write_parts"]

ROW_GROUP_BYTES: Final = 64 << 20
"""Rows in memory, before encoding. Larger groups compress no better and hold up readers that skip."""
WAITING_BYTES_MAX: Final = 256 << 20
OPEN_FILES_MAX: Final = 100

_POLICY: Final = RetryPolicy(deadline_s=60.0)


def staged_key(path: str) -> str:
    """Where the file that will be `path` waits in a folder whose readers take every Parquet file they see."""
    return f"_penstock/staging/{path.rsplit('/', 1)[-1]}.staged"


def write_parts(layout: FileLayout, batches: Iterator[pa.RecordBatch]) -> list[DataFile]:
    """Store the rows as files of `layout` and say what they are. Every file is durable on return.

    Raises what the store raises. Files already stored then stay behind, unknown to the table.
    """
    writer = _Writer(layout, worker_store(layout.store))
    for batch in batches:
        writer.add(batch)
    return writer.finish()


class _Writer:
    def __init__(self, layout: FileLayout, store: ObjectStore) -> None:
        self._layout = layout
        self._store = store
        self._open: dict[PartitionValues, PartBuffer] = {}
        self._stored: list[DataFile] = []

    def add(self, batch: pa.RecordBatch) -> None:
        layout = self._layout
        if not batch.schema.equals(layout.rows, check_metadata=True):
            batch = batch.select(layout.rows.names).cast(layout.rows)
        if layout.partition_by:
            groups = split(batch, layout.partition_by, keep=layout.keeps_partition_columns)
        else:
            groups = [((), batch)] if batch.num_rows else []
        for values, rows in groups:
            part = self._open.get(values)
            if part is None:
                part = self._open[values] = PartBuffer(layout)
            part.add(rows)
            if part.stored_bytes >= layout.target_file_bytes:
                self._store_files([values])
        self._make_room()

    def _make_room(self) -> None:
        """Finish the largest files while there are too many or too much waits in memory."""
        while len(self._open) > OPEN_FILES_MAX or self._waiting() > WAITING_BYTES_MAX:
            largest = sorted(self._open, key=lambda values: self._open[values].held_bytes, reverse=True)
            self._store_files(largest[: max(1, len(largest) // 4)])

    def _waiting(self) -> int:
        return sum(part.held_bytes for part in self._open.values())

    def finish(self) -> list[DataFile]:
        self._store_files(list(self._open))
        return self._stored

    def _store_files(self, chosen: Sequence[PartitionValues]) -> None:
        closed = [(values, self._open.pop(values).close()) for values in chosen]

        async def put_all() -> list[DataFile]:
            return await asyncio.gather(*(self._put(values, part) for values, part in closed))

        self._stored += loop_thread().run(put_all())

    async def _put(self, values: PartitionValues, part: ClosedPart) -> DataFile:
        layout = self._layout
        folder = exact_folder(values) if layout.staged else safe_folder(values)
        name = f"part-{mint_ulid(SYSTEM_CLOCK.now_ms(), SYSTEM_RNG)}.parquet"
        path = f"{folder}/{name}" if folder else name
        key = staged_key(path) if layout.staged else path
        view = memoryview(part.data)
        await retry(lambda: self._store.put(key, view), _POLICY, clock=SYSTEM_CLOCK, rng=SYSTEM_RNG)
        return DataFile(
            path=f"{layout.address}/{path}" if layout.address else path,
            size=part.data.size,
            rows=part.footer.num_rows,
            partition=values,
            stats=delta_stats(part.footer, layout.files) if layout.statistics == "delta" else "",
            footer=_footer_bytes(part.footer) if layout.statistics == "footer" else b"",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedPart:
    """A whole Parquet file in memory."""

    data: pa.Buffer
    footer: pq.FileMetaData


class PartBuffer:
    """One Parquet file being written in memory."""

    def __init__(self, layout: FileLayout) -> None:
        self._schema = layout.files
        self._sink = pa.BufferOutputStream()
        self._footers: list[pq.FileMetaData] = []
        self._writer = pq.ParquetWriter(
            self._sink,
            layout.files,
            compression=layout.compression,
            write_statistics=layout.statistics == "footer" or statistics_columns(layout.files) or False,
            metadata_collector=self._footers,
        )
        self._rows: list[pa.RecordBatch] = []
        self._rows_bytes = 0

    @property
    def stored_bytes(self) -> int:
        """Bytes of finished row groups."""
        return int(self._sink.tell())

    @property
    def held_bytes(self) -> int:
        """Memory this file occupies, about."""
        return self._rows_bytes + self.stored_bytes

    def add(self, rows: pa.RecordBatch) -> None:
        self._rows.append(rows)
        self._rows_bytes += rows.nbytes
        if self._rows_bytes >= ROW_GROUP_BYTES:
            self._end_group()

    def _end_group(self) -> None:
        rows = pa.Table.from_batches(self._rows, schema=self._schema)
        self._writer.write_table(rows, row_group_size=max(1, rows.num_rows))
        self._rows, self._rows_bytes = [], 0

    def close(self) -> ClosedPart:
        if self._rows:
            self._end_group()
        self._writer.close()
        return ClosedPart(data=self._sink.getvalue(), footer=self._footers[0])


def _footer_bytes(footer: pq.FileMetaData) -> bytes:
    sink = pa.BufferOutputStream()
    footer.write_metadata_file(sink)
    return bytes(sink.getvalue())
