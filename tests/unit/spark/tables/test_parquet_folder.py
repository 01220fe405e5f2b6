"""A Parquet folder after crashes and faults: plain readers find every row once."""

from __future__ import annotations

import asyncio
import builtins
import random
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from pyspark.sql.types import LongType, StructField, StructType
from tests.unit.spark.tables.conftest import SCHEMA as PLACE_SCHEMA
from tests.unit.spark.tables.conftest import Place

from penstock.clock import SYSTEM_CLOCK
from penstock.errors import ConfigError, Corrupt, PenstockError
from penstock.objects import LocalStore, MemoryStore, ObjectStore
from penstock.objects.store import Blob, ByteRange, Data, ObjectInfo, Version
from penstock.spark.tables import DataFile, TableSpec
from penstock.spark.tables.parquet import Decision, ParquetFolder, app_key
from penstock.spark.tables.parts import staged_key
from penstock.testing import FAULTS_OF, FaultKind, FaultPlan, FaultyStore

T = TypeVar("T")
SPEC = TableSpec(kind="parquet", path="/nowhere")
SCHEMA = StructType([StructField("id", LongType())])
KINDS = sorted({kind for kinds in FAULTS_OF.values() for kind in kinds} - {FaultKind.TRUNCATED})


class Killed(Exception):
    """The process was killed: this call and all later ones fail."""


class MortalStore:
    """A store that dies at its n-th call, before or after the call is applied."""

    def __init__(self, inner: ObjectStore, dies_at: int, *, applied: bool) -> None:
        self.inner = inner
        self.calls = 0
        self._dies_at = dies_at
        self._applied = applied

    @property
    def url(self) -> str:
        return self.inner.url

    async def _do(self, call: Callable[[], Awaitable[T]]) -> T:
        self.calls += 1
        if self.calls < self._dies_at:
            return await call()
        if self.calls == self._dies_at and self._applied:
            await call()
        raise Killed

    async def get(self, key: str, byte_range: ByteRange | None = None) -> Blob:
        return await self._do(lambda: self.inner.get(key, byte_range))

    async def get_if_changed(self, key: str, version: Version) -> Blob | None:
        return await self._do(lambda: self.inner.get_if_changed(key, version))

    async def put(self, key: str, data: Data) -> Version:
        return await self._do(lambda: self.inner.put(key, data))

    async def put_if_absent(self, key: str, data: Data) -> Version:
        return await self._do(lambda: self.inner.put_if_absent(key, data))

    async def put_if_match(self, key: str, data: Data, version: Version) -> Version:
        return await self._do(lambda: self.inner.put_if_match(key, data, version))

    async def head(self, key: str) -> ObjectInfo:
        return await self._do(lambda: self.inner.head(key))

    async def list(self, prefix: str) -> builtins.list[ObjectInfo]:
        return await self._do(lambda: self.inner.list(prefix))

    async def delete_many(self, keys: Iterable[str]) -> dict[str, PenstockError]:
        return await self._do(lambda: self.inner.delete_many(keys))

    async def close(self) -> None:
        await self.inner.close()


async def stage(store: ObjectStore, attempt: str, ids: range) -> list[DataFile]:
    """Stage the files of two tasks, with names of this attempt."""
    files = []
    for part in (0, 1):
        rows = pa.table({"id": pa.array(list(ids)[part::2], pa.int64())})
        sink = pa.BufferOutputStream()
        pq.write_table(rows, sink)
        path = f"part-{attempt}-{part}.parquet"
        data = bytes(sink.getvalue())
        await store.put(staged_key(path), data)
        files.append(DataFile(path=path, size=len(data), rows=rows.num_rows))
    return files


async def ids_in(store: ObjectStore) -> list[int]:
    """Return the ids that a reader of the bucket finds in all Parquet files that are not hidden."""
    found: list[int] = []
    for info in await store.list(""):
        if info.key.endswith(".parquet") and not info.key.startswith("_"):
            found += pq.read_table(pa.BufferReader(bytes((await store.get(info.key)).data)))["id"].to_pylist()
    return sorted(found)


async def run(store: ObjectStore, inner: ObjectStore, version: int, attempt: str) -> bool:
    """Run one micro-batch of a query: open the table, write files as tasks do, commit."""
    folder = ParquetFolder(SPEC, store)
    await folder.prepare_async(SCHEMA)
    files = await stage(inner, f"{version}-{attempt}", range(10 * version, 10 * version + 4))
    return await folder.commit_async("q", version, files)


ALL = [*range(4), *range(10, 14), *range(20, 24)]


async def go_through(inner: ObjectStore, wounded: ObjectStore) -> None:
    """Run micro-batch 0 normally, 1 with a fault, 1 again after a restart, then 2."""
    await run(inner, inner, 0, "a")
    try:
        await run(wounded, inner, 1, "a")
    except (Killed, PenstockError):
        pass
    if isinstance(wounded, FaultyStore):
        await wounded.settle()
    await ParquetFolder(SPEC, inner).prepare_async(SCHEMA)
    between = await ids_in(inner)
    assert between in (ALL[:4], ALL[:8])
    assert await run(inner, inner, 1, "b") == (between == ALL[:4])
    assert await run(inner, inner, 2, "a")
    assert await ids_in(inner) == ALL
    assert await ParquetFolder(SPEC, inner)._rows_by_version("q") == {0: 4, 1: 4, 2: 4}
    assert await ParquetFolder(SPEC, inner)._row_count() == 12


@pytest.mark.parametrize("applied", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("at", range(1, 17))
async def test_a_crash_at_any_call_neither_loses_nor_doubles_rows(at: int, applied: bool) -> None:
    inner = MemoryStore()
    await go_through(inner, MortalStore(inner, at, applied=applied))


async def test_the_crashes_above_cover_every_call() -> None:
    inner = MemoryStore()
    counting = MortalStore(inner, 10**9, applied=False)
    await go_through(inner, counting)
    assert counting.calls <= 16


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.value)
async def test_a_fault_at_any_call_neither_loses_nor_doubles_rows(kind: FaultKind) -> None:
    for at in range(16):
        inner = MemoryStore()
        plan = FaultPlan(script={at: kind}, late_s=(0.0, 0.002), stall_s=(0.0, 0.001))
        await go_through(inner, FaultyStore(inner, clock=SYSTEM_CLOCK, rng=random.Random(at), plan=plan))


async def test_two_drivers_with_one_checkpoint_add_a_micro_batch_once() -> None:
    store = MemoryStore()
    await ParquetFolder(SPEC, store).prepare_async(SCHEMA)
    attempts = [await stage(store, name, range(4)) for name in ("a", "b", "c")]
    done = await asyncio.gather(
        *(ParquetFolder(SPEC, store).commit_async("q", 0, files) for files in attempts)
    )
    assert sorted(done) == [False, False, True]
    assert await ids_in(store) == [0, 1, 2, 3]


async def test_a_committed_file_that_was_removed_is_reported() -> None:
    store = MemoryStore()
    await ParquetFolder(SPEC, store).prepare_async(SCHEMA)
    files = await stage(store, "a", range(4))
    await store.put(app_key("q"), Decision.of("q", 0, files).encode())
    await store.delete_many([staged_key(files[0].path)])
    with pytest.raises(Corrupt, match=r"part-a-0\.parquet.*it was removed"):
        await ParquetFolder(SPEC, store).prepare_async(SCHEMA)


async def test_a_write_that_is_never_repeated_leaves_no_state() -> None:
    store = MemoryStore()
    folder = ParquetFolder(SPEC, store)
    await folder.prepare_async(SCHEMA)
    await folder.commit_async("write-01ARZ3NDEKTSV4RRFFQ69G5FAV", 0, await stage(store, "a", range(4)))
    assert await store.list("_penstock/apps") == []
    assert await ids_in(store) == [0, 1, 2, 3]


@pytest.mark.parametrize("log", ["_delta_log", "_spark_metadata"])
async def test_a_folder_with_another_log_is_refused(log: str) -> None:
    store = MemoryStore()
    await store.put(f"{log}/0", b"")
    with pytest.raises(ConfigError, match=log):
        await ParquetFolder(SPEC, store).prepare_async(SCHEMA)


async def test_a_name_that_cannot_name_a_file_is_refused() -> None:
    with pytest.raises(PenstockError, match="txnAppId"):
        await ParquetFolder(SPEC, MemoryStore()).commit_async("a/b", 0, [])


def test_a_decision_is_finished_when_the_folder_is_opened(parquet: Place) -> None:
    parquet.open().prepare(PLACE_SCHEMA)
    files = parquet.write(range(5))
    root = Path(parquet.spec.path)
    asyncio.run(LocalStore(root).put(app_key("q"), Decision.of("q", 0, files).encode()))
    assert not list(root.glob("*.parquet"))
    parquet.open().prepare(PLACE_SCHEMA)
    assert parquet.ids() == list(range(5))
    assert parquet.open().rows_by_version("q") == {0: 5}


def test_readers_skip_uncommitted_files(parquet: Place) -> None:
    parquet.open().prepare(PLACE_SCHEMA)
    parquet.write(range(5))
    assert ds.dataset(parquet.spec.path, format="parquet").count_rows() == 0
