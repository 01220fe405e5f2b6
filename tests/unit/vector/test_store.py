"""Promises of a collection to its writers and readers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from tests.unit.vector.doubles import CONFIG, FIELDS, World, index_of, vector

from penstock.coordinator import Durability, FlushError, FlushFenced
from penstock.coordinator.slate import SlateStorage
from penstock.coordinator.slate_batch import slatedb
from penstock.coordinator.storage import KEY_BYTES_MAX, Merge, Put
from penstock.errors import ConfigError, Corrupt, InvalidInput, OutcomeUnknown, Unavailable
from penstock.testing.memory_storage import StorageFault
from penstock.vector import Field, FieldType, Vector, VectorConfig, VectorStore, Write, merge_records
from penstock.vector.codec import decode_block, decode_ids, decode_posting, encode_posting
from penstock.vector.keys import CENTROID_LEVEL, RecordType, metadata_key, posting_key, record_prefix

LANG_BYTES_MAX = KEY_BYTES_MAX - len(metadata_key("lang", b"")) - 1
"""Limit of an indexed text, which is part of a key after its field and a tag."""


async def ids(store: VectorStore) -> list[str]:
    return sorted(hit.id for hit in await store.search([0, 0, 0], k=1000))


async def test_what_was_written_is_found_after_a_flush_and_not_before() -> None:
    store = await World().open()
    await store.upsert([vector("a", 1, 0, 0)])
    assert await store.get("a") is None
    assert await store.search([1, 0, 0]) == []
    await store.flush()
    found = await store.get("a")
    assert found is not None
    assert found.vector.tolist() == [1, 0, 0]
    assert await ids(store) == ["a"]
    await store.close()


async def test_the_last_write_to_an_id_wins_inside_a_flush_and_across_flushes() -> None:
    store = await World().open()
    await store.upsert([vector("a", 1, 0, 0, lang="en"), vector("a", 2, 0, 0, lang="de")])
    await store.flush()
    assert [(hit.id, hit.score) for hit in await store.search([2, 0, 0])] == [("a", 0.0)]
    await store.upsert([vector("a", 3, 0, 0)])
    await store.flush()
    hits = await store.search([3, 0, 0])
    assert [(hit.id, hit.score, dict(hit.attributes)) for hit in hits] == [("a", 0.0, {})]
    assert not hits.damaged
    assert len(store) == 1
    await store.close()


async def test_upsert_delete_upsert_in_one_flush_keeps_the_last() -> None:
    store = await World().open()
    await store.upsert([vector("a", 1, 0, 0)])
    await store.delete(["a"])
    await store.upsert([vector("a", 2, 0, 0)])
    await store.upsert([vector("b", 1, 0, 0)])
    await store.delete(["b"])
    await store.flush()
    assert await ids(store) == ["a"]
    found = await store.get("a")
    assert found is not None
    assert found.vector.tolist() == [2, 0, 0]
    assert await store.get("b") is None
    await store.close()


async def test_deleting_an_unknown_id_is_not_an_error() -> None:
    store = await World().open()
    await store.delete(["nobody"])
    await store.flush()
    assert len(store) == 0
    await store.close()


@pytest.mark.parametrize(
    "wrong",
    [
        vector("b", 1, 0),
        vector("b", 1, 0, float("nan")),
        vector("b", 1, 0, 1e16),
        vector("", 1, 0, 0),
        vector("é" * 33, 1, 0, 0),
        vector("b", 1, 0, 0, unknown="x"),
        vector("b", 1, 0, 0, year="1999"),
        vector("b", 1, 0, 0, year=True),
        vector("b", 1, 0, 0, year=2**63),
        vector("b", 1, 0, float("-inf")),
        vector("b", 1, 0, 0, rank=float("nan")),
        vector("b", 1, 0, 0, rank=float("inf")),
        vector("b", 1, 0, 0, rank=10**400),
        vector("b", 1, 0, 0, draft=1),
        vector("b", 1, 0, 0, lang="x" * (LANG_BYTES_MAX + 1)),
        vector("b", 1, 0, 0, body="x" * 65_536),
        vector("b", 1, 0, 0, lang="\ud800"),
    ],
    ids=[
        *(
            "dimensions",
            "nan",
            "too-large",
            "no-id",
            "long-id",
            "unknown-field",
            "text-for-int",
            "flag-for-int",
        ),
        *(
            "large-int",
            "infinite",
            "nan-attribute",
            "infinite-attribute",
            "huge-attribute",
            "int-for-flag",
            "long-key",
            "long-text",
            "no-unicode",
        ),
    ],
)
async def test_one_wrong_vector_refuses_the_whole_write(wrong: Vector) -> None:
    store = await World().open()
    await store.upsert([vector("kept", 9, 9, 9)])
    with pytest.raises(InvalidInput):
        await store.upsert([vector("a", 1, 0, 0), wrong])
    with pytest.raises(InvalidInput):
        await store.write(Write((("kept", None), (wrong.id, wrong)), position=7))
    await store.flush()
    assert await ids(store) == ["kept"]
    assert store.position is None
    await store.close()


async def test_a_refusal_says_which_vector_and_what_is_wrong() -> None:
    store = await World().open()
    for wrong, says in (
        (vector("b", 1, 0), "'b' has 2 components, the collection has 3"),
        (
            vector("b", 1, float("nan"), 0),
            "'b': component 1 is nan; each must be a number from -1e15 to 1e15",
        ),
        (vector("b", 1, 0, 0, colour="red"), "'b': the schema has no field 'colour'"),
        (vector("b", 1, 0, 0, year="1999"), "'b': field 'year' is int64, not str"),
        (vector("x" * 65, 1, 0, 0), "an id may have at most 64 bytes: 'xxx"),
        (Vector(7, [1, 0, 0]), "an id must be a non-empty text"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidInput, match=says):
            await store.upsert([wrong])
    with pytest.raises(InvalidInput, match="the vector 'b' is written under the id 'a'"):
        await store.write(Write((("a", vector("b", 1, 0, 0)),)))
    with pytest.raises(InvalidInput, match="list of names"):
        await store.search([1, 0, 0], include_fields="lang")
    await store.flush()
    assert len(store) == 0
    await store.close()


async def test_what_is_as_long_as_it_may_be_can_be_flushed() -> None:
    name = "n" * (KEY_BYTES_MAX - len(metadata_key("", b"")) - 9)
    fields = (*FIELDS, Field(name=name, type=FieldType.INT64, indexed=True))
    store = await World(dataclasses.replace(CONFIG, fields=fields)).open()
    long = vector("a", 1, 0, 0, lang="x" * LANG_BYTES_MAX, body="x" * 65_535, **{name: 1})
    await store.upsert([long])
    await store.flush()
    found = await store.get("a")
    assert found is not None
    assert found.attributes == long.attributes
    await store.close()
    with pytest.raises(ConfigError, match="index"):
        Field(name=name + "n", type=FieldType.INT64, indexed=True)


async def test_without_a_schema_any_attribute_is_taken() -> None:
    store = await World(VectorConfig(dimensions=3)).open()
    await store.upsert([vector("a", 1, 0, 0, anything="x", n=3, f=0.5, b=True)])
    await store.flush()
    found = await store.get("a")
    assert found is not None
    assert dict(found.attributes) == {"anything": "x", "n": 3, "f": 0.5, "b": True}
    with pytest.raises(InvalidInput):
        await store.upsert([Vector("b", [1, 0, 0], {"x": [1.0]})])  # type: ignore[dict-item]
    await store.close()


async def test_without_a_schema_a_whole_number_beyond_64_bits_is_refused_by_name() -> None:
    store = await World(VectorConfig(dimensions=3)).open()
    for number in (2**63, -(2**63) - 1, 10**30):
        with pytest.raises(InvalidInput, match="'b': attribute 'n'"):
            await store.upsert([vector("b", 1, 0, 0, n=number)])
    ends = vector("a", 1, 0, 0, least=-(2**63), most=2**63 - 1, large=1e300)
    await store.upsert([ends])
    await store.flush()
    found = await store.get("a")
    assert found is not None
    assert found.attributes == ends.attributes
    await store.close()


async def test_everything_is_there_after_a_restart_and_ids_continue() -> None:
    world = World()
    store = await world.open()
    await store.upsert([vector(f"v{n}", n, 0, 0, lang="en", year=n) for n in range(30)])
    await store.flush()
    await store.delete([f"v{n}" for n in range(0, 30, 3)])
    await store.upsert([vector("v1", 100, 0, 0, lang="de")])
    await store.write(Write((), position=5))
    await store.close()
    first = index_of(store)
    store = await world.open()
    assert store.position == 5
    assert await ids(store) == sorted(f"v{n}" for n in range(30) if n % 3)
    assert [hit.id for hit in await store.search([100, 0, 0], k=1)] == ["v1"]
    await store.upsert([vector("new", 0, 0, 0)])
    await store.flush()
    used = set(first.ids[: first.count].tolist())
    index = index_of(store)
    newest = {int(one) for one in index.ids[: index.count]} - used
    assert newest == {4096}, "an id of the block that an earlier life began is used again"
    await store.close()


async def test_the_id_block_is_in_the_batch_that_uses_it_first() -> None:
    world = World()
    store = await world.open()
    await store.upsert([vector("a", 1, 0, 0)])
    await store.flush(durable=False)
    batch = world.disk.unflushed[-1] if world.disk.unflushed else ()
    keys = {operation.key for operation in batch} or set(world.disk.persisted)
    assert record_prefix(RecordType.BLOCK) in keys
    assert world.storage is not None
    block = await world.storage.get(record_prefix(RecordType.BLOCK))
    assert block is not None
    assert decode_block(block) == (0, 4096)
    await store.close()


async def test_deleted_ids_are_noted_until_no_list_holds_them() -> None:
    world = World()
    store = await world.open()
    await store.upsert([vector(f"v{n}", n, 0, 0) for n in range(6)])
    await store.flush()
    await store.delete(["v0"])
    await store.flush()
    assert world.storage is not None
    noted = await world.storage.get(record_prefix(RecordType.DELETIONS))
    assert noted is not None
    assert len(decode_ids(noted)) == 1
    await store.delete(["v1", "v2"])
    await store.flush()
    noted = await world.storage.get(record_prefix(RecordType.DELETIONS))
    assert noted is not None
    assert len(decode_ids(noted)) == 0
    await store.close()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dimensions": 4}, "3 dimensions, not 4"),
        ({"metric": "cosine"}, "metric is l2, not cosine"),
        ({"fields": FIELDS[:-1]}, "field 'body' is text, not indexed, not absent"),
        ({"fields": ()}, "field 'lang' is string, indexed, not absent"),
        ({"fields": (dataclasses.replace(FIELDS[0], indexed=False), *FIELDS[1:])}, "field 'lang'"),
    ],
    ids=["dimensions", "metric", "field", "no-fields", "index"],
)
async def test_a_collection_that_was_created_differently_is_not_opened(
    change: dict[str, object], says: str
) -> None:
    world = World()
    await (await world.open()).close()
    with pytest.raises(ConfigError, match=says):
        await world.open(**change)
    silent = {"dimensions": None, "metric": None, "fields": None}
    with pytest.raises(ConfigError, match=says):
        await world.open(**silent | change)
    store = await world.open(**silent)
    assert store.collection.fields == FIELDS
    assert store.collection.dimensions == 3
    await store.close()


async def test_a_collection_that_is_not_there_needs_its_dimensions() -> None:
    with pytest.raises(ConfigError, match="dimensions"):
        await World(VectorConfig()).open()


async def test_a_newer_writer_fences_the_older_one_which_says_so() -> None:
    world = World()
    older = await world.open()
    newer = await world.open()
    await older.upsert([vector("a", 1, 0, 0)])
    with pytest.raises(FlushFenced):
        await older.flush()
    assert isinstance(await older.failure(), FlushFenced)
    with pytest.raises(FlushFenced):
        await older.upsert([vector("b", 1, 0, 0)])
    with pytest.raises(FlushFenced):
        await older.close()
    assert len(newer) == 0
    await newer.close()


async def test_a_flusher_that_failed_does_not_continue() -> None:
    world = World()
    store = await world.open()
    assert world.storage is not None
    world.storage.fail_at(len(world.storage.calls) + 1, StorageFault.FAILED)
    handle = await store.upsert([vector("a", 1, 0, 0)])
    with pytest.raises(FlushError):
        await store.flush()
    with pytest.raises(FlushError):
        await handle.wait(Durability.DURABLE)
    with pytest.raises(OutcomeUnknown):
        await store._coordinator._flush_queue._flusher.flush(store._coordinator.view().current)
    await store.abort()


async def test_an_old_snapshot_stays_as_it_was_while_lists_are_cut_and_rows_are_compacted() -> None:
    store = await World().open()
    rng = np.random.default_rng(3)
    await store.upsert([Vector(f"v{n}", rng.normal(size=3)) for n in range(60)])
    await store.flush()
    old = index_of(store)
    query = rng.normal(size=3).astype(np.float32)
    before = old.search(query, 20)
    names = [old.names[slot] for slot in before.slots]
    for _ in range(30):
        await store.delete([f"v{n}" for n in range(60)])
        await store.upsert([Vector(f"v{n}", rng.normal(size=3)) for n in range(60)])
        await store.flush()
    after = old.search(query, 20)
    assert after.scores.tolist() == before.scores.tolist()
    assert [old.names[slot] for slot in after.slots] == names
    assert index_of(store).live == 60
    assert index_of(store).count < 60 * 31, "the rows were never compacted"
    await store.close()


def test_sizes_that_contradict_are_refused() -> None:
    for wrong in (
        {"split_at": 10, "merge_below": 6},
        {"metric": "manhattan"},
        {"dimensions": 0},
        {"dimensions": 65_536},
        {"flush_vectors": 0},
        {"exact_max": -1},
        {"name": "/"},
    ):
        with pytest.raises(ConfigError):
            dataclasses.replace(CONFIG, **wrong)  # type: ignore[arg-type]


async def test_a_store_that_does_not_answer_is_unavailable_after_the_timeout() -> None:
    options = {"aws_endpoint": "http://127.0.0.1:1", "aws_allow_http": "true", "aws_region": "here"}
    options |= {"aws_access_key_id": "key", "aws_secret_access_key": "secret"}
    config = VectorConfig(store="s3://bucket/lake", store_options=options, dimensions=3, open_timeout="100ms")
    with pytest.raises(Unavailable, match=r"s3://bucket/lake.* 0\.1 s"):
        await VectorStore.open(config)


async def test_a_damaged_record_that_is_merged_is_corrupt_and_does_not_stop_the_storage() -> None:
    storage = await SlateStorage.open("memory:///", "vectors", merge=merge_records)
    key, one = posting_key(CENTROID_LEVEL + 1), encode_posting(np.array([1], np.uint64), np.ones((1, 3)))
    await storage.apply([Put(key, one[:5])])
    await storage.apply([Merge(key, one)])
    await storage.flush()
    binding = slatedb()
    await storage._source.flush_with_options(binding.FlushOptions(flush_type=binding.FlushType.MEM_TABLE))
    stored = await storage.get(key)
    assert stored is not None
    assert stored.endswith(one[:5] + one)
    with pytest.raises(Corrupt):
        decode_posting(stored, 3)
    await storage.apply([Put(b"x", b"y")])
    await storage.flush()
    await storage.close()
