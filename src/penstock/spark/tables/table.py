"""The interface of a table for the writers, the pipeline and the audit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeAlias

import pyarrow as pa

from penstock.clock import SYSTEM_CLOCK
from penstock.ids import SYSTEM_RNG, is_ulid, mint_ulid
from penstock.objects import StoreConfig

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_ONE_TIME: Final = "write-"

PartitionValues: TypeAlias = tuple[tuple[str, str | None], ...]
"""(column, value as text) for each partition column, in the table's order; None is null."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """A Parquet file a task has stored, not yet part of the table: what the task sends to the driver."""

    path: str
    """Below the table's folder, or a whole address where the table keeps its files elsewhere."""
    size: int
    rows: int
    partition: PartitionValues = ()
    stats: str = ""
    """Delta's statistics, as JSON."""
    footer: bytes = b""
    """The Parquet footer's column statistics, where the table format keeps them on its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLayout:
    """The layout of files that tasks write for a table. Sent to the tasks; it may contain secrets."""

    store: StoreConfig
    rows: pa.Schema
    """The rows as the table takes them."""
    files: pa.Schema
    """The columns in the files."""
    address: str = ""
    """What goes before a file's path when the table lists whole addresses."""
    partition_by: tuple[str, ...] = ()
    compression: str = "snappy"
    target_file_bytes: int
    staged: bool = False
    """Readers take every Parquet file in the folder, so files wait under another name until committed."""
    statistics: Literal["delta", "footer", "none"] = "none"

    @property
    def keeps_partition_columns(self) -> bool:
        return all(name in self.files.names for name in self.partition_by)


class Table(Protocol):
    """Micro-batches of files, each added once under (app, version).

    `app` is the streaming query's id, `version` the micro-batch's. Spark runs only its last micro-batch
    again.
    """

    def prepare(self, schema: StructType) -> None:
        """Create the table if it is absent, else check that the rows fit it, and finish interrupted commits.

        Raises `SchemaMismatch` naming the column and what to do, or says why the place cannot be written.
        """
        ...

    def check(self, schema: StructType) -> bool:
        """Return whether the table exists. Raises as `prepare` if the rows do not fit it; changes nothing."""
        ...

    def layout(self, schema: StructType) -> FileLayout:
        """Return the layout of the rows' files. The table is prepared."""
        ...

    def last_version(self, app: str) -> int | None:
        """Return the last micro-batch of `app` in the table."""
        ...

    def commit(self, app: str, version: int, files: Sequence[DataFile]) -> bool:
        """Add the files, all or none. False when the table has this micro-batch: nothing is done then.

        Raises `VersionBehind` when it has a later one, and leaves the table as it is. After any other error
        the outcome may be unknown; committing again is safe. No file is ever deleted.
        """
        ...

    def rows_by_version(self, app: str) -> dict[int, int]:
        """Return the rows that each micro-batch of `app` added, as the table itself records it."""
        ...

    def row_count(self) -> int:
        """Return the rows in the table now."""
        ...


def one_time_app() -> str:
    """Return an app for a write that is never repeated."""
    return _ONE_TIME + mint_ulid(SYSTEM_CLOCK.now_ms(), SYSTEM_RNG)


def is_one_time(app: str) -> bool:
    """Return whether `app` is of a write that is never repeated, so that its version need not be kept."""
    return app.startswith(_ONE_TIME) and is_ulid(app[len(_ONE_TIME) :])
