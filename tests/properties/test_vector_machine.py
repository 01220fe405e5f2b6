"""A vector collection against a dictionary: upserts, deletions, flushes, searches, restarts and crashes."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.properties.mutations import changes, mutated
from tests.unit.vector.doubles import CONFIG, FIELDS, World, best_scores
from tests.unit.vector.test_formats import DECODERS, MERGED, described

from penstock.errors import Corrupt, InvalidInput
from penstock.vector import Eq, Field, Filter, In, Metric, Neq, Or, Vector, VectorStore, merge_records
from penstock.vector.records import DELETE_METADATA, UPSERT_METADATA, decode_record

NAMES = st.integers(0, 40).map(lambda number: f"v{number}")
NUMBERS = st.lists(st.floats(-4, 4, width=32), min_size=3, max_size=3)
ATTRIBUTES = st.fixed_dictionaries(
    {},
    optional={
        "lang": st.sampled_from(["en", "de", "fr"]),
        "year": st.integers(-1, 2),
        "draft": st.booleans(),
    },
)
VECTORS = st.builds(Vector, NAMES, NUMBERS, ATTRIBUTES)
CHANGES = changes(("flip", "set", "cut", "insert", "double", "u32"), (0, 127, 255, 2**31, 2**32 - 1), most=4)
FILTERS: st.SearchStrategy[Filter | None] = st.sampled_from(
    [
        None,
        Eq("lang", "en"),
        Neq("lang", "de"),
        In("year", [0, 1]),
        Or(Eq("draft", True), Eq("year", -1)),
    ]
)


def matches(one: Vector, wanted: Filter | None) -> bool:
    if wanted is None:
        return True
    if isinstance(wanted, Or):
        return any(matches(one, each) for each in wanted.filters)
    assert isinstance(wanted, Eq | Neq | In)
    value = one.attributes.get(wanted.field)
    if isinstance(wanted, In):
        return value in wanted.values
    return (value == wanted.value) == isinstance(wanted, Eq)


class VectorMachine(RuleBasedStateMachine):
    """`held` is the written state, `flushed` the visible state, `durable` the minimum that survives a
    crash."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.held: dict[str, Vector] = {}
        self.flushed: dict[str, Vector] = {}
        self.durable: dict[str, Vector] = {}
        self.store: VectorStore | None = None

    @initialize(metric=st.sampled_from(["l2", "cosine", "dot"]), exact_max=st.sampled_from([0, 10, 1000]))
    def begin(self, metric: str, exact_max: int) -> None:
        self.metric = Metric.named(metric)
        config = dataclasses.replace(
            CONFIG, metric=metric, exact_max=exact_max, split_at=6, merge_below=2, sync_mode="explicit"
        )
        self.world = World(config)
        self.store = self.runner.run(self.world.open())

    @property
    def open(self) -> VectorStore:
        assert self.store is not None
        return self.store

    @rule(vectors=st.lists(VECTORS, min_size=1, max_size=12))
    def upsert(self, vectors: list[Vector]) -> None:
        self.runner.run(self.open.upsert(vectors))
        self.held.update({one.id: one for one in vectors})

    @rule(names=st.lists(NAMES, max_size=12))
    def delete(self, names: list[str]) -> None:
        self.runner.run(self.open.delete(names))
        for name in names:
            self.held.pop(name, None)

    @rule(vector=VECTORS)
    def upsert_something_wrong(self, vector: Vector) -> None:
        wrong = Vector("wrong", [1, 2])
        with pytest.raises(InvalidInput):
            self.runner.run(self.open.upsert([vector, wrong]))

    @rule(durable=st.booleans())
    def flush(self, durable: bool) -> None:
        self.runner.run(self.open.flush(durable=durable))
        self.flushed = dict(self.held)
        if durable:
            self.durable = dict(self.held)

    @rule()
    def close_and_open(self) -> None:
        self.runner.run(self.open.close())
        self.flushed = dict(self.held)
        self.durable = dict(self.held)
        self.store = self.runner.run(self.world.open())

    @rule()
    def crash_and_open(self) -> None:
        self.runner.run(self.open.abort())
        self.held = dict(self.durable)
        self.flushed = dict(self.durable)
        self.store = self.runner.run(self.world.open())

    @rule(query=NUMBERS, k=st.integers(1, 15), wanted=FILTERS)
    def search(self, query: list[float], k: int, wanted: Filter | None) -> None:
        # Probe all lists, so that a search by lists is exact.
        nprobe = None if len(self.flushed) <= self.world.config.exact_max else 1000
        hits = self.runner.run(self.open.search(query, k, filter=wanted, nprobe=nprobe))
        left = {name: one for name, one in self.flushed.items() if matches(one, wanted)}
        best, scores = best_scores(self.metric, np.array(query, np.float32), left, k)
        assert [hit.score for hit in hits] == pytest.approx(best, rel=1e-4, abs=1e-5)
        for hit in hits:
            assert hit.score == pytest.approx(scores[hit.id], rel=1e-4, abs=1e-5)
            assert dict(hit.attributes) == left[hit.id].attributes
        assert len({hit.id for hit in hits}) == len(hits)

    @rule(query=NUMBERS, k=st.integers(1, 15), wanted=FILTERS, nprobe=st.sampled_from([None, 1, 3]))
    def search_by_lists(self, query: list[float], k: int, wanted: Filter | None, nprobe: int | None) -> None:
        """It may miss some of the best results, but never returns too few."""
        hits = self.runner.run(self.open.search(query, k, filter=wanted, nprobe=nprobe))
        left = {name: one for name, one in self.flushed.items() if matches(one, wanted)}
        assert len(hits) == min(k, len(left))
        _, scores = best_scores(self.metric, np.array(query, np.float32), left, k)
        told = [hit.score for hit in hits]
        assert told == sorted(told, reverse=self.metric is Metric.DOT)
        for hit in hits:
            assert hit.score == pytest.approx(scores[hit.id], rel=1e-4, abs=1e-5)

    @rule(name=NAMES)
    def get(self, name: str) -> None:
        found = self.runner.run(self.open.get(name))
        wanted = self.flushed.get(name)
        assert (found is None) == (wanted is None)
        if found is not None and wanted is not None:
            assert found.vector.tolist() == wanted.vector.tolist()
            assert found.attributes == wanted.attributes

    @precondition(lambda self: self.store is not None)
    @invariant()
    def counts_and_lists_are_right(self) -> None:
        index = self.open._snapshot.index
        assert index.live == len(self.open) == len(self.flushed)
        slots = np.concatenate([*index.lists, np.empty(0, np.int64)]).astype(np.int64)
        assert len(np.unique(slots)) == len(slots), "a row stands in two lists"
        assert int(index.alive[slots].sum()) == int(index.alive[: index.count].sum()) == index.live

    def teardown(self) -> None:
        if self.store is not None:
            self.runner.run(self.store.abort())
        self.runner.close()


TestVectorMachine = VectorMachine.TestCase
TestVectorMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=8)
ANY_VALUE = st.one_of(
    ANY_TEXT,
    st.booleans(),
    st.floats(),
    st.integers(),
    st.integers(-(2**64), 2**64),
    st.sampled_from([2**63, 2**63 - 1, -(2**63), -(2**63) - 1, 10**30, 10**400]),
    st.none(),
    st.binary(max_size=3),
)
ANY_VECTOR = st.builds(
    Vector,
    st.one_of(NAMES, ANY_TEXT),
    st.one_of(NUMBERS, st.lists(st.floats(), min_size=3, max_size=3)),
    # Few, because one invalid value makes the whole vector invalid.
    st.dictionaries(
        st.one_of(st.sampled_from([one.name for one in FIELDS]), ANY_TEXT), ANY_VALUE, max_size=2
    ),
)


@pytest.mark.parametrize("fields", [FIELDS, ()], ids=["schema", "no-schema"])
@settings(max_examples=300, deadline=None)
@given(vectors=st.lists(ANY_VECTOR, min_size=1, max_size=4))
def test_whatever_a_collection_takes_can_be_flushed_and_read(
    fields: tuple[Field, ...], vectors: list[Vector]
) -> None:
    async def life() -> None:
        store = await World(dataclasses.replace(CONFIG, fields=fields)).open()
        taken: dict[str, Vector] = {}
        for one in vectors:
            try:
                await store.upsert([one])
            except InvalidInput:
                continue
            taken[one.id] = one
        await store.flush()
        for name, one in taken.items():
            found = await store.get(name)
            assert found is not None
            assert found.attributes == one.attributes
        await store.close()

    asyncio.run(life())


@settings(max_examples=300, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", MERGED)
def test_a_merge_with_a_damaged_operand_is_corrupt_and_never_a_crash(name: str, data: st.DataObject) -> None:
    """The grouping of the operands and the position of the damaged one are arbitrary."""
    good = described()[name]
    damaged = data.draw(st.one_of(st.binary(max_size=40), CHANGES.map(lambda todo: mutated(good, todo))))
    operands = data.draw(st.permutations([good, good, damaged]))
    key = MERGED[name]
    first = merge_records(key, [merge_records(key, operands[:2]), operands[2]])
    last = merge_records(key, [operands[0], merge_records(key, operands[1:])])
    try:
        DECODERS[name](damaged)
    except Corrupt:
        for merged in (first, last, merge_records(key, operands)):
            with pytest.raises(Corrupt):
                DECODERS[name](merged)


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damaged_values_are_corrupt_or_something_else_but_never_a_crash(
    name: str, data: st.DataObject
) -> None:
    damaged = mutated(described()[name], data.draw(CHANGES))
    try:
        DECODERS[name](damaged)
    except Corrupt:
        pass


@settings(max_examples=300, deadline=None)
@given(
    damaged=st.one_of(
        st.binary(max_size=60),
        CHANGES.map(lambda todo: mutated(described()["record-upsert"], todo)),
        CHANGES.map(lambda todo: mutated(described()["record-delete"], todo)),
    ),
    metadata=st.sampled_from([UPSERT_METADATA, DELETE_METADATA]),
)
def test_damaged_records_are_refused_or_read_but_never_a_crash(damaged: bytes, metadata: bytes) -> None:
    try:
        decode_record(damaged, metadata)
    except InvalidInput:
        pass
