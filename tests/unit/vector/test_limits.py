"""Limits on the merges of a record and on running searches. Writers do not wait for readers."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections import Counter

import numpy as np
import pytest
from tests.unit.vector.doubles import CONFIG, World, index_of, vector

from penstock.coordinator import Merge, Operation
from penstock.errors import ConfigError, InvalidInput, Rejected, Unavailable
from penstock.testing.memory_storage import MemoryStorage
from penstock.vector import Eq, Vector, VectorConfig, VectorStore
from penstock.vector.codec import decode_posting
from penstock.vector.index import Index
from penstock.vector.inverted_lists import MERGES_MAX
from penstock.vector.keys import RecordType, record_prefix

LARGE = VectorConfig(dimensions=1024, exact_max=0, flush_interval="1h")
"""Dimensions large enough that searches and flushes of a hundred vectors use threads."""


class Chains:
    """Storage that counts the merges of each record."""

    def __init__(self, storage: MemoryStorage) -> None:
        self.merges: Counter[bytes] = Counter()
        self.longest = 0
        self._apply = storage.apply
        storage.apply = self.apply  # type: ignore[method-assign]

    async def apply(self, operations: list[Operation]) -> None:
        for operation in operations:
            if isinstance(operation, Merge):
                self.merges[operation.key] += 1
            else:
                self.merges[operation.key] = 0
        self.longest = max(self.longest, *self.merges.values(), 0)
        await self._apply(operations)


async def test_a_record_is_rewritten_after_too_many_merges_also_across_restarts() -> None:
    world = World(dataclasses.replace(CONFIG, split_at=400, merge_below=1))
    storage = world.disk.open()
    chains = Chains(storage)
    store = await world.open(storage)
    for number in range(MERGES_MAX + 40):
        await store.upsert([vector(f"v{number}", number, 0, 0, lang="en")])
        await store.delete([f"v{number - 40}"])
        await store.flush()
    await store.close()
    assert MERGES_MAX - 1 <= chains.longest <= MERGES_MAX
    storage = world.disk.open()
    chains = Chains(storage)
    store = await world.open(storage)
    await store.upsert([vector("new", 1, 1, 1, lang="en")])
    await store.delete([f"v{number}"])
    await store.flush()
    assert chains.longest == 0, "what an earlier life merged is not counted"
    await store.close()


async def test_entries_that_say_that_a_row_left_do_not_pile_up() -> None:
    world = World(dataclasses.replace(CONFIG, split_at=8, merge_below=3))
    store = await world.open()
    rng = np.random.default_rng(11)
    for _ in range(150):
        names = rng.integers(0, 60, 20)
        await store.upsert([Vector(f"v{n}", rng.normal(size=3)) for n in names])
        await store.flush()
    assert world.storage is not None
    async for page in world.storage.scan(record_prefix(RecordType.POSTING)):
        for pair in page:
            posting = decode_posting(pair.value, 3)
            assert len(posting.removed) <= len(posting.ids) + 64 + 20
    await store.close()


async def large_store(**changes: object) -> tuple[World, VectorStore]:
    world = World(dataclasses.replace(LARGE, **changes))  # type: ignore[arg-type]
    store = await world.open()
    rng = np.random.default_rng(1)
    await store.upsert([Vector(f"v{n}", rng.normal(size=1024)) for n in range(10)])
    await store.flush()
    return world, store


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Block searches until the first event is set. The second event is set when one has begun."""
    go, begun = threading.Event(), threading.Event()
    search = Index.search

    def held_up(self: Index, *args: object, **more: object) -> object:
        begun.set()
        assert go.wait(20)
        return search(self, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Index, "search", held_up)
    monkeypatch.setattr("penstock.vector.store._INLINE_CELLS", -1)
    return go, begun


async def test_more_searches_than_the_cap_are_unavailable(
    held: tuple[threading.Event, threading.Event],
) -> None:
    _, store = await large_store(searches_max=2)
    query = np.ones(1024)
    under_way = [asyncio.ensure_future(store.search(query)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="2 searches are running"):
        await store.search(query)
    with pytest.raises(Unavailable, match="2 searches are running"):
        await store.recall()
    held[0].set()
    assert [len(hits) for hits in await asyncio.gather(*under_way)] == [10, 10]
    assert len(await store.search(query)) == 10
    await store.close()


async def test_a_search_that_takes_too_long_is_stopped(
    held: tuple[threading.Event, threading.Event],
) -> None:
    _, store = await large_store(search_timeout="20ms", searches_max=1)
    for _ in range(2):
        with pytest.raises(Unavailable, match=r"longer than 0\.02 s"):
            await store.search(np.ones(1024))
    held[0].set()
    await store.close()


async def test_a_flush_does_not_wait_for_searches(held: tuple[threading.Event, threading.Event]) -> None:
    world, store = await large_store()
    under_way = [asyncio.ensure_future(store.search(np.ones(1024))) for _ in range(60)]
    assert await asyncio.to_thread(held[1].wait, 20)
    rng = np.random.default_rng(2)
    await store.upsert([Vector(f"w{n}", rng.normal(size=1024)) for n in range(100)])
    async with asyncio.timeout(20):
        await store.flush()
    assert world.disk.unflushed == []
    held[0].set()
    assert {len(hits) for hits in await asyncio.gather(*under_way)} == {10}
    await store.close()


async def test_a_closed_store_has_no_thread_left() -> None:
    before = set(threading.enumerate())
    _, store = await large_store()
    await store.upsert([Vector(f"w{n}", np.ones(1024)) for n in range(100)])
    await store.flush()
    await store.recall(sample=5)
    await store.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
        assert not thread.is_alive() or "asyncio" in thread.name
    with pytest.raises(Rejected):
        await store.recall(sample=5)


async def test_recall_is_measured_and_reported() -> None:
    rng = np.random.default_rng(3)
    world = World(dataclasses.replace(CONFIG, exact_max=0, split_at=8, merge_below=3))
    store = await world.open()
    empty = await store.recall()
    assert (empty.recall, empty.sample, empty.vectors) == (1.0, 0, 0)
    await store.upsert([Vector(f"v{n}", rng.normal(size=3), {"lang": "ab"[n % 2]}) for n in range(600)])
    await store.upsert([vector(f"same{n}", 9, 9, 9) for n in range(30)])
    await store.delete([f"v{n}" for n in range(0, 600, 7)])
    await store.flush()
    few = await store.recall(sample=60, nprobe=1)
    usual = await store.recall(sample=60)
    every = await store.recall(sample=60, nprobe=10_000)
    filtered = await store.recall(sample=60, k=5, filter=Eq("lang", "a"))
    assert few.recall < usual.recall <= every.recall == 1.0
    assert filtered.recall >= 0.95
    assert (usual.sample, usual.k, usual.vectors) == (60, 10, index_of(store).live)
    assert f"vector_recall {usual.recall}" in store._registry.prometheus_text()
    for wrong in ({"sample": 0}, {"sample": 1001}, {"k": 0}, {"filter": Eq("body", "x")}):
        with pytest.raises(InvalidInput):
            await store.recall(**wrong)  # type: ignore[arg-type]
    await store.close()


def test_limits_that_make_no_sense_are_refused() -> None:
    for wrong in (
        {"searches_max": 0},
        {"search_timeout": "0s"},
        {"search_timeout": "soon"},
        {"open_timeout": "0s"},
        {"open_timeout": "later"},
    ):
        with pytest.raises(ConfigError):
            dataclasses.replace(CONFIG, **wrong)  # type: ignore[arg-type]
