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
    """A Parquet file that a task has stored and reports to the driver. It is not part of the table yet."""

    path: str
    """Relative to the table's folder, or a full address if the table lists full addresses."""
    size: int
    rows: int
    partition: PartitionValues = ()
    stats: str = ""
    """Statistics in Delta's format, as JSON; empty for other formats."""
    footer: bytes = b""
    """The Parquet footer, for table formats that store its column statistics separately."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLayout:
    """The layout of the files that tasks write. It is sent to the tasks and may contain secrets."""

    store: StoreConfig
    rows: pa.Schema
    """The schema of the rows that the table accepts."""
    files: pa.Schema
    """The schema of the files, which may omit the partition columns."""
    address: str = ""
    """The prefix of a file's path if the table lists full addresses."""
    partition_by: tuple[str, ...] = ()
    compression: str = "snappy"
    target_file_bytes: int
    staged: bool = False
    """Whether files have a staged name until the commit, since readers read every Parquet file they find."""
    statistics: Literal["delta", "footer", "none"] = "none"

    @property
    def keeps_partition_columns(self) -> bool:
        return all(name in self.files.names for name in self.partition_by)


class Table(Protocol):
    """Micro-batches of files, each added once under (app, version).

    `app` is the id of the streaming query, `version` the number of the micro-batch. Spark repeats only the
    last micro-batch.
    """

    def prepare(self, schema: StructType) -> None:
        """Create the table if it is absent, otherwise check that the rows fit it. Finish interrupted commits.

        Raise `SchemaMismatch` if the rows do not fit, or another error if the location cannot be written.
        """
        ...

    def check(self, schema: StructType) -> bool:
        """Return whether the table exists. Raise as `prepare` if the rows do not fit it. Change nothing."""
        ...

    def layout(self, schema: StructType) -> FileLayout:
        """Return the layout for files with these rows. The table must be prepared."""
        ...

    def last_version(self, app: str) -> int | None:
        """Return the number of the last micro-batch of `app` in the table, or None."""
        ...

    def commit(self, app: str, version: int, files: Sequence[DataFile]) -> bool:
        """Add all of the files or none. Return False, without a change, if the table has this micro-batch.

        Raise `VersionBehind`, without a change, if the table has a later micro-batch. After any other error
        the outcome may be unknown; committing again is safe. No file is ever deleted.
        """
        ...

    def rows_by_version(self, app: str) -> dict[int, int]:
        """Return the number of rows that each micro-batch of `app` added, as recorded in the table."""
        ...

    def row_count(self) -> int:
        """Return the current number of rows in the table."""
        ...


def one_time_app() -> str:
    """Return a new app id for a write that is never repeated."""
    return _ONE_TIME + mint_ulid(SYSTEM_CLOCK.now_ms(), SYSTEM_RNG)


def is_one_time(app: str) -> bool:
    """Return whether `app` identifies a write that is never repeated, whose version need not be kept."""
    return app.startswith(_ONE_TIME) and is_ulid(app[len(_ONE_TIME) :])
