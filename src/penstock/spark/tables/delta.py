"""A Delta table: tasks write its files, one entry of its log makes them rows.

Why a micro-batch is in the table once, whoever commits it and however often:

1. A commit loads the table afresh and asks it for the last version of its app. Equal: it is there, done.
2. It writes its files and (app, version) as one log entry, which the store creates if absent.
3. If somebody wrote an entry since step 1, the library reads it first. Another app's append is no obstacle;
   an entry with our app is, and the commit fails: we start again at step 1, and find the version there.
4. If the answer is lost, step 1 tells whether the entry was written. One still on its way is case 3.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import pyarrow as pa
from pyspark.sql.types import StructType

from penstock.clock import SYSTEM_CLOCK
from penstock.errors import (
    Conflict,
    OutcomeUnknown,
    PenstockError,
    PermissionDenied,
    Unavailable,
    Unsupported,
)
from penstock.objects.settings import StoreAddress
from penstock.spark.tables.errors import SchemaMismatch, version_behind
from penstock.spark.tables.schema import arrow_schema, check_partitioning, check_rows_fit
from penstock.spark.tables.spec import TableSpec
from penstock.spark.tables.table import DataFile, FileLayout

try:
    from deltalake import CommitProperties, DeltaTable, Transaction
    from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
    from deltalake.schema import Schema
    from deltalake.transaction import AddAction
except ImportError as error:
    raise Unsupported(
        "Delta tables need the package deltalake; run `pip install 'penstock[spark]'`"
    ) from error

__all__ = ["Change", "DeltaLog", "load_delta"]

Change: TypeAlias = Callable[[DeltaTable, CommitProperties], object]
"""Writes one log entry with these properties."""

_log = logging.getLogger(__name__)

_ATTEMPTS: Final = 5
_APP: Final = "penstock.app"
_VERSION: Final = "penstock.version"
_ROWS: Final = "penstock.rows"
_KNOWN_FEATURES: Final = frozenset(
    {
        "appendOnly",
        "checkConstraints",
        "deletionVectors",
        "domainMetadata",
        "invariants",
        "timestampNtz",
        "v2Checkpoint",
        "vacuumProtocolCheck",
    }
)
_FAILURES: Final = (DeltaError, OSError)
_RULES: Final = ("delta.generationExpression", "delta.identity", "delta.invariants")


class DeltaLog:
    """See `Table`. Every call reads the log anew: another process may have written meanwhile."""

    def __init__(self, spec: TableSpec) -> None:
        self._spec = spec
        self._divided: tuple[str, ...] | None = None

    def prepare(self, schema: StructType) -> None:
        """See `Table.prepare`. A new table gets the columns of the rows, all of them nullable."""
        rows = arrow_schema(schema)
        table = load_delta(self._spec) or self._create(rows)
        self._check(rows, table)
        self._divided = tuple(table.metadata().partition_columns)

    def check(self, schema: StructType) -> bool:
        """See `Table.check`."""
        rows = arrow_schema(schema)
        table = load_delta(self._spec)
        if table is None:
            check_partitioning(rows, self._spec.partition_by, self._spec.where)
            return False
        self._check(rows, table)
        return True

    def _create(self, rows: pa.Schema) -> DeltaTable:
        spec = self._spec
        check_partitioning(rows, spec.partition_by, spec.where)
        try:
            DeltaTable.create(
                spec.path,
                Schema.from_arrow(rows),
                mode="ignore",
                partition_by=list(spec.partition_by),
                storage_options=_storage(spec),
            )
        except _FAILURES as error:
            raise _failure(error, spec, "cannot be created") from None
        created = load_delta(spec)
        if created is None:
            raise Unavailable(f"{spec.where} was created and is not there; is somebody removing it?")
        _log.info("created %s", spec.where)
        return created

    def _check(self, rows: pa.Schema, table: DeltaTable) -> None:
        where = self._spec.where
        _check_features(table, where)
        check_rows_fit(rows, pa.schema(table.schema().to_arrow()), where, may_omit=True)
        divided = tuple(table.metadata().partition_columns)
        if self._spec.partition_by not in ((), divided):
            raise SchemaMismatch(
                f"partitionBy: {where} is divided by ({', '.join(divided)}), not by "
                f"({', '.join(self._spec.partition_by)}); leave the option out, or write to another table"
            )
        check_partitioning(rows, divided, where)

    def layout(self, schema: StructType) -> FileLayout:
        """See `Table.layout`."""
        rows = arrow_schema(schema)
        divided = self._divided
        if divided is None:
            divided = tuple(self._load().metadata().partition_columns)
        return FileLayout(
            store=self._spec.store,
            rows=rows,
            files=pa.schema([field for field in rows if field.name not in divided]),
            partition_by=divided,
            compression=self._spec.compression,
            target_file_bytes=self._spec.target_file_bytes,
            statistics="delta",
        )

    def last_version(self, app: str) -> int | None:
        """See `Table.last_version`."""
        table = load_delta(self._spec)
        return None if table is None else table.transaction_version(app)

    def commit(self, app: str, version: int, files: Sequence[DataFile]) -> bool:
        """See `Table.commit`."""
        rows = sum(file.rows for file in files)
        return self.change(app, version, rows, lambda table, properties: _append(table, files, properties))

    def change(self, app: str, version: int, rows: int, apply: Change) -> bool:
        """`apply` under the transaction (app, version), as the steps above tell. Answers as `commit` does.

        Nothing is applied when there are no rows.
        """
        for _ in range(_ATTEMPTS):
            table = self._load()
            last = table.transaction_version(app)
            if last == version:
                return False
            if last is not None and last > version:
                raise version_behind(self._spec.where, app, version, last)
            if not rows or self._apply(table, app, version, rows, apply):
                return True
        raise Conflict(
            f"{self._spec.where}: {_ATTEMPTS} commits lost against other writers; it will be tried again "
            "when the query is started again"
        )

    def _apply(self, table: DeltaTable, app: str, version: int, rows: int, apply: Change) -> bool:
        """Write the log entry. False: somebody else's came first, look again."""
        properties = CommitProperties(
            app_transactions=[Transaction(app, version)],
            custom_metadata={_APP: app, _VERSION: str(version), _ROWS: str(rows)},
        )
        try:
            apply(table, properties)
        except CommitFailedError as error:
            _log.info("%s: %s; looking again", self._spec.where, _text(error))
            return False
        except _FAILURES as error:
            if self.last_version(app) == version:
                return True
            raise OutcomeUnknown(
                f"{self._spec.where}: whether micro-batch {version} was committed cannot be told "
                f"({_text(error)}); starting the query again is safe and settles it"
            ) from None
        return True

    def rows_by_version(self, app: str) -> dict[int, int]:
        """See `Table.rows_by_version`. Goes back as far as the log's own retention (30 days unless set)."""
        table = load_delta(self._spec)
        if table is None:
            return {}
        return {
            int(entry[_VERSION]): int(entry[_ROWS]) for entry in table.history() if entry.get(_APP) == app
        }

    def row_count(self) -> int:
        """See `Table.row_count`."""
        table = load_delta(self._spec)
        return 0 if table is None else int(table.count())

    def _load(self) -> DeltaTable:
        table = load_delta(self._spec)
        if table is None:
            raise Unavailable(
                f"{self._spec.where} is gone; was it removed while the query runs? Start the query again"
            )
        return table


def load_delta(spec: TableSpec) -> DeltaTable | None:
    """The table as it is now, or None. Raises `Unavailable` or `PermissionDenied`."""
    try:
        return DeltaTable(spec.path, storage_options=_storage(spec))
    except TableNotFoundError:
        return None
    except _FAILURES as error:
        raise _failure(error, spec, "cannot be read") from None


def _storage(spec: TableSpec) -> dict[str, str] | None:
    return spec.store_options or None


def _append(table: DeltaTable, files: Sequence[DataFile], properties: CommitProperties) -> None:
    now_ms = SYSTEM_CLOCK.now_ms()
    table.create_write_transaction(
        [_add_action(file, now_ms) for file in files],
        "append",
        table.schema(),
        partition_by=table.metadata().partition_columns,
        commit_properties=properties,
    )


def _add_action(file: DataFile, now_ms: int) -> AddAction:
    return AddAction(file.path, file.size, dict(file.partition), now_ms, True, file.stats)


def _check_features(table: DeltaTable, where: str) -> None:
    """Refuse a table with rules that appending files does not keep."""
    configuration = table.metadata().configuration
    rules = [key for key in configuration if key.startswith("delta.constraints.")]
    if configuration.get("delta.columnMapping.mode", "none") != "none":
        rules.append("delta.columnMapping")
    rules += [
        f"{field.name}: {key}"
        for field in table.schema().fields
        for key in field.metadata
        if key.startswith(_RULES)
    ]
    rules += sorted(set(table.protocol().writer_features or ()) - _KNOWN_FEATURES)
    if rules:
        raise Unsupported(
            f"{where} has rules that this sink does not keep ({', '.join(rules)}); drop them, or write to "
            "another table and merge from there"
        )


def _text(error: BaseException) -> str:
    """The first line: what follows may hold addresses with signatures."""
    return re.sub(r"https?://\S+", "(address)", str(error).partition("\n")[0])[:300]


def _failure(error: Exception, spec: TableSpec, what: str) -> PenstockError:
    text = _text(error)
    remote = StoreAddress.parse(spec.path).scheme != "file"
    if re.search(
        r"[Pp]ermission|denied|PermissionDenied|Forbidden|403|create local directory|access", str(error)
    ):
        hint = "check the store.* options" if remote else "check the folder and who may write to it"
        return PermissionDenied(f"{spec.where} {what}: {text}; {hint}")
    return Unavailable(f"{spec.where} {what}: {text}")
