"""Recall of searches by lists, for all metrics and filters."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from tests.unit.vector.doubles import CONFIG, World, index_of

from penstock.vector import Eq, Vector, VectorConfig, VectorStore
from penstock.vector.index import Index


async def by_lists(config: VectorConfig, vectors: list[Vector]) -> VectorStore:
    store = await World(dataclasses.replace(config, exact_max=100)).open()
    for begin in range(0, len(vectors), 3000):
        await store.upsert(vectors[begin : begin + 3000])
        await store.flush()
    return store


def grouped(count: int, dimensions: int, seed: int, groups: int = 60) -> np.ndarray:
    rng, centres = np.random.default_rng(seed), np.random.default_rng(0).normal(size=(groups, dimensions))
    return (centres[rng.integers(0, groups, count)] + 0.35 * rng.normal(size=(count, dimensions))).astype(
        np.float32
    )


def recall(index: Index, queries: np.ndarray, **more: object) -> float:
    found = 0
    for query in queries:
        wanted = set(index.exact(query, 10, **more).slots.tolist())  # type: ignore[arg-type]
        found += len(wanted & set(index.search(query, 10, **more).slots.tolist()))  # type: ignore[arg-type]
    return found / (10 * len(queries))


async def test_a_filter_whose_vectors_are_far_from_the_query_still_finds_k_of_them() -> None:
    rng = np.random.default_rng(8)
    near = [Vector(f"n{n}", rng.normal(size=3), {"lang": "near"}) for n in range(3000)]
    far = [Vector(f"f{n}", 100 + rng.normal(size=3), {"lang": "far"}) for n in range(300)]
    store = await by_lists(dataclasses.replace(CONFIG, split_at=20, merge_below=5), near + far)
    for nprobe in (None, 1, 3):
        hits = await store.search([0, 0, 0], k=10, filter=Eq("lang", "far"), nprobe=nprobe)
        assert len(hits) == 10
        assert {hit.attributes["lang"] for hit in hits} == {"far"}
    assert len(await store.search([0, 0, 0], k=1000, filter=Eq("lang", "far"), nprobe=1)) == 300
    await store.close()


@pytest.mark.parametrize("spread", [0.5, 1.0, 2.0])
async def test_dot_products_of_vectors_of_very_different_lengths_are_found(spread: float) -> None:
    rng = np.random.default_rng(6)
    lengths = np.exp(spread * rng.normal(size=(12_000, 1))).astype(np.float32)
    rows = lengths * grouped(12_000, 32, 1)
    vectors = [Vector(f"v{n}", row) for n, row in enumerate(rows)]
    config = VectorConfig(dimensions=32, metric="dot", split_at=60, merge_below=20)
    store = await by_lists(config, vectors)
    measured = recall(index_of(store), grouped(40, 32, 2))
    assert measured >= 0.95, f"recall@10 of dot products is {measured}"
    await store.close()


async def test_dot_products_of_a_few_long_vectors_among_many_are_found() -> None:
    lengths = np.where(np.random.default_rng(9).random((12_000, 1)) < 0.03, 20.0, 1.0).astype(np.float32)
    rows = lengths * grouped(12_000, 64, 1, groups=200)
    vectors = [Vector(f"v{n}", row, {"lang": "ab"[n % 2]}) for n, row in enumerate(rows)]
    config = VectorConfig(dimensions=64, metric="dot", fields=CONFIG.fields, split_at=30, merge_below=10)
    store = await by_lists(config, vectors)
    assert len(index_of(store).lists) > 4 * 64
    for more in ({}, {"filter": Eq("lang", "a")}):
        measured = recall(index_of(store), grouped(40, 64, 2, groups=200), **more)
        assert measured >= 0.95, f"recall@10 is {measured} with {more}"
    await store.close()


@pytest.mark.parametrize("metric", ["l2", "cosine", "dot"])
async def test_the_usual_search_finds_nineteen_of_twenty_also_where_there_are_no_groups(metric: str) -> None:
    rng = np.random.default_rng(7)
    directions = rng.normal(size=(16, 32))
    rows = (rng.normal(size=(9040, 16)) @ directions).astype(np.float32)
    vectors = [Vector(f"v{n}", row, {"lang": "ab"[n % 2]}) for n, row in enumerate(rows[40:])]
    config = VectorConfig(dimensions=32, metric=metric, fields=CONFIG.fields, split_at=12, merge_below=4)
    store = await by_lists(config, vectors)
    assert len(index_of(store).lists) > 4 * 64
    for more in ({}, {"filter": Eq("lang", "a")}):
        measured = recall(index_of(store), rows[:40], **more)
        assert measured >= 0.95, f"recall@10 is {measured} with {more}"
    await store.close()
