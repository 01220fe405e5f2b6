"""A table of an Iceberg catalog: tasks write its files, and one commit adds them to the table.

A micro-batch is added once:

1. A commit loads the table and reads the last version of its app from the table's properties. If that is this
   version, nothing is left to do.
2. It requests one change from the catalog: the new snapshot together with the new version, on the condition
   that the snapshot of step 1 is still current.
3. If it is not, the catalog rejects the change. By default the library would retry on the current snapshot,
   even if another process has added the same micro-batch there. That retry is disabled; the commit restarts
   at step 1.
4. If the response is lost, step 1 shows whether the change was applied. If it is still being applied, both
   attempts are based on the same snapshot, so case 3 applies to one of them.
"""

from __future__ import annotations

import datetime as dt
import logging
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.types import StructType

from penstock.errors import Conflict, OutcomeUnknown, PermissionDenied, Unavailable, Unsupported
from penstock.objects import StoreConfig
from penstock.spark.errors import SchemaMismatch, version_behind
from penstock.spark.tables.schema import arrow_schema, check_partitioning, check_rows_fit, retype
from penstock.spark.tables.spec import TableSpec
from penstock.spark.tables.table import DataFile, FileLayout, is_one_time

try:
    from pyiceberg.catalog import Catalog, load_catalog
    from pyiceberg.exceptions import (
        CommitFailedException,
        NamespaceAlreadyExistsError,
        NoSuchTableError,
        TableAlreadyExistsError,
    )
    from pyiceberg.io.pyarrow import (
        compute_statistics_plan,
        data_file_statistics_from_parquet_metadata,
        parquet_path_to_id_mapping,
        schema_to_pyarrow,
    )
    from pyiceberg.manifest import DataFile as ManifestFile
    from pyiceberg.manifest import DataFileContent, FileFormat
    from pyiceberg.transforms import IdentityTransform
    from pyiceberg.typedef import Record
    from pyiceberg.types import BooleanType, DateType, IcebergType, IntegerType, LongType
except ImportError as error:
    raise Unsupported(
        "Iceberg tables need the package pyiceberg; run `pip install 'penstock[iceberg]'`"
    ) from error

if TYPE_CHECKING:
    from pyiceberg.table import Table as CatalogTable

_log = logging.getLogger(__name__)

_ATTEMPTS: Final = 10
_TXN: Final = "penstock.txn."
_APP: Final = "penstock.app"
_VERSION: Final = "penstock.version"
_ROWS: Final = "penstock.rows"
_RETRIES: Final = "commit.retry.num-retries"
_DATA_PATH: Final = "write.data.path"
_EPOCH: Final = dt.date(1970, 1, 1)
_S3: Final = {
    "s3.access-key-id": "access_key_id",
    "s3.endpoint": "endpoint",
    "s3.region": "region",
    "s3.secret-access-key": "secret_access_key",
    "s3.session-token": "session_token",
}
_catalogs: dict[tuple[int, tuple[tuple[str, str], ...]], Catalog] = {}


class IcebergTable:
    """A `Table` in the Iceberg format.

    The last version is kept indefinitely; the rows by version are kept until their snapshots expire.
    """

    def __init__(self, spec: TableSpec) -> None:
        self._spec = spec

    def prepare(self, schema: StructType) -> None:
        """See `Table.prepare`. Also create the namespace. Bytes and shorts become ints for Iceberg."""
        rows = _iceberg_rows(schema)
        self._check_fit(rows, load_iceberg(self._spec) or self._create(rows))

    def check(self, schema: StructType) -> bool:
        """See `Table.check`."""
        rows = _iceberg_rows(schema)
        table = load_iceberg(self._spec)
        if table is None:
            check_partitioning(rows, self._spec.partition_by, self._spec.where)
            return False
        self._check_fit(rows, table)
        return True

    def _check_fit(self, rows: pa.Schema, table: CatalogTable) -> None:
        where = self._spec.where
        check_rows_fit(rows, schema_to_pyarrow(table.schema()), where, may_omit=True)
        divided = _identity_columns(table, where)
        if self._spec.partition_by not in ((), divided):
            raise SchemaMismatch(
                f"partitionBy: {where} is partitioned by ({', '.join(divided)}), not by "
                f"({', '.join(self._spec.partition_by)}); leave the option out, or write to another table"
            )
        check_partitioning(rows, divided, where)

    def _create(self, rows: pa.Schema) -> CatalogTable:
        spec = self._spec
        check_partitioning(rows, spec.partition_by, spec.where)
        catalog, name = _catalog(spec), _identifier(spec)
        with _translated(f"{spec.where} cannot be created"):
            with suppress(NamespaceAlreadyExistsError):
                catalog.create_namespace(name[:-1])
            with (
                suppress(CommitFailedException, TableAlreadyExistsError),  # another process was faster
                catalog.create_table_transaction(name, rows) as creation,
                creation.update_spec() as division,
            ):
                for column in spec.partition_by:
                    division.add_identity(column)
        return self._load()

    def layout(self, schema: StructType) -> FileLayout:
        """See `Table.layout`."""
        return self.layout_of(self._load(), {field.name for field in schema.fields})

    def layout_of(self, table: CatalogTable, names: Collection[str] | None = None) -> FileLayout:
        """Return the layout for rows with the columns `names`, or with all columns if None."""
        held = schema_to_pyarrow(table.schema())
        fields = [field for field in held if names is None or field.name in names]
        folder = str(table.properties.get(_DATA_PATH) or f"{table.location()}/data").rstrip("/")
        return FileLayout(
            store=StoreConfig(url=_store_url(folder), options=_store_options(self._spec)),
            rows=pa.schema(fields),
            files=pa.schema(fields),
            address=folder,
            partition_by=_identity_columns(table, self._spec.where),
            compression=self._spec.compression,
            target_file_bytes=self._spec.target_file_bytes,
            statistics="footer",
        )

    def last_version(self, app: str) -> int | None:
        """See `Table.last_version`."""
        table = load_iceberg(self._spec)
        return None if table is None else _last_version(table, app)

    def commit(self, app: str, version: int, files: Sequence[DataFile]) -> bool:
        """See `Table.commit`."""
        for _ in range(_ATTEMPTS):
            table = self._load()
            last = _last_version(table, app)
            if last == version:
                return False
            if last is not None and last > version:
                raise version_behind(self._spec.where, app, version, last)
            if not files or self._append(table, app, version, files):
                return True
        raise Conflict(
            f"{self._spec.where}: {_ATTEMPTS} commits conflicted with other writers and nothing was "
            "committed; start the query again to retry"
        )

    def _append(self, table: CatalogTable, app: str, version: int, files: Sequence[DataFile]) -> bool:
        """Run steps 2 and 3. Return False if the table has changed."""
        rows = sum(file.rows for file in files)
        summary = {_APP: app, _VERSION: str(version), _ROWS: str(rows)}
        try:
            change = without_blind_retries(table).transaction()
            if not is_one_time(app):
                change.set_properties({_TXN + app: str(version)})
            with change.update_snapshot(snapshot_properties=summary).fast_append() as append:
                for file in files:
                    append.append_data_file(manifest_file(table, file))
            change.commit_transaction()
        except CommitFailedException as error:
            _log.info("%s: %s; checking again", self._spec.where, error)
            return False
        except Exception as error:
            if self.last_version(app) == version:
                return True
            raise OutcomeUnknown(
                f"{self._spec.where}: it is not known whether micro-batch {version} was committed "
                f"({type(error).__name__}); start the query again, which checks and is safe"
            ) from error
        return True

    def rows_by_version(self, app: str) -> dict[int, int]:
        """See `Table.rows_by_version`. It covers all snapshots that have not expired."""
        table = load_iceberg(self._spec)
        return {} if table is None else dict(_summaries(table, app))

    def row_count(self) -> int:
        """See `Table.row_count`."""
        table = load_iceberg(self._spec)
        return 0 if table is None else int(table.scan().count())

    def _load(self) -> CatalogTable:
        table = load_iceberg(self._spec)
        if table is None:
            raise Unavailable(
                f"{self._spec.where} no longer exists; was it removed while the query was running? "
                "Start the query again"
            )
        return table


def load_iceberg(spec: TableSpec) -> CatalogTable | None:
    """Return the current table, or None if it does not exist. Raise `Unavailable` if the catalog fails."""
    catalog = _catalog(spec)
    with _translated(f"{spec.where} cannot be read"):
        try:
            return catalog.load_table(_identifier(spec))
        except NoSuchTableError:
            return None


def without_blind_retries(table: CatalogTable) -> CatalogTable:
    """Disable the library's retries on this handle, so that a commit fails if the table has changed."""
    properties = {**table.metadata.properties, _RETRIES: "0"}
    table.metadata = table.metadata.model_copy(update={"properties": properties})
    return table


def manifest_file(table: CatalogTable, file: DataFile) -> ManifestFile:
    """Return the manifest entry of a file, with statistics from the footer that the task sent."""
    schema = table.schema()
    statistics = data_file_statistics_from_parquet_metadata(
        parquet_metadata=pq.read_metadata(pa.BufferReader(file.footer)),
        stats_columns=compute_statistics_plan(schema, table.metadata.properties),
        parquet_column_mapping=parquet_path_to_id_mapping(schema),
    )
    values = dict(file.partition)
    spec = table.spec()
    return ManifestFile.from_args(
        content=DataFileContent.DATA,
        file_path=file.path,
        file_format=FileFormat.PARQUET,
        partition=Record(
            *(_value(schema.find_type(field.source_id), values[field.name]) for field in spec.fields)
        ),
        file_size_in_bytes=file.size,
        sort_order_id=None,
        spec_id=spec.spec_id,
        equality_ids=None,
        key_metadata=None,
        **statistics.to_serialized_dict(),
    )


def _value(kind: IcebergType, text: str | None) -> str | int | bool | None:
    if text is None:
        return None
    if isinstance(kind, BooleanType):
        return text == "true"
    if isinstance(kind, IntegerType | LongType):
        return int(text)
    if isinstance(kind, DateType):
        return (dt.date.fromisoformat(text) - _EPOCH).days
    return text


def _last_version(table: CatalogTable, app: str) -> int | None:
    held = table.properties.get(_TXN + app)
    versions = [int(held)] if held is not None else []
    if is_one_time(app):
        versions += [version for version, _ in _summaries(table, app)]
    return max(versions, default=None)


def _summaries(table: CatalogTable, app: str) -> list[tuple[int, int]]:
    """Return (version, rows) of every snapshot of `app`."""
    summaries = (snapshot.summary.additional_properties for snapshot in table.snapshots() if snapshot.summary)
    return [
        (int(summary[_VERSION]), int(summary[_ROWS])) for summary in summaries if summary.get(_APP) == app
    ]


def _identity_columns(table: CatalogTable, where: str) -> tuple[str, ...]:
    """Return the partition columns of a table. Raise `Unsupported` if one has a transform."""
    columns = []
    for field in table.spec().fields:
        column = table.schema().find_column_name(field.source_id)
        if not isinstance(field.transform, IdentityTransform) or column != field.name:
            raise Unsupported(
                f"{where} is partitioned by {field.transform}({column}); this sink only writes tables that "
                "are partitioned by column values. Add a column with that value, or write to another table"
            )
        columns.append(field.name)
    return tuple(columns)


def _iceberg_rows(schema: StructType) -> pa.Schema:
    def widened(kind: pa.DataType) -> pa.DataType:
        return pa.int32() if kind in (pa.int8(), pa.int16()) else kind

    rows = arrow_schema(schema)
    return pa.schema([field.with_type(retype(field.type, widened)) for field in rows])


def _identifier(spec: TableSpec) -> tuple[str, ...]:
    return tuple(spec.table.split("."))


def _catalog(spec: TableSpec) -> Catalog:
    """Return this process's catalog. `catalog.name` names it; other options go to the library unchanged."""
    options = spec.catalog_options
    key = (os.getpid(), tuple(sorted(options.items())))
    catalog = _catalogs.get(key)
    if catalog is None:
        with _translated("the Iceberg catalog cannot be opened"):
            catalog = load_catalog(
                options.get("name", "default"), **{k: v for k, v in options.items() if k != "name"}
            )
        _catalogs[key] = catalog
    return catalog


def _store_url(folder: str) -> str:
    return f"s3://{folder[len('s3a://') :]}" if folder.startswith("s3a://") else folder


def _store_options(spec: TableSpec) -> dict[str, str]:
    """Return the `store.*` options, with the `catalog.s3.*` options as defaults."""
    given = spec.catalog_options
    found = {name: given[key] for key, name in _S3.items() if key in given}
    if found.get("endpoint", "").startswith("http://"):
        found["allow_http"] = "true"
    return {**found, **spec.store_options}


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """Translate failures of the library and of its dependencies into our errors.

    They have no common base class. The message shows only their class name: their text may contain an
    address with a password.
    """
    try:
        yield
    except PermissionError:
        raise PermissionDenied(f"{what}: permission denied; check the warehouse's folder") from None
    except Exception as error:  # noqa: BLE001  catalogs raise the errors of any client
        raise Unavailable(
            f"{what} ({type(error).__name__}); check the catalog.* options (type, uri, warehouse, ...) and "
            "that the catalog and its warehouse can be reached"
        ) from None
