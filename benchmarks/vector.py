"""Measure a vector collection on this machine: `python benchmarks/vector.py`.

100,000 vectors of 128 dimensions over SlateDB in a local directory. Inserts are compared with direct puts of
the same records, without lists, ids or an index. Exact searches are compared with one pass of numpy over all
vectors. Searches by lists with the default `nprobe` are compared with exact ones. Recall is that of the ten
best, against the exact search, for queries that are not stored.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.coordinator import Put
from penstock.coordinator.slate import SlateStorage
from penstock.vector import Eq, Field, FieldType, Vector, VectorConfig, VectorStore
from penstock.vector.codec import encode_id, encode_vector
from penstock.vector.index import Found, Index
from penstock.vector.keys import data_key, dictionary_key
from rounds import Plan, interleave, scratch
from sections import run_planned
from table import Row

DIMENSIONS = 128
WRITE_VECTORS = 1000
QUERIES = 100
K = 10
Rows: TypeAlias = npt.NDArray[np.float32]
Search: TypeAlias = Callable[[Rows], Found]


def clustered(count: int, seed: int) -> Rows:
    """Return clusters of about a hundred neighbours, like embeddings of documents."""
    rng, centres = np.random.default_rng(seed), np.random.default_rng(0).normal(size=(500, DIMENSIONS))
    near = 0.35 * rng.normal(size=(count, DIMENSIONS))
    return (centres[rng.integers(0, len(centres), count)] + near).astype(np.float32)


def smooth(count: int, seed: int) -> Rows:
    """Return vectors without clusters and with only 24 significant directions, which is hard for lists."""
    rng = np.random.default_rng(seed)
    directions = np.random.default_rng(0).normal(size=(24, DIMENSIONS)) / 24**0.5
    noise = 0.05 * rng.normal(size=(count, DIMENSIONS))
    return (rng.normal(size=(count, 24)) @ directions + noise).astype(np.float32)


def of_all_lengths(count: int, seed: int) -> Rows:
    """Return the clusters with some vectors a hundred times as long as others, which is hard for dot
    products."""
    lengths = np.exp(np.random.default_rng(seed + 1000).normal(size=(count, 1)))
    return (lengths * clustered(count, seed)).astype(np.float32)


class Kind(NamedTuple):
    """Vectors, their metric, and the required speed-up of lists over an exact search."""

    rows: Callable[[int, int], Rows]
    metric: str
    bar: float


KINDS = {
    "clustered": Kind(clustered, "l2", 2.0),
    "smooth": Kind(smooth, "l2", 1.0),
    "dot, all lengths": Kind(of_all_lengths, "dot", 1.5),
}
FIELD = Field(name="half", type=FieldType.BOOL, indexed=True)


def over_directory(plan: Plan, work: Callable[[str], Awaitable[float]]) -> float:
    with scratch(plan) as root:
        return asyncio.run(work(root.as_uri()))  # type: ignore[arg-type]


async def filled(url: str, rows: Rows, metric: str = "l2", fields: tuple[Field, ...] = ()) -> VectorStore:
    config = VectorConfig(store=url, dimensions=DIMENSIONS, metric=metric, fields=fields, exact_max=0)
    store = await VectorStore.open(config)
    for begin in range(0, len(rows), WRITE_VECTORS):
        part = enumerate(rows[begin : begin + WRITE_VECTORS], begin)
        if fields:
            await store.upsert(Vector(f"v{number}", row, {"half": number % 2 == 0}) for number, row in part)
        else:
            await store.upsert(Vector(f"v{number}", row) for number, row in part)
    await store.flush()
    return store


async def inserted(url: str, *, rows: Rows) -> float:
    began = time.perf_counter()
    store = await filled(url, rows)
    seconds = time.perf_counter() - began
    await store.close()
    return seconds


async def put_by_hand(url: str, *, rows: Rows) -> float:
    began = time.perf_counter()
    async with await SlateStorage.open(url, "rows") as storage:
        for begin in range(0, len(rows), 10 * WRITE_VECTORS):
            operations = []
            for number, row in enumerate(rows[begin : begin + 10 * WRITE_VECTORS], begin):
                operations.append(Put(data_key(number), encode_vector(Vector(f"v{number}", row))))
                operations.append(Put(dictionary_key(f"v{number}"), encode_id(number)))
            await storage.apply(operations)
            await storage.flush()
        return time.perf_counter() - began


def inserts(plan: Plan) -> list[Row]:
    """Measure writes of 1000 vectors, until the last one is durable and can be found."""
    count = plan.pick(100_000, 10_000)
    rows = clustered(count, 1)
    contenders = {
        "ours": partial(over_directory, plan, partial(inserted, rows=rows)),
        "hand": partial(over_directory, plan, partial(put_by_hand, rows=rows)),
    }
    rates = interleave(contenders, work=count, rounds=plan.pick(2, 1))
    return [
        Row(
            section="inserts",
            what=f"{count:,} x {DIMENSIONS}, durable",
            ours=rates.median("ours"),
            ceiling=rates.median("hand"),
            ratio=rates.ratio("ours", "hand"),
            unit="vectors/s",
            against="the same records put by hand, without an index",
            bar=0.2,
            note="writes of 1000; posting lists are cut on the way",
        )
    ]


def recall_of(search: Search, exact: Search, queries: Rows) -> float:
    """Return the share of the exact results that the other search finds."""
    pairs = ((set(search(query).slots.tolist()), set(exact(query).slots.tolist())) for query in queries)
    return sum(len(found & wanted) for found, wanted in pairs) / (K * len(queries))


async def searched(url: str, *, name: str, plan: Plan, found: list[Row]) -> float:
    kind, count = KINDS[name], plan.pick(100_000, 10_000)
    store = await filled(url, kind.rows(count, 1), kind.metric, (FIELD,))
    queries, index = kind.rows(QUERIES, 2), store._snapshot.index
    what = f"{count:,} x {DIMENSIONS}, {name}"
    found += _rates(index, queries, what, None if plan.quick else kind.bar)
    found += _recalls(index, queries, what)
    began = time.perf_counter()
    for query in queries:
        await store.search(query, K)
    seconds = time.perf_counter() - began
    found.append(
        Row(
            section="searches",
            what=f"{what}, as users call it",
            ours=QUERIES / seconds,
            unit="searches/s",
            note="by lists, with all attributes of the ten hits read from storage",
        )
    )
    measured = await store.recall(sample=QUERIES, k=K)
    found.append(_recall_row(f"{what}, as the store measures it", measured.recall, bar=None))
    await store.close()
    return seconds


def _rates(index: Index, queries: Rows, what: str, bar: float | None) -> list[Row]:
    """Compare exact searches with one pass of numpy, and searches by lists with exact ones."""
    matrix, squares = index.matrix[: index.count], index.squares[: index.count]

    def one_pass(query: Rows) -> object:
        return np.argpartition(squares - 2 * (matrix @ query), K)

    def timed(search: Callable[[Rows], object]) -> float:
        began = time.perf_counter()
        for query in queries:
            search(query)
        return time.perf_counter() - began

    searches = {
        "one pass": one_pass,
        "exact": partial(index.exact, k=K),
        "by lists": partial(index.search, k=K),
        **{f"{n} lists": partial(index.search, k=K, nprobe=n) for n in (16, 64, 256)},
    }
    rates = interleave({name: partial(timed, one) for name, one in searches.items()}, work=QUERIES, rounds=3)
    made = []
    for name in list(searches)[1:]:
        beside = "one pass" if name == "exact" else "exact"
        made.append(
            Row(
                section="searches",
                what=f"{what}, {name}",
                ours=rates.median(name),
                ceiling=rates.median(beside),
                ratio=rates.ratio(name, beside),
                unit="searches/s",
                against="one pass of numpy over all vectors" if name == "exact" else "the exact search",
                bar={"exact": 0.5, "by lists": bar}.get(name),
                note=f"{what}: {len(index.lists)} lists",
            )
        )
    return made


def _recalls(index: Index, queries: Rows, what: str) -> list[Row]:
    exact = partial(index.exact, k=K)
    half = Eq("half", True)
    filtered, filtered_exact = (partial(one, k=K, filter=half) for one in (index.search, index.exact))
    made = [
        _recall_row(f"{what}, by lists", recall_of(partial(index.search, k=K), exact, queries), bar=0.95),
        _recall_row(
            f"{what}, half of them filtered out", recall_of(filtered, filtered_exact, queries), bar=0.95
        ),
    ]
    for nprobe in (16, 64, 256):
        by_lists = partial(index.search, k=K, nprobe=nprobe)
        made.append(_recall_row(f"{what}, {nprobe} lists", recall_of(by_lists, exact, queries), bar=None))
    return made


def _recall_row(what: str, recall: float, *, bar: float | None) -> Row:
    return Row(
        section="recall",
        what=what,
        ours=recall,
        ceiling=1.0,
        unit=f"recall@{K}",
        against="the exact search",
        bar=bar,
    )


def searches(plan: Plan) -> list[Row]:
    """Measure sequential queries by lists and exactly, and the recall of lists."""
    found: list[Row] = []
    for name in KINDS:
        over_directory(plan, partial(searched, name=name, plan=plan, found=found))
    return sorted(found, key=lambda row: row.section, reverse=True)


SECTIONS: dict[str, Callable[[Plan], list[Row]]] = {"inserts": inserts, "searches": searches}


if __name__ == "__main__":
    sys.exit(
        run_planned(
            "Measure a vector collection against plain records and plain numpy.",
            SECTIONS,
            quick="a tenth of the vectors",
        )
    )
