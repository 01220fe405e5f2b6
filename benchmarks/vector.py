"""Measure a vector collection on this machine: `python benchmarks/vector.py`.

100,000 vectors of 128 dimensions over SlateDB in a local directory. Inserts stand beside the same records put
by hand, without lists, ids or an index; searches beside one pass of numpy over all vectors. Recall is that of
the ten best, against the exact search.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from penstock.coordinator import Put
from penstock.coordinator.slate import SlateStorage
from penstock.vector import Vector, VectorConfig, VectorStore
from penstock.vector.attributes import encode_vector
from penstock.vector.keys import data_key, dictionary_key
from penstock.vector.values import encode_id
from rounds import Plan, interleave, scratch
from sections import option_parser, run_sections, workdir
from table import Row

DIMENSIONS = 128
WRITE_VECTORS = 1000
QUERIES = 100
K = 10
Rows = npt.NDArray[np.float32]


def clustered(count: int, seed: int) -> Rows:
    """Groups of some hundred neighbours, as embeddings of documents have."""
    rng, centres = np.random.default_rng(seed), np.random.default_rng(0).normal(size=(500, DIMENSIONS))
    near = 0.35 * rng.normal(size=(count, DIMENSIONS))
    return (centres[rng.integers(0, len(centres), count)] + near).astype(np.float32)


def smooth(count: int, seed: int) -> Rows:
    """No groups at all, but only 24 directions that matter: hard for lists."""
    rng = np.random.default_rng(seed)
    directions = np.random.default_rng(0).normal(size=(24, DIMENSIONS)) / 24**0.5
    noise = 0.05 * rng.normal(size=(count, DIMENSIONS))
    return (rng.normal(size=(count, 24)) @ directions + noise).astype(np.float32)


KINDS: dict[str, Callable[[int, int], Rows]] = {"clustered": clustered, "smooth": smooth}


def over_directory(plan: Plan, work: Callable[[str], Awaitable[float]]) -> float:
    with scratch(plan) as root:
        return asyncio.run(work(root.as_uri()))  # type: ignore[arg-type]


async def filled(url: str, rows: Rows) -> VectorStore:
    store = await VectorStore.open(VectorConfig(store=url, dimensions=DIMENSIONS))
    for begin in range(0, len(rows), WRITE_VECTORS):
        part = rows[begin : begin + WRITE_VECTORS]
        await store.upsert(Vector(f"v{number}", row) for number, row in enumerate(part, begin))
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
    """Writes of 1000 vectors, until the last one is durable and can be found."""
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


async def searched(url: str, *, kind: str, count: int, found: list[Row]) -> float:
    store = await filled(url, KINDS[kind](count, 1))
    queries = KINDS[kind](QUERIES, 2)
    index = store._snapshot.index
    exact = dataclasses.replace(index, exact_max=count)
    matrix, squares = index.matrix[: index.count], index.squares[: index.count]

    def one_pass() -> float:
        began = time.perf_counter()
        for query in queries:
            np.argpartition(squares - 2 * (matrix @ query), K)
        return time.perf_counter() - began

    def by(index_used: object, nprobe: int | None) -> float:
        began = time.perf_counter()
        for query in queries:
            index_used.search(query, K, nprobe=nprobe)  # type: ignore[attr-defined]
        return time.perf_counter() - began

    contenders = {
        "one pass": one_pass,
        "exact": partial(by, exact, None),
        **{f"{n} lists": partial(by, index, n) for n in (16, 64, 256)},
    }
    rates = interleave(contenders, work=QUERIES, rounds=3)
    wanted = [set(exact.search(query, K).slots.tolist()) for query in queries]
    for name in list(contenders)[1:]:
        nprobe = None if name == "exact" else int(name.split()[0])
        used = exact if nprobe is None else index
        hits = [set(used.search(query, K, nprobe=nprobe).slots.tolist()) for query in queries]
        recall = sum(len(a & b) for a, b in zip(hits, wanted, strict=True)) / (K * QUERIES)
        found.append(
            Row(
                section="searches",
                what=f"{count:,} x {DIMENSIONS}, {kind}, {name}: recall@{K} {recall:.3f}",
                ours=rates.median(name),
                ceiling=rates.median("one pass"),
                ratio=rates.ratio(name, "one pass"),
                unit="searches/s",
                against="one pass of numpy over all vectors",
                bar=0.5 if name == "exact" else None,
                note=f"{kind}: {len(index.lists)} lists",
            )
        )
    began = time.perf_counter()
    for query in queries:
        await store.search(query, K)
    seconds = time.perf_counter() - began
    found.append(
        Row(
            section="searches",
            what=f"{count:,} x {DIMENSIONS}, {kind}, as users call it",
            ours=QUERIES / seconds,
            unit="searches/s",
            note="the usual nprobe, with all attributes of the ten hits read from storage",
        )
    )
    await store.close()
    return seconds


def searches(plan: Plan) -> list[Row]:
    """One query after the other, by lists and exactly, with the recall of each."""
    found: list[Row] = []
    for kind in KINDS:
        work = partial(searched, kind=kind, count=plan.pick(100_000, 10_000), found=found)
        over_directory(plan, work)
    return found


SECTIONS: dict[str, Callable[[Plan], list[Row]]] = {"inserts": inserts, "searches": searches}


def main() -> int:
    """Run the sections asked for and print one table. With `--strict`, exits with 1 when a bar is missed."""
    parser = option_parser("Measure a vector collection against plain records and plain numpy.", SECTIONS)
    parser.add_argument("--quick", action="store_true", help="a tenth of the vectors")
    options = parser.parse_args()
    with workdir(options.dir) as data:
        plan = Plan(quick=options.quick, workdir=data)
        return run_sections(options, {name: partial(section, plan) for name, section in SECTIONS.items()})


if __name__ == "__main__":
    sys.exit(main())
