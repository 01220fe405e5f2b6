"""Writing the rows of a task as Parquet files in the table's folder. Readers do not see them yet.

Rows are collected per partition value until they fill a row group, and row groups until they fill a file.
Memory is bounded for the whole task: if the rows have many partition values, the largest files are finished
early.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import decimal
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.blocking import loop_thread
from penstock.clock import SYSTEM_CLOCK
from penstock.errors import InvalidInput
from penstock.ids import SYSTEM_RNG, mint_ulid
from penstock.objects import ObjectStore
from penstock.retry import RetryPolicy, retry
from penstock.spark.tables.table import DataFile, FileLayout, PartitionValues
from penstock.spark.worker import worker_store

ROW_GROUP_BYTES: Final = 64 << 20
"""Bytes of rows in memory, before encoding. Larger groups do not compress better and slow selective reads."""
WAITING_BYTES_MAX: Final = 256 << 20
OPEN_FILES_MAX: Final = 100

_POLICY: Final = RetryPolicy(deadline_s=60.0)


def staged_key(path: str) -> str:
    """Return the staged key of `path`, for a folder whose readers read every Parquet file they find."""
    return f"_penstock/staging/{path.rsplit('/', 1)[-1]}.staged"


def write_parts(layout: FileLayout, batches: Iterator[pa.RecordBatch]) -> list[DataFile]:
    """Store the rows as files of `layout` and return the files. Every file is durable on return.

    Raise what the store raises. The files already stored then remain, but the table does not list them.
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
        """Finish the largest files while too many are open or they take too much memory."""
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
    """A complete Parquet file in memory."""

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
        """The bytes of the finished row groups."""
        return int(self._sink.tell())

    @property
    def held_bytes(self) -> int:
        """The approximate memory of this file."""
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


NULL_FOLDER: Final = "__HIVE_DEFAULT_PARTITION__"
"""The folder name that readers of partitioned tables interpret as null."""

_FOLDER_TEXT_MAX: Final = 100
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_.+-]")
# Characters that readers would split at or decode, and characters that the stores' keys do not allow.
_MISREAD: Final = re.compile(r'[\x00-\x1f"#%\'*/:=?\\{}\[\]^<>|`~\x7f-\x9f]')


def split(
    batch: pa.RecordBatch, columns: Sequence[str], *, keep: bool
) -> list[tuple[PartitionValues, pa.RecordBatch]]:
    """Split the rows of `batch` by the values of `columns`. Keep the order of rows with equal values.

    With `keep`, the columns stay in the rows. Without it, the empty string counts as null: folder names
    cannot distinguish the two, and other writers do the same.
    """
    if not batch.num_rows:
        return []
    rest = batch if keep else batch.drop_columns(list(columns))
    encoded = [_encode(batch.column(name), keep) for name in columns]
    codes = np.zeros(batch.num_rows, dtype=np.int64)
    for indices, texts in encoded:
        codes = codes * len(texts) + indices
    starts, order = _groups(codes)
    if order is not None:
        rest = rest.take(pa.array(order))
    found: list[tuple[PartitionValues, pa.RecordBatch]] = []
    for start, end in zip(starts, [*starts[1:], batch.num_rows], strict=True):
        row = int(order[start]) if order is not None else start
        values = tuple(
            (name, texts[indices[row]]) for name, (indices, texts) in zip(columns, encoded, strict=True)
        )
        found.append((values, rest.slice(start, end - start)))
    return found


def _groups(codes: np.ndarray) -> tuple[list[int], np.ndarray | None]:
    """Return the start of each run of equal codes, and the order of rows that groups them into runs.

    The order is None if the rows need no reordering.
    """
    if (codes == codes[0]).all():
        return [0], None
    order = np.argsort(codes, kind="stable")
    ordered = codes[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=ordered[0] - 1))
    return [int(start) for start in starts], order


def _encode(column: pa.Array, keep: bool) -> tuple[np.ndarray, list[str | None]]:
    """Return the index of each row's value, and the distinct values as text."""
    encoded = column.dictionary_encode(null_encoding="encode")
    return encoded.indices.to_numpy(zero_copy_only=False), [
        _text(value) if value != "" or keep else None for value in encoded.dictionary.to_pylist()
    ]


def _text(value: object) -> str | None:
    if isinstance(value, bool):
        return "true" if value else "false"
    return None if value is None else str(value)


def safe_folder(partition: PartitionValues) -> str:
    """Return a folder name for these values. It is only informative: the table stores the exact values."""
    return "/".join(f"{_clean(name)}={_clean(value)}" for name, value in partition)


def _clean(text: str | None) -> str:
    return NULL_FOLDER if text is None else _UNSAFE.sub("_", text)[:_FOLDER_TEXT_MAX]


def exact_folder(partition: PartitionValues) -> str:
    """Return the folder name from which readers parse the values.

    Raise `InvalidInput` for a value that cannot be part of a folder name.
    """
    for name, value in partition:
        misread = _MISREAD.search(value or "")
        if misread:
            raise InvalidInput(
                f"partition column {name!r} has the value {value!r}: not all readers understand "
                f"{misread.group()!r} in the name of a folder. Replace it in the query "
                f"(regexp_replace({name}, ...)), partition by another column, or write a Delta table"
            )
    return "/".join(f"{name}={NULL_FOLDER if value is None else value}" for name, value in partition)


_COLUMNS_MAX: Final = 128
"""The most columns with statistics; more would bloat the log.

Readers expect the first 32 columns of the table, but the rows may have another order.
"""
_STATISTIC_TEXT_MAX: Final = 64
_SURROGATES: Final = (0xD800, 0xDFFF)
_FLOAT_MAX: Final = {"FLOAT": (2 - 2**-23) * 2.0**127, "DOUBLE": (2 - 2**-52) * 2.0**1023}

Plain: TypeAlias = str | int | float | bool | msgspec.Raw
Bounds: TypeAlias = tuple[Plain, Plain]


def statistics_columns(schema: pa.Schema) -> list[str]:
    """Return the columns whose minimum and maximum are useful: neither nested nor binary."""
    return _plain_columns(schema)[:_COLUMNS_MAX]


def _plain_columns(schema: pa.Schema) -> list[str]:
    return [field.name for field in schema if not (pa.types.is_nested(field.type) or _is_bytes(field.type))]


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def delta_stats(footer: pq.FileMetaData, schema: pa.Schema) -> str:
    """Return the `stats` of an add action: row count, null counts of the plain columns, and value bounds.

    Bounds may be wider than the values: long texts are cut, and floats get the full range. All bounds are
    omitted if any column with values cannot have them.
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
    bounded = {name: pair for name, pair in bounds.items() if pair is not None}
    if bounded and len(bounded) == len(bounds) and len(_plain_columns(schema)) <= _COLUMNS_MAX:
        found["minValues"] = {name: low for name, (low, _) in bounded.items()}
        found["maxValues"] = {name: high for name, (_, high) in bounded.items()}
    found["nullCount"] = nulls
    return msgspec.json.encode(found).decode()


def _bounds(groups: Sequence[pq.Statistics | None]) -> Bounds | None:
    # A group that contains only nulls has no minimum and does not affect the bounds of the others.
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
        return None  # a date out of Python's range, or a text that is not valid UTF-8
    if isinstance(low, str):
        end = _cut_up(high)
        return None if end is None else (low[:_STATISTIC_TEXT_MAX], end)
    least, greatest = _plain(low), _plain(high)
    return None if least is None or greatest is None else (least, greatest)


def _float_bounds(groups: Sequence[pq.Statistics]) -> Bounds | None:
    """Return the full range of the type, or None if a bound is infinite.

    The footer does not show whether a group contains NaN, and engines order NaN differently.
    """
    ends = [end for group in groups if group.has_min_max for end in (group.min, group.max)]
    most = _FLOAT_MAX[groups[0].physical_type]
    return None if any(math.isinf(end) for end in ends) else (-most, most)


def _cut_up(text: str) -> str | None:
    """Return a short text that sorts at or after `text`, or None if none exists."""
    if len(text) <= _STATISTIC_TEXT_MAX:
        return text
    cut = text[:_STATISTIC_TEXT_MAX].rstrip(chr(0x10FFFF))
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
        # Write all digits: readers do not accept exponents here.
        return msgspec.Raw(format(value, "f").encode())
    return value if isinstance(value, bool | int) else None
