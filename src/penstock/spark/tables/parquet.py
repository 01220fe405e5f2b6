"""A folder of Parquet files without a table format. Plain readers see each micro-batch once.

Readers read every Parquet file they find. A file gets its final name only once its micro-batch is decided:

1. Tasks store files under `_penstock/staging/`, which readers skip. No two tasks use the same name.
2. The driver decides: one compare-and-swap moves `_penstock/apps/<app>.json` from the previous micro-batch to
   this one and records the final names of its files. A driver whose swap fails reads the decision.
3. The driver publishes: it moves each staged file to its final name, then writes the micro-batch's record.
4. Before the next decision, and whenever the folder is opened, the driver finishes publishing a decision that
   has no record. A missing staged file has been published: nothing else removes it.

A crash before step 2 leaves unreferenced staged files. A crash after step 2 leaves a decision that is
finished later. A repeated micro-batch finds the decision, finishes it, and adds nothing. Two drivers that
publish the same decision move the same bytes to the same names.

The objects of a folder:

_penstock/schema.json                            the columns, written once
_penstock/apps/<app>.json                        the decision: a query's last micro-batch, by compare-and-swap
_penstock/commits/<app>/<version>-<rows>.json    one record for each published micro-batch
_penstock/staging/<file>.staged                  files that are not published yet

Readers may see the files of a micro-batch appear one after the other. Staged files that no decision in
`_penstock/apps/` names belong to failed or running attempts. You can delete those older than a day.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar, runtime_checkable

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.types import StructType

from penstock.blocking import loop_thread
from penstock.clock import SYSTEM_CLOCK
from penstock.errors import (
    ConfigError,
    Conflict,
    Corrupt,
    InvalidInput,
    NotFound,
    OutcomeUnknown,
    PenstockError,
    Unavailable,
)
from penstock.ids import SYSTEM_RNG
from penstock.objects import Blob, ByteRange, ObjectInfo, ObjectStore
from penstock.retry import RetryPolicy, retry
from penstock.spark.errors import SchemaMismatch, version_behind
from penstock.spark.tables.parts import staged_key
from penstock.spark.tables.schema import arrow_schema, check_partitioning, check_rows_fit
from penstock.spark.tables.spec import TableSpec
from penstock.spark.tables.table import DataFile, FileLayout, is_one_time
from penstock.spark.worker import worker_store
from penstock.storage import FileSystem, OsFileSystem, publish

_log = logging.getLogger(__name__)

_POLICY: Final = RetryPolicy(deadline_s=30.0)
_ATTEMPTS: Final = 5
_AT_ONCE: Final = 8
_TAIL_BYTES: Final = 64 << 10
SCHEMA: Final = "_penstock/schema.json"
APPS: Final = "_penstock/apps"
COMMITS: Final = "_penstock/commits"
_FORMAT: Final = 1
_APP: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.=-]{0,199}")
_RECORD: Final = re.compile(r"(\d{20})-(\d+)\.json")
_FILE: Final = "file://"

T = TypeVar("T")


class ParquetFolder:
    """A `Table` that is a plain folder of Parquet files."""

    def __init__(self, spec: TableSpec, store: ObjectStore | None = None) -> None:
        self._spec = spec
        self._given = store

    @property
    def _store(self) -> ObjectStore:
        return self._given or worker_store(self._spec.store)

    def prepare(self, schema: StructType) -> None:
        """See `Table.prepare`."""
        loop_thread().run(self.prepare_async(schema))

    def check(self, schema: StructType) -> bool:
        """See `Table.check`."""
        return loop_thread().run(self._check_async(schema))

    def layout(self, schema: StructType) -> FileLayout:
        """See `Table.layout`."""
        held = loop_thread().run(self._schema())
        divided = held.partition_by if held else self._spec.partition_by
        rows = arrow_schema(schema)
        return FileLayout(
            store=self._spec.store,
            rows=rows,
            files=pa.schema([field for field in rows if field.name not in divided]),
            partition_by=divided,
            compression=self._spec.compression,
            target_file_bytes=self._spec.target_file_bytes,
            staged=True,
        )

    def last_version(self, app: str) -> int | None:
        """See `Table.last_version`."""
        found = loop_thread().run(self._decision(app_key(app)))
        return found[0].version if found else None

    def commit(self, app: str, version: int, files: Sequence[DataFile]) -> bool:
        """See `Table.commit`."""
        return loop_thread().run(self.commit_async(app, version, files))

    def rows_by_version(self, app: str) -> dict[int, int]:
        """See `Table.rows_by_version`. Include a decided micro-batch that is not published yet."""
        return loop_thread().run(self._rows_by_version(app))

    def row_count(self) -> int:
        """Return the number of rows that readers find: the sum over the footers of all files."""
        return loop_thread().run(self._row_count())

    async def prepare_async(self, schema: StructType) -> None:
        rows = arrow_schema(schema)
        self._check_fit(rows, await self._schema() or await self._create(schema, rows))
        for info in await self._list(APPS):
            found = await self._decision(info.key)
            if found is not None:
                await self._finish(found[0])

    def _check_fit(self, rows: pa.Schema, held: FolderSchema) -> None:
        where = self._spec.where
        check_rows_fit(rows, arrow_schema(held.schema), where, may_omit=False)
        if self._spec.partition_by not in ((), held.partition_by):
            raise SchemaMismatch(
                f"partitionBy: {where} is partitioned by ({', '.join(held.partition_by)}), not by "
                f"({', '.join(self._spec.partition_by)}); leave the option out, or write to another folder"
            )

    async def _check_async(self, schema: StructType) -> bool:
        rows = arrow_schema(schema)
        held = await self._schema()
        if held is None:
            check_partitioning(rows, self._spec.partition_by, self._spec.where)
            await self._refuse_foreign()
            return False
        self._check_fit(rows, held)
        return True

    async def _create(self, schema: StructType, rows: pa.Schema) -> FolderSchema:
        check_partitioning(rows, self._spec.partition_by, self._spec.where)
        await self._refuse_foreign()
        new = FolderSchema(schema=schema, partition_by=self._spec.partition_by)
        try:
            await self._store.put_if_absent(SCHEMA, new.encode())
        except (Conflict, OutcomeUnknown):
            return await self._schema() or new
        except PenstockError as error:
            raise type(error)(
                f"{self._spec.where} cannot be created: {error}; check the folder and its permissions"
            ) from error
        return new

    async def _refuse_foreign(self) -> None:
        for log, instead in (
            ("_delta_log", "penstock-delta"),
            ("_spark_metadata", "Spark's own parquet format"),
        ):
            if await self._list(log):
                raise ConfigError(
                    f"path: {self._spec.path} has a {log} folder, so its readers do not take every file in "
                    f"it; use {instead}, or another folder"
                )

    async def commit_async(self, app: str, version: int, files: Sequence[DataFile]) -> bool:
        """Run the four steps. Raise as `commit`."""
        new = Decision.of(app, version, files)
        for _ in range(_ATTEMPTS):
            found = await self._decision(app_key(app))
            if found is not None:
                last = found[0]
                await self._finish(last)
                if last.version == version:
                    return last.files == new.files
                if last.version > version:
                    raise version_behind(self._spec.where, app, version, last.version)
            if not files:
                return True
            if await self._decide(new, found[1] if found else None):
                await self._finish(new)
                return True
        raise OutcomeUnknown(
            f"{self._spec.where}: it is not known whether micro-batch {version} was committed; start the "
            "query again, which checks and is safe"
        )

    async def _decide(self, new: Decision, before: Blob | None) -> bool:
        """Run step 2. Return False if the decision may have changed: the caller must read it again."""
        key, data = app_key(new.app), new.encode()
        try:
            if before is None or before.version is None:
                await self._store.put_if_absent(key, data)
            else:
                await self._store.put_if_match(key, data, before.version)
        except (Conflict, OutcomeUnknown) as error:
            _log.info("%s: %s; checking again", self._spec.where, error)
            return False
        return True

    async def _finish(self, decision: Decision) -> None:
        """Run step 3, unless the record exists."""
        if await self._has(decision.record_key):
            return
        limit = asyncio.Semaphore(_AT_ONCE)

        async def one(path: str) -> None:
            async with limit:
                await publish_file(self._store, path)

        await asyncio.gather(*(one(path) for path in decision.files))
        await _with_retries(lambda: self._store.put(decision.record_key, decision.encode()))
        if is_one_time(decision.app):
            await self._store.delete_many([app_key(decision.app)])

    async def _decision(self, key: str) -> tuple[Decision, Blob] | None:
        try:
            blob = await _with_retries(lambda: self._store.get(key))
        except NotFound:
            return None
        return Decision.decode(blob.data, key), blob

    async def _schema(self) -> FolderSchema | None:
        try:
            return FolderSchema.decode((await _with_retries(lambda: self._store.get(SCHEMA))).data)
        except NotFound:
            return None

    async def _has(self, key: str) -> bool:
        try:
            await _with_retries(lambda: self._store.get(key, ByteRange(start=0, length=1)))
        except NotFound:
            return False
        return True

    async def _list(self, folder: str) -> list[ObjectInfo]:
        return await _with_retries(lambda: self._store.list(folder))

    async def _rows_by_version(self, app: str) -> dict[int, int]:
        listed = await self._list(f"{COMMITS}/{app}")
        rows = dict(filter(None, (rows_in(info.key) for info in listed)))
        found = await self._decision(app_key(app))
        if found is not None:
            rows[found[0].version] = found[0].rows
        return rows

    async def _row_count(self) -> int:
        listed = await self._list("")
        paths = [info.key for info in listed if info.key.endswith(".parquet") and not _is_hidden(info.key)]
        limit = asyncio.Semaphore(_AT_ONCE)

        async def count(path: str) -> int:
            async with limit:
                return await self._rows_of(path)

        return sum(await asyncio.gather(*(count(path) for path in paths)))

    async def _rows_of(self, path: str) -> int:
        length = _TAIL_BYTES
        tail = (await _with_retries(lambda: self._store.get(path, ByteRange(start=None, length=length)))).data
        needed = int.from_bytes(tail[-8:-4], "little") + 16
        if needed > len(tail):
            tail = (
                await _with_retries(lambda: self._store.get(path, ByteRange(start=None, length=needed)))
            ).data
        return int(pq.read_metadata(pa.BufferReader(pa.py_buffer(tail))).num_rows)


def _is_hidden(key: str) -> bool:
    return any(part.startswith(("_", ".")) and "=" not in part for part in key.split("/"))


async def _with_retries(call: Callable[[], Awaitable[T]]) -> T:
    return await retry(call, _POLICY, clock=SYSTEM_CLOCK, rng=SYSTEM_RNG)


class _Decided(msgspec.Struct, frozen=True):
    format: int
    app: str
    version: int
    rows: int
    files: tuple[str, ...]


class _Columns(msgspec.Struct, frozen=True):
    format: int
    schema: dict[str, object]
    partition_by: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One micro-batch and the final names of its files."""

    app: str
    version: int
    rows: int
    files: tuple[str, ...]

    @classmethod
    def of(cls, app: str, version: int, files: Sequence[DataFile]) -> Decision:
        rows = sum(file.rows for file in files)
        return cls(app=app, version=version, rows=rows, files=tuple(file.path for file in files))

    @classmethod
    def decode(cls, data: memoryview, key: str) -> Decision:
        """Decode a decision. Raise `Corrupt` if it is damaged or has another format."""
        try:
            found = msgspec.json.decode(data, type=_Decided)
        except msgspec.DecodeError as error:
            raise Corrupt(
                f"{key} is not a record of a micro-batch ({error}); restore it before continuing"
            ) from None
        _check_format(found.format, key)
        return cls(app=found.app, version=found.version, rows=found.rows, files=found.files)

    def encode(self) -> bytes:
        return msgspec.json.encode(
            _Decided(format=_FORMAT, app=self.app, version=self.version, rows=self.rows, files=self.files)
        )

    @property
    def record_key(self) -> str:
        """The key of the object whose existence shows that all files are published."""
        return f"{COMMITS}/{self.app}/{self.version:020}-{self.rows}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderSchema:
    """The columns of a Parquet folder, stored before its first file."""

    schema: StructType
    partition_by: tuple[str, ...]

    @classmethod
    def decode(cls, data: memoryview) -> FolderSchema:
        """Decode a stored schema. Raise `Corrupt` if it is damaged or has another format."""
        try:
            found = msgspec.json.decode(data, type=_Columns)
            _check_format(found.format, SCHEMA)
            return cls(schema=StructType.fromJson(found.schema), partition_by=found.partition_by)
        except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
            raise Corrupt(
                f"{SCHEMA} does not contain a schema ({error}); restore it before continuing"
            ) from None

    def encode(self) -> bytes:
        return msgspec.json.encode(
            _Columns(format=_FORMAT, schema=self.schema.jsonValue(), partition_by=self.partition_by)
        )


def _check_format(number: int, key: str) -> None:
    if number != _FORMAT:
        raise Corrupt(f"{key} has format {number}, and this version reads {_FORMAT}; upgrade Penstock")


def check_app(app: str) -> str:
    """Return `app`. Raise `InvalidInput` if it cannot be part of an object's key; query ids always can."""
    if not _APP.fullmatch(app):
        raise InvalidInput(
            f"txnAppId: {app!r} cannot name a file; use up to 200 letters, digits, '-', '_', '.' and '='"
        )
    return app


def app_key(app: str) -> str:
    return f"{APPS}/{check_app(app)}.json"


def rows_in(record_key: str) -> tuple[int, int] | None:
    """Return (version, rows) from the name of a record, or None for any other object."""
    found = _RECORD.fullmatch(record_key.rsplit("/", 1)[-1])
    return (int(found.group(1)), int(found.group(2))) if found else None


@runtime_checkable
class CopyingStore(Protocol):
    """A store that copies objects on the server side, without transferring their bytes."""

    async def copy(self, source: str, target: str) -> None:
        """Copy `source` to `target`. Raise `NotFound` if `source` does not exist. Safe to repeat."""
        ...


async def publish_file(store: ObjectStore, path: str, *, fs: FileSystem | None = None) -> None:
    """Move a staged file to `path`, durably. Safe to repeat, even concurrently.

    A missing staged file has been published: it is removed only after publication. Raise `Corrupt` if
    neither the staged file nor `path` exists.
    """

    async def move() -> None:
        if store.url.startswith(_FILE):
            await asyncio.to_thread(_rename, fs or OsFileSystem(), store.url[len(_FILE) :], path)
        else:
            await _copy(store, path)

    try:
        await retry(move, _POLICY, clock=SYSTEM_CLOCK, rng=SYSTEM_RNG)
    except NotFound:
        if not await _is_there(store, path):
            raise Corrupt(
                f"{path} in {store.url} is committed, but neither it nor its staged file "
                f"{staged_key(path)} exists: it was removed. Restore it, or, if you can accept the loss of "
                "its rows, store an empty Parquet file under that name"
            ) from None


async def _copy(store: ObjectStore, path: str) -> None:
    staged = staged_key(path)
    if isinstance(store, CopyingStore):
        await store.copy(staged, path)
    else:
        await store.put(path, (await store.get(staged)).data)
    failed = await store.delete_many([staged])
    if failed:
        raise next(iter(failed.values()))


def _rename(fs: FileSystem, root: str, path: str) -> None:
    source, target = os.path.join(root, staged_key(path)), os.path.join(root, path)
    folder = os.path.dirname(target)
    fs.stat(source)
    fs.make_dirs(folder)
    try:
        publish(fs, source, target)
    except OutcomeUnknown as error:
        raise Unavailable(f"{error}; publishing it again is safe") from error
    while len(folder) > len(root):
        folder = os.path.dirname(folder)
        fs.sync_dir(folder)


async def _is_there(store: ObjectStore, key: str) -> bool:
    try:
        await retry(
            lambda: store.get(key, ByteRange(start=0, length=1)), _POLICY, clock=SYSTEM_CLOCK, rng=SYSTEM_RNG
        )
    except NotFound:
        return False
    return True
