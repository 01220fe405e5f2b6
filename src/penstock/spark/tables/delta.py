"""A Delta table: tasks write its files, and one log entry adds them to the table.

A micro-batch is added once, however often it is committed and by however many processes:

1. A commit reloads the table and reads the last version of its app. If that is this version, nothing is left
   to do.
2. It writes its files and (app, version) as one log entry. The store creates the entry only if it is absent.
3. If another writer has added an entry since step 1, the library reads that entry first. An append of another
   app does no harm. An entry of our app makes the commit fail. It restarts at step 1 and finds the version.
4. If the response is lost, step 1 shows whether the entry was written. An entry that is still being written
   is case 3.

In a local folder, a power cut may still lose a visible entry. It is synced before it is reported, even if
step 1 finds it: its writer may have died before it could sync.
"""

from __future__ import annotations

import json
import logging
import os
import re
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import pyarrow as pa
from pyspark.sql.types import StructType

from penstock.clock import SYSTEM_CLOCK
from penstock.errors import (
    Conflict,
    NotFound,
    OutcomeUnknown,
    PenstockError,
    PermissionDenied,
    Unavailable,
    Unsupported,
)
from penstock.objects import StoreAddress
from penstock.spark.errors import SchemaMismatch, version_behind
from penstock.spark.tables.schema import arrow_schema, check_partitioning, check_rows_fit
from penstock.spark.tables.spec import TableSpec
from penstock.spark.tables.table import DataFile, FileLayout
from penstock.storage import FileSystem, OsFileSystem, explain

try:
    from deltalake import CommitProperties, DeltaTable, Transaction
    from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
    from deltalake.schema import Schema
    from deltalake.transaction import AddAction
except ImportError as error:
    raise Unsupported(
        "Delta tables need the package deltalake; run `pip install 'penstock[spark]'`"
    ) from error

Change: TypeAlias = Callable[[DeltaTable, CommitProperties], object]
"""A function that writes one log entry with the given properties."""

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
_FILES: Final[FileSystem] = OsFileSystem()
_LOG: Final = "_delta_log"
_FAILURES: Final = (DeltaError, OSError)
_RULES: Final = ("delta.generationExpression", "delta.identity", "delta.invariants")


class DeltaLog:
    """A `Table` in the Delta format. Every call rereads the log: another process may have written to it."""

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
        folder = _local_folder(spec)
        try:
            if folder is not None:
                _FILES.make_dirs(os.path.join(folder, _LOG))
            DeltaTable.create(
                spec.path,
                Schema.from_arrow(rows),
                mode="ignore",
                partition_by=list(spec.partition_by),
                storage_options=_storage(spec),
            )
        except _FAILURES as error:
            raise _failure(error, spec, "cannot be created") from None
        except PenstockError as error:
            raise type(error)(f"{spec.where} cannot be created: {error}") from None
        created = load_delta(spec)
        if created is None:
            raise Unavailable(f"{spec.where} disappeared after its creation; is another process removing it?")
        self._sync(0, own_files=True)
        _log.info("created %s", spec.where)
        return created

    def _check(self, rows: pa.Schema, table: DeltaTable) -> None:
        where = self._spec.where
        _check_features(table, where)
        check_rows_fit(rows, pa.schema(table.schema().to_arrow()), where, may_omit=True)
        divided = tuple(table.metadata().partition_columns)
        if self._spec.partition_by not in ((), divided):
            raise SchemaMismatch(
                f"partitionBy: {where} is partitioned by ({', '.join(divided)}), not by "
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

    def change(self, app: str, version: int, rows: int, apply: Change, *, own_files: bool = True) -> bool:
        """Run `apply` under the transaction (app, version), in the steps above. Return what `commit` returns.

        Do nothing if there are no rows. With `own_files`, the files that `apply` adds are already durable;
        otherwise sync them here.
        """
        for _ in range(_ATTEMPTS):
            table = self._load()
            last = table.transaction_version(app)
            if last == version:
                self._sync(None, app=app, own_files=own_files)
                return False
            if last is not None and last > version:
                raise version_behind(self._spec.where, app, version, last)
            seen = table.version()
            if not rows:
                return True
            if self._apply(table, app, version, rows, apply):
                self._sync(seen, own_files=own_files)
                return True
        raise Conflict(
            f"{self._spec.where}: {_ATTEMPTS} commits conflicted with other writers; start the query again "
            "to retry"
        )

    def _apply(self, table: DeltaTable, app: str, version: int, rows: int, apply: Change) -> bool:
        """Write the log entry. Return False if another writer's entry came first."""
        properties = CommitProperties(
            app_transactions=[Transaction(app, version)],
            custom_metadata={_APP: app, _VERSION: str(version), _ROWS: str(rows)},
        )
        try:
            apply(table, properties)
        except CommitFailedError as error:
            _log.info("%s: %s; checking again", self._spec.where, _text(error))
            return False
        except _FAILURES as error:
            if self.last_version(app) == version:
                return True
            raise OutcomeUnknown(
                f"{self._spec.where}: it is not known whether micro-batch {version} was committed "
                f"({_text(error)}); start the query again, which checks and is safe"
            ) from None
        return True

    def _sync(self, since: int | None, *, app: str = "", own_files: bool) -> None:
        """Make the log durable from entry `since` on, or from the last entry of `app` if `since` is None."""
        folder = _local_folder(self._spec)
        if folder is None:
            return
        try:
            newest = _newest(folder)
            first = _last_entry_of(app, folder, newest) if since is None else since
            if not own_files:
                _sync_added(folder, first, newest)
            _sync_log(folder, first)
        except PenstockError as error:
            raise OutcomeUnknown(
                f"{self._spec.where} was written but a power cut could still undo it ({error}); check the "
                "device, then start the query again"
            ) from None

    def rows_by_version(self, app: str) -> dict[int, int]:
        """See `Table.rows_by_version`. It covers the retention of the log (30 days by default)."""
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
                f"{self._spec.where} no longer exists; was it removed while the query was running? "
                "Start the query again"
            )
        return table


def load_delta(spec: TableSpec) -> DeltaTable | None:
    """Return the current table, or None if it does not exist. Raise `Unavailable` or `PermissionDenied`."""
    try:
        return DeltaTable(spec.path, storage_options=_storage(spec))
    except TableNotFoundError:
        return None
    except _FAILURES as error:
        raise _failure(error, spec, "cannot be read") from None


def _local_folder(spec: TableSpec) -> str | None:
    """Return the table's local folder, or None for a remote store, where every write is durable."""
    address = StoreAddress.parse(spec.path)
    return os.path.abspath(os.path.expanduser(address.path)) if address.scheme == "file" else None


def _entry(folder: str, version: int) -> str:
    return os.path.join(folder, _LOG, f"{version:020}.json")


def _log_names(folder: str) -> list[tuple[int, str]]:
    """Return (version, name) for the log's files that have a version: entries and checkpoints."""
    try:
        names = os.listdir(os.path.join(folder, _LOG))
    except OSError as error:
        raise explain(error, folder, "list the log of") from error
    return [(int(name[:20]), name) for name in names if re.fullmatch(r"\d{20}\..+", name)]


def _newest(folder: str) -> int:
    return max((version for version, name in _log_names(folder) if name.endswith(".json")), default=-1)


def _actions(folder: str, version: int) -> list[dict[str, dict[str, object]]]:
    return [json.loads(line) for line in _FILES.read(_entry(folder, version)).splitlines() if line]


def _last_entry_of(app: str, folder: str, newest: int) -> int:
    """Return the last entry with a transaction of `app`, or the oldest entry if there is none."""
    for version in range(newest, -1, -1):
        try:
            actions = _actions(folder, version)
        except NotFound:
            return version + 1
        if any(action["txn"].get("appId") == app for action in actions if "txn" in action):
            return version
    return 0


def _sync_added(folder: str, first: int, newest: int) -> None:
    """Sync the data files that the entries from `first` to `newest` add, and their folders."""
    added = {
        os.path.join(folder, urllib.parse.unquote(str(action["add"]["path"])))
        for version in range(first, newest + 1)
        for action in _actions(folder, version)
        if "add" in action
    }
    for path in sorted(added):
        _sync_file(path)
    # A partition's folder may be new, so its parent folders are synced too.
    folders = {folder}
    for path in added:
        parent = os.path.dirname(path)
        while parent.startswith(folder + os.sep):
            folders.add(parent)
            parent = os.path.dirname(parent)
    for path in sorted(folders):
        _FILES.sync_dir(path)


def _sync_log(folder: str, first: int) -> None:
    # `first` is the entry before ours: its writer may not sync.
    for version, name in sorted(_log_names(folder)):
        if version >= first:
            _sync_file(os.path.join(folder, _LOG, name))
    _sync_file(os.path.join(folder, _LOG, "_last_checkpoint"))
    _FILES.sync_dir(os.path.join(folder, _LOG))
    if first == 0:
        _FILES.sync_dir(folder)
        _FILES.sync_dir(os.path.dirname(folder))


def _sync_file(path: str) -> None:
    """Sync a file that another process wrote. Ignore it if it was removed in the meantime."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        return
    except OSError as error:
        raise explain(error, path, "make durable") from error


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
    """Raise `Unsupported` if the table has rules that appending files does not enforce."""
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
            f"{where} has rules that this sink does not enforce ({', '.join(rules)}); drop them, or write to "
            "another table and merge from there"
        )


def _text(error: BaseException) -> str:
    """Return the first line of the error without addresses: an address may contain a signature."""
    return re.sub(r"https?://\S+", "(address)", str(error).partition("\n")[0])[:300]


def _failure(error: Exception, spec: TableSpec, what: str) -> PenstockError:
    text = _text(error)
    remote = StoreAddress.parse(spec.path).scheme != "file"
    if re.search(
        r"[Pp]ermission|denied|PermissionDenied|Forbidden|403|create local directory|access", str(error)
    ):
        hint = "check the store.* options" if remote else "check the folder and its permissions"
        return PermissionDenied(f"{spec.where} {what}: {text}; {hint}")
    return Unavailable(f"{spec.where} {what}: {text}")
