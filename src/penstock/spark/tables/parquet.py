"""A folder of Parquet files without a table format, in which plain readers see each micro-batch once.

Readers take every Parquet file they find, so a file gets its name only when its micro-batch is decided:

1. Tasks store files under `_penstock/staging/`, which readers skip, with names no other task ever uses.
2. The driver decides: one compare-and-swap of `_penstock/apps/<app>.json` from the micro-batch before to this
   one, with the names its files will have. Whoever loses it reads it again and finds the micro-batch decided.
3. It publishes: each staged file is moved to its final name, then the micro-batch's record is written.
4. Before the next decision, and whenever the folder is opened, a decision without a record is published to
   the end. A staged file that is gone has been published: it goes away only by that.

So a crash before 2 leaves staged files nobody refers to, one after 2 leaves a decision that is finished
later, and a micro-batch that is run again finds the decision, finishes it, and adds nothing. Two drivers that
publish the same decision move the same bytes to the same names.

Readers may see the files of a micro-batch appear one after the other. Staged files that no decision in
`_penstock/apps/` names belong to failed or running attempts; those older than a day can be deleted by hand.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.types import StructType

from penstock.blocking import loop_thread
from penstock.clock import SYSTEM_CLOCK
from penstock.errors import ConfigError, Conflict, NotFound, OutcomeUnknown, PenstockError
from penstock.ids import SYSTEM_RNG
from penstock.objects import Blob, ByteRange, ObjectInfo, ObjectStore
from penstock.retry import RetryPolicy, retry
from penstock.spark.tables.commits import APPS, COMMITS, SCHEMA, Decision, FolderSchema, app_key, rows_in
from penstock.spark.tables.errors import SchemaMismatch, version_behind
from penstock.spark.tables.publishing import publish_file
from penstock.spark.tables.schema import arrow_schema, check_partitioning, check_rows_fit
from penstock.spark.tables.spec import TableSpec
from penstock.spark.tables.table import DataFile, FileLayout, is_one_time
from penstock.spark.worker import worker_store

__all__ = ["ParquetFolder"]

_log = logging.getLogger(__name__)

_POLICY: Final = RetryPolicy(deadline_s=30.0)
_ATTEMPTS: Final = 5
_AT_ONCE: Final = 8
_TAIL_BYTES: Final = 64 << 10
T = TypeVar("T")


class ParquetFolder:
    """See `Table`."""

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
        """See `Table.rows_by_version`. What was decided and is not yet published counts."""
        return loop_thread().run(self._rows_by_version(app))

    def row_count(self) -> int:
        """The rows that readers find: the sum over the footers of all files."""
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
                f"partitionBy: {where} is divided by ({', '.join(held.partition_by)}), not by "
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
                f"{self._spec.where} cannot be created: {error}; check the folder and who may write to it"
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
        """The four steps. Raises as `commit`."""
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
            f"{self._spec.where}: whether micro-batch {version} was committed cannot be told; starting the "
            "query again is safe and settles it"
        )

    async def _decide(self, new: Decision, before: Blob | None) -> bool:
        """Step 2. False: somebody was faster, or it may have been us; look again."""
        key, data = app_key(new.app), new.encode()
        try:
            if before is None or before.version is None:
                await self._store.put_if_absent(key, data)
            else:
                await self._store.put_if_match(key, data, before.version)
        except (Conflict, OutcomeUnknown) as error:
            _log.info("%s: %s; looking again", self._spec.where, error)
            return False
        return True

    async def _finish(self, decision: Decision) -> None:
        """Steps 3 and 4. Does nothing when the record is there."""
        if await self._has(decision.record_key):
            return
        limit = asyncio.Semaphore(_AT_ONCE)

        async def one(path: str) -> None:
            async with limit:
                await publish_file(self._store, path)

        await asyncio.gather(*(one(path) for path in decision.files))
        await _patiently(lambda: self._store.put(decision.record_key, decision.encode()))
        if is_one_time(decision.app):
            await self._store.delete_many([app_key(decision.app)])

    async def _decision(self, key: str) -> tuple[Decision, Blob] | None:
        try:
            blob = await _patiently(lambda: self._store.get(key))
        except NotFound:
            return None
        return Decision.decode(blob.data, key), blob

    async def _schema(self) -> FolderSchema | None:
        try:
            return FolderSchema.decode((await _patiently(lambda: self._store.get(SCHEMA))).data)
        except NotFound:
            return None

    async def _has(self, key: str) -> bool:
        try:
            await _patiently(lambda: self._store.get(key, ByteRange(start=0, length=1)))
        except NotFound:
            return False
        return True

    async def _list(self, folder: str) -> list[ObjectInfo]:
        return await _patiently(lambda: self._store.list(folder))

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
        tail = (await _patiently(lambda: self._store.get(path, ByteRange(start=None, length=length)))).data
        needed = int.from_bytes(tail[-8:-4], "little") + 16
        if needed > len(tail):
            tail = (
                await _patiently(lambda: self._store.get(path, ByteRange(start=None, length=needed)))
            ).data
        return int(pq.read_metadata(pa.BufferReader(pa.py_buffer(tail))).num_rows)


def _is_hidden(key: str) -> bool:
    return any(part.startswith(("_", ".")) and "=" not in part for part in key.split("/"))


async def _patiently(call: Callable[[], Awaitable[T]]) -> T:
    return await retry(call, _POLICY, clock=SYSTEM_CLOCK, rng=SYSTEM_RNG)
