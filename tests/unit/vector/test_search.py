"""Search results: the right vectors with the right scores and the requested fields."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from tests.unit.vector.doubles import CONFIG, World, best_scores, index_of, vector

from penstock.errors import InvalidInput
from penstock.vector import And, Eq, Filter, In, Metric, Neq, Or, Vector, VectorConfig, VectorStore
from penstock.vector.filters import parse_filter

METRICS = ("l2", "cosine", "dot")


async def filled(config: VectorConfig, rows: np.ndarray) -> VectorStore:
    store = await World(config).open()
    for begin in range(0, len(rows), 2000):
        part = rows[begin : begin + 2000]
        await store.upsert([Vector(f"v{begin + n}", row) for n, row in enumerate(part)])
        await store.flush()
    return store


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("offset", [0.0, 1e4])
async def test_an_exact_search_finds_exactly_the_best(metric: str, offset: float) -> None:
    rng = np.random.default_rng(1)
    rows = (rng.normal(size=(300, 8)) + offset).astype(np.float32)
    store = await filled(VectorConfig(dimensions=8, metric=metric), rows)
    held = {f"v{n}": Vector(f"v{n}", row) for n, row in enumerate(rows)}
    for _ in range(20):
        query = (rng.normal(size=8) + offset).astype(np.float32)
        best, scores = best_scores(Metric.named(metric), query, held, 10)
        hits = await store.search(query, k=10)
        assert [hit.score for hit in hits] == pytest.approx(best, rel=1e-5, abs=1e-6)
        for hit in hits:
            assert hit.score == pytest.approx(scores[hit.id], rel=1e-5, abs=1e-6)
    await store.close()


async def test_the_score_of_l2_is_the_squared_distance() -> None:
    store = await filled(VectorConfig(dimensions=2), np.array([[3, 4], [0, 1]], np.float32))
    assert [(hit.id, hit.score) for hit in await store.search([0, 0])] == [("v1", 1.0), ("v0", 25.0)]
    await store.close()


async def test_cosine_compares_directions_and_gives_the_vector_back_as_it_was() -> None:
    rows = np.array([[10, 0], [0, 0.5], [0, 0]], np.float32)
    store = await filled(VectorConfig(dimensions=2, metric="cosine"), rows)
    hits = await store.search([1, 0])
    assert [hit.id for hit in hits] == ["v0", "v2", "v1"]
    assert [hit.score for hit in hits] == pytest.approx([0, 1, 2])
    assert hits[0].vector is not None
    assert hits[0].vector.tolist() == [10, 0]
    await store.close()


async def test_of_the_dot_product_more_is_better() -> None:
    store = await filled(VectorConfig(dimensions=2, metric="dot"), np.array([[1, 0], [5, 0]], np.float32))
    assert [(hit.id, hit.score) for hit in await store.search([2, 0])] == [("v1", 10.0), ("v0", 2.0)]
    await store.close()


@pytest.mark.parametrize("metric", METRICS)
async def test_lists_find_nearly_what_an_exact_search_finds(metric: str) -> None:
    """Recall at 10 over clustered vectors, and its growth with the number of compared lists."""
    rng = np.random.default_rng(5)
    centres = rng.normal(size=(60, 16))
    rows = (centres[rng.integers(0, 60, 6000)] + 0.3 * rng.normal(size=(6000, 16))).astype(np.float32)
    store = await filled(VectorConfig(dimensions=16, metric=metric, exact_max=1000), rows)
    index = index_of(store)
    assert len(index.lists) > 30
    exact = dataclasses.replace(index, exact_max=10_000)
    recalls = []
    for nprobe in (1, 8, 32, len(index.lists)):
        found = 0
        for query in rows[:50] + 0.05 * rng.normal(size=(50, 16)).astype(np.float32):
            wanted = set(exact.search(query, 10).slots.tolist())
            found += len(wanted & set(index.search(query, 10, nprobe=nprobe).slots.tolist()))
        recalls.append(found / 500)
    assert recalls == sorted(recalls)
    assert recalls[2] >= 0.95, f"recall@10 with 32 lists is {recalls[2]}"
    assert recalls[3] == 1.0
    await store.close()


async def test_lists_keep_their_size_while_vectors_come_and_go() -> None:
    store = await World().open()
    rng = np.random.default_rng(9)
    for life in range(25):
        names = rng.permutation(400)[:60]
        await store.upsert([Vector(f"v{n}", rng.normal(size=3)) for n in names])
        await store.delete([f"v{n}" for n in rng.permutation(400)[: 3 * life]])
        await store.flush()
        index = index_of(store)
        living = [int(index.alive[slots].sum()) for slots in index.lists]
        assert sum(living) == index.live
        assert max(living, default=0) < 8
    assert min(living) >= 1
    assert len(index.lists) <= index.live / 2
    await store.close()


async def test_vectors_that_are_all_the_same_stay_in_one_list() -> None:
    store = await World().open()
    await store.upsert([vector(f"v{n}", 1, 2, 3) for n in range(50)])
    await store.flush()
    assert len(index_of(store).lists) == 1
    assert len(await store.search([1, 2, 3], k=50, nprobe=1)) == 50
    await store.close()


ROWS = [
    vector("a", 1, 0, 0, lang="en", year=1999, rank=0.5, draft=True, body="text"),
    vector("b", 2, 0, 0, lang="de", year=-5, rank=-0.0, draft=False),
    vector("c", 3, 0, 0, lang="en", year=2001, rank=2),
    vector("d", 4, 0, 0),
]


@pytest.mark.parametrize(
    ("wanted", "ids"),
    [
        (Eq("lang", "en"), "ac"),
        (Eq("lang", "fr"), ""),
        (Neq("lang", "en"), "bd"),
        (Neq("lang", "fr"), "abcd"),
        (In("year", [1999, -5, 7]), "ab"),
        (In("year", []), ""),
        (Eq("rank", 0), "b"),
        (Eq("rank", 2.0), "c"),
        (Eq("draft", False), "b"),
        (Neq("draft", True), "bcd"),
        (And(Eq("lang", "en"), Neq("year", 1999)), "c"),
        (Or(Eq("lang", "de"), Eq("year", 2001)), "bc"),
        (And(Or(Eq("lang", "en"), Eq("lang", "de")), Neq("rank", 0.5)), "bc"),
        (Or(), ""),
        (And(), "abcd"),
    ],
)
@pytest.mark.parametrize("exact_max", [0, 1000])
async def test_filters_leave_what_matches(wanted: Filter, ids: str, exact_max: int) -> None:
    world = World(dataclasses.replace(CONFIG, exact_max=exact_max))
    store = await world.open()
    await store.upsert([vector("b", 9, 9, 9, lang="en", draft=True), vector("gone", 0, 0, 0, lang="en")])
    await store.flush()
    await store.upsert(ROWS)
    await store.delete(["gone"])
    await store.close()
    store = await world.open()
    assert "".join(sorted(hit.id for hit in await store.search([0, 0, 0], filter=wanted))) == ids
    await store.close()


async def test_a_filter_that_leaves_few_vectors_is_answered_exactly() -> None:
    rng = np.random.default_rng(2)
    store = await World(dataclasses.replace(CONFIG, exact_max=20)).open()
    rows = rng.normal(size=(400, 3))
    await store.upsert(
        [Vector(f"v{n}", row, {"lang": "rare" if n % 40 == 0 else "en"}) for n, row in enumerate(rows)]
    )
    await store.flush()
    hits = await store.search([9, 9, 9], k=50, filter=Eq("lang", "rare"))
    assert sorted(hit.id for hit in hits) == sorted(f"v{n}" for n in range(0, 400, 40))
    await store.close()


@pytest.mark.parametrize(
    "wanted",
    [
        Eq("body", "text"),
        Eq("nothing", 1),
        Eq("lang", 1),
        Eq("year", "1"),
        Eq("year", True),
        In("year", [1, "x"]),
        And(Or(Eq("draft", 0))),
        Eq("lang", "\ud800"),
        In("lang", ["en", "\udfff"]),
        Eq("\ud800", "en"),
    ],
)
async def test_filters_that_cannot_be_answered_are_refused(wanted: Filter) -> None:
    store = await World().open()
    with pytest.raises(InvalidInput):
        await store.search([0, 0, 0], filter=wanted)
    await store.close()


def test_filters_are_read_from_requests() -> None:
    eq = {"eq": {"field": "a", "value": 1}}
    read = parse_filter({"and": [eq, {"or": [{"neq": {"field": "b", "value": "x"}}]}]})
    assert read == And(Eq("a", 1), Or(Neq("b", "x")))
    assert parse_filter({"in": {"field": "a", "values": [1, True]}}) == In("a", [1, True])
    deep: object = eq
    for _ in range(100):
        deep = {"and": [deep]}
    for wrong in (
        deep,
        {},
        [],
        {"like": {"field": "a", "value": 1}},
        {"eq": {"field": "a"}},
        {"eq": {"field": 1, "value": 1}},
        {"eq": {"field": "a", "value": None}},
        {"eq": {"field": "a", "value": 1, "more": 2}},
        {"in": {"field": "a", "values": "abc"}},
        {"and": "x"},
        {**eq, "and": []},
    ):
        with pytest.raises(InvalidInput):
            parse_filter(wrong)


async def test_a_search_says_what_fields_it_wants() -> None:
    store = await World().open()
    await store.upsert(ROWS)
    await store.flush()
    (hit,) = await store.search([1, 0, 0], k=1)
    assert dict(hit.attributes) == {"lang": "en", "year": 1999, "rank": 0.5, "draft": True, "body": "text"}
    assert hit.vector is not None
    (hit,) = await store.search([1, 0, 0], k=1, include_fields=["lang"])
    assert (dict(hit.attributes), hit.vector) == ({"lang": "en"}, None)
    (hit,) = await store.search([1, 0, 0], k=1, include_fields=["vector"])
    assert hit.attributes == {}
    assert hit.vector is not None
    (hit,) = await store.search([1, 0, 0], k=1, include_fields=[])
    assert (hit.id, hit.attributes, hit.vector) == ("a", {}, None)
    await store.close()


async def test_a_field_that_the_schema_has_not_is_refused_also_where_nothing_would_be_found() -> None:
    store = await World().open()
    for wrong in (["nosuch"], ["lang", "nosuch"], ["\ud800"], [1]):
        with pytest.raises(InvalidInput, match="include_fields"):
            await store.search([0, 0, 0], include_fields=wrong)  # type: ignore[arg-type]
    assert await store.search([0, 0, 0], include_fields=["vector", "lang"]) == []
    await store.close()
    free = await World(VectorConfig(dimensions=3)).open()
    assert await free.search([0, 0, 0], include_fields=["anything"]) == []
    await free.close()


async def test_searches_that_make_no_sense_are_refused() -> None:
    store = await World().open()
    for call in (
        {"vector": [1, 0]},
        {"vector": [1, 0, float("inf")]},
        {"vector": [[1, 0, 0]]},
        {"vector": [1, 0, 0], "k": 0},
        {"vector": [1, 0, 0], "k": 10_001},
        {"vector": [1, 0, 0], "nprobe": 0},
    ):
        with pytest.raises(InvalidInput):
            await store.search(**call)  # type: ignore[arg-type]
    assert await store.search([1, 0, 0], nprobe=3) == []
    await store.close()
