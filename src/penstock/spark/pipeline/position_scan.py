"""The columns of a table that tell where each row comes from, read a range of sequences at a time.

Without Spark: Delta and Iceberg by their libraries, a Parquet folder through the object store.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from penstock.blocking import loop_thread
from penstock.clock import SYSTEM_CLOCK
from penstock.errors import NotFound, Unavailable, Unsupported
from penstock.ids import SYSTEM_RNG
from penstock.objects import ByteRange, ObjectStore, open_store
from penstock.retry import RetryPolicy, retry
from penstock.spark.tables.spec import TableSpec

if TYPE_CHECKING:
    from pyiceberg.table import Table as CatalogTable

__all__ = ["PositionScan", "open_scan"]

_POLICY = RetryPolicy(deadline_s=60.0)


class PositionScan(Protocol):
    """A table as it was when the scan was opened."""

    @property
    def columns(self) -> frozenset[str]:
        """The names of its columns."""
        ...

    def read(self, columns: list[str], sequence: str, low: int, high: int) -> Iterator[pa.RecordBatch]:
        """`columns` of the rows whose column `sequence` is `low` to `high`, in no order."""
        ...


def open_scan(spec: TableSpec) -> PositionScan | None:
    """The table at `spec`, or None if there is none. Raises `Unsupported` for one that only Spark reads."""
    if spec.kind == "delta":
        return _open_delta(spec)
    return _open_iceberg(spec) if spec.kind == "iceberg" else _open_parquet(spec)


class _DatasetScan:
    def __init__(self, dataset: ds.Dataset) -> None:
        self._dataset = dataset
        self.columns = frozenset(dataset.schema.names)

    def read(self, columns: list[str], sequence: str, low: int, high: int) -> Iterator[pa.RecordBatch]:
        wanted = (ds.field(sequence) >= low) & (ds.field(sequence) <= high)
        yield from self._dataset.scanner(columns=columns, filter=wanted).to_batches()


def _open_delta(spec: TableSpec) -> PositionScan | None:
    from deltalake.exceptions import DeltaProtocolError

    from penstock.spark.tables.delta import load_delta

    table = load_delta(spec)
    try:
        return None if table is None else _DatasetScan(table.to_pyarrow_dataset())
    except DeltaProtocolError as error:
        raise Unsupported(f"{spec.where} has features that cannot be read without Spark") from error


class _IcebergScan:
    def __init__(self, table: CatalogTable) -> None:
        self._table = table
        self.columns = frozenset(field.name for field in table.schema().fields)

    def read(self, columns: list[str], sequence: str, low: int, high: int) -> Iterator[pa.RecordBatch]:
        wanted = f"{sequence} >= {low} and {sequence} <= {high}"
        yield from self._table.scan(wanted, tuple(columns)).to_arrow_batch_reader()


def _open_iceberg(spec: TableSpec) -> PositionScan | None:
    from penstock.spark.tables.iceberg import load_iceberg

    table = load_iceberg(spec)
    return None if table is None else _IcebergScan(table)


def _open_parquet(spec: TableSpec) -> PositionScan | None:
    store = open_store(spec.store)
    listed = loop_thread().run(store.list(""))
    paths = [info for info in listed if info.key.endswith(".parquet") and not _is_hidden(info.key)]
    if not paths:
        loop_thread().run(store.close())
        return None
    return _FolderScan(store, {info.key: info.size for info in paths})


def _is_hidden(key: str) -> bool:
    return any(part.startswith(("_", ".")) and "=" not in part for part in key.split("/"))


class _FolderScan:
    """Footers are read once; of each file only the row groups and columns that are asked for."""

    def __init__(self, store: ObjectStore, sizes: dict[str, int]) -> None:
        self._store = store
        self._sizes = sizes
        self._footers: dict[str, pq.FileMetaData] = {}
        self.columns = frozenset(self._open(min(sizes)).schema_arrow.names)

    def _open(self, key: str) -> pq.ParquetFile:
        source = pa.PythonFile(_StoredFile(self._store, key, self._sizes[key]), mode="r")
        file = pq.ParquetFile(source, metadata=self._footers.get(key))
        self._footers[key] = file.metadata
        return file

    def read(self, columns: list[str], sequence: str, low: int, high: int) -> Iterator[pa.RecordBatch]:
        wanted = (ds.field(sequence) >= low) & (ds.field(sequence) <= high)
        for key in self._sizes:
            known = self._footers.get(key)
            groups = None if known is None else _groups(known, sequence, low, high)
            if groups == []:
                continue
            file = self._open(key)
            groups = _groups(file.metadata, sequence, low, high)
            for batch in file.iter_batches(row_groups=groups, columns=columns) if groups else ():
                yield batch.filter(wanted)


def _groups(footer: pq.FileMetaData, sequence: str, low: int, high: int) -> list[int]:
    """The row groups that may hold such rows."""
    found = []
    for group in range(footer.num_row_groups):
        row_group = footer.row_group(group)
        columns = [row_group.column(place) for place in range(row_group.num_columns)]
        stats = next((column.statistics for column in columns if column.path_in_schema == sequence), None)
        if stats is None or not stats.has_min_max or (stats.max >= low and stats.min <= high):
            found.append(group)
    return found


class _StoredFile(io.RawIOBase):
    """An object as a file that is read in parts."""

    def __init__(self, store: ObjectStore, key: str, size: int) -> None:
        self._store = store
        self._key = key
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        length = min(self._size - self._at if size < 0 else size, self._size - self._at)
        if length <= 0:
            return b""
        wanted = ByteRange(start=self._at, length=length)

        async def fetch() -> bytes:
            blob = await retry(
                lambda: self._store.get(self._key, wanted), _POLICY, clock=SYSTEM_CLOCK, rng=SYSTEM_RNG
            )
            return bytes(blob.data)

        try:
            data = loop_thread().run(fetch())
        except NotFound as error:
            raise Unavailable(f"{self._key} was removed while it was read; look again") from error
        self._at += len(data)
        return data
