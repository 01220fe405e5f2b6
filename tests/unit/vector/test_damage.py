"""Damage is limited to its record: derivable parts are rebuilt, and all others are reported."""

from __future__ import annotations

import dataclasses
import logging
import random
from pathlib import Path
from typing import Any

import pytest
from tests.unit.vector.doubles import CONFIG, World, index_of, vector

from penstock.coordinator import Delete, Operation, Put, pairs
from penstock.coordinator.slate import SlateStorage
from penstock.errors import Corrupt, PenstockError
from penstock.metrics import Registry
from penstock.testing.memory_storage import StorageFault
from penstock.vector import Eq, Vector, VectorStore, merge_records
from penstock.vector.codec import (
    decode_block,
    decode_id,
    decode_posting,
    decode_vector,
    encode_block,
    encode_id,
    encode_ids,
    encode_metadata,
)
from penstock.vector.keys import (
    CENTROID_LEVEL,
    RecordType,
    centroid_key,
    data_key,
    dictionary_key,
    posting_key,
    read_id_key,
    record_prefix,
)

JUNK = b"\xff" * 9


async def filled() -> tuple[World, dict[str, Vector]]:
    """Return a collection with several lists, with some vectors deleted and some replaced."""
    world = World()
    store = await world.open()
    held = {
        f"v{n}": vector(f"v{n}", n, n % 3, 0, lang="en" if n % 2 else "de", year=n % 4) for n in range(40)
    }
    await store.upsert(held.values())
    await store.flush()
    for n in range(0, 40, 6):
        del held[f"v{n}"]
    await store.delete([f"v{n}" for n in range(0, 40, 6)])
    for n in range(1, 40, 9):
        held[f"v{n}"] = vector(f"v{n}", n + 0.5, 7, 7, lang="fr", year=9)
    await store.upsert([held[f"v{n}"] for n in range(1, 40, 9)])
    await store.close()
    return world, held


def keys(world: World, kind: RecordType) -> list[bytes]:
    return sorted(key for key in world.disk.persisted if key.startswith(record_prefix(kind)))


async def change(world: World, *operations: Operation) -> None:
    world.is_sound = False
    storage = world.disk.open()
    await storage.apply(list(operations))
    await storage.flush()
    await storage.close()


def id_of(world: World, name: str) -> int:
    return decode_id(world.disk.persisted[dictionary_key(name)].value)


def list_of(world: World, name: str) -> int:
    """Return the centroid whose list contains the vector."""
    for key in keys(world, RecordType.POSTING):
        if id_of(world, name) in decode_posting(world.disk.persisted[key].value, 3).ids.tolist():
            return read_id_key(key)
    raise AssertionError(f"{name} is in no list")


async def is_whole(store: VectorStore, held: dict[str, Vector]) -> None:
    """Check that exactly the expected vectors are found, by both kinds of search, by filters and by id."""
    assert len(store) == len(held)
    for nprobe in (None, 1000):
        hits = await store.search([0, 0, 0], k=100, nprobe=nprobe)
        assert {hit.id: hit.attributes for hit in hits} == {
            name: one.attributes for name, one in held.items()
        }
    for field, value in (("lang", "en"), ("lang", "de"), ("lang", "fr"), ("year", 2), ("year", 9)):
        hits = await store.search([0, 0, 0], k=100, filter=Eq(field, value), include_fields=[])
        wanted = {name for name, one in held.items() if one.attributes[field] == value}
        assert {hit.id for hit in hits} == wanted
    for n in range(40):
        found = await store.get(f"v{n}")
        assert (found is not None) == (f"v{n}" in held)
        if found is not None:
            assert found.vector.tolist() == held[f"v{n}"].vector.tolist()
    index = index_of(store)
    assert int(index.alive[: index.count].sum()) == index.live
    assert sorted(index.names[slot] for one in index.lists for slot in one if index.alive[slot]) == sorted(
        held
    )


async def is_healed(world: World, held: dict[str, Vector], caplog: pytest.LogCaptureFixture) -> None:
    """Check that the collection opens, is complete, can be changed, and is undamaged at the next open."""
    used = {read_id_key(key) for key in keys(world, RecordType.DATA)}
    caplog.clear()
    store = await world.open()
    assert "damaged" in caplog.text
    await is_whole(store, held)
    held["v2"] = vector("v2", 9, 9, 9, lang="fr", year=9)
    del held["v3"]
    await store.upsert([held["v2"]])
    await store.delete(["v3"])
    await store.flush()
    await is_whole(store, held)
    assert id_of(world, "v2") > max(used), "an id is used twice"
    await store.close()
    caplog.clear()
    store = await world.open()
    assert caplog.text == ""
    await is_whole(store, held)
    await store.close()


REBUILT = [
    RecordType.POSTING,
    RecordType.CENTROID,
    RecordType.DICTIONARY,
    RecordType.BLOCK,
    RecordType.CENTROID_BLOCK,
    RecordType.DELETIONS,
    RecordType.METADATA,
]


@pytest.mark.parametrize(
    ("kind", "how"),
    # A missing value of the metadata index looks like one that no vector has.
    [
        (kind, how)
        for kind in REBUILT
        for how in ("junk", "missing")
        if (kind, how) != (RecordType.METADATA, "missing")
    ],
    ids=lambda one: one.name.lower() if isinstance(one, RecordType) else one,
)
async def test_any_one_record_but_a_vectors_is_rebuilt(
    kind: RecordType, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    world, _ = await filled()
    for number in range(len(keys(world, kind))):
        world, held = await filled()
        key = keys(world, kind)[number]
        await change(world, Put(key, JUNK) if how == "junk" else Delete(key))
        await is_healed(world, held, caplog)


@pytest.mark.parametrize("kind", REBUILT, ids=lambda kind: kind.name.lower())
async def test_all_records_of_a_kind_are_rebuilt(kind: RecordType, caplog: pytest.LogCaptureFixture) -> None:
    world, held = await filled()
    await change(world, *(Put(key, JUNK) for key in keys(world, kind)))
    await is_healed(world, held, caplog)


async def test_everything_but_the_vectors_is_rebuilt_together(caplog: pytest.LogCaptureFixture) -> None:
    world, held = await filled()
    await change(world, *(Put(key, JUNK) for kind in REBUILT for key in keys(world, kind)))
    await is_healed(world, held, caplog)


@pytest.mark.parametrize("fault", list(StorageFault))
async def test_an_open_that_fails_while_it_heals_leaves_a_collection_that_the_next_one_heals(
    fault: StorageFault,
) -> None:
    at = 0
    while True:
        at += 1
        world, held = await filled()
        await change(world, *(Put(key, JUNK) for kind in REBUILT for key in keys(world, kind)))
        storage = world.disk.open()
        storage.fail_at(at, fault)
        try:
            await (await world.open(storage)).abort()
        except PenstockError:
            pass
        calls = len(storage.calls)
        store = await world.open()
        await is_whole(store, held)
        await store.close()
        if calls < at:
            return


@pytest.mark.parametrize("seed", range(40))
async def test_whatever_is_damaged_nothing_is_wrong_comes_back_or_is_missing_unsaid(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(seed)
    world, held = await filled()
    kinds = [*REBUILT, RecordType.DATA]
    everything = [key for kind in kinds for key in keys(world, kind)]
    damaged = rng.sample(everything, rng.choice((2, 5, 20)))
    await change(world, *(Put(key, JUNK[: rng.randrange(10)]) for key in damaged))
    for _ in range(2):
        store = await world.open()
        hits = await store.search([0, 0, 0], k=100)
        for hit in hits:
            assert hit.attributes == held[hit.id].attributes
            assert hit.vector is not None
            assert hit.vector.tolist() == held[hit.id].vector.tolist()
        assert len({hit.id for hit in hits}) == len(hits)
        missing = held.keys() - {hit.id for hit in hits}
        for name in missing:
            assert name in hits.damaged or name in caplog.text
            with pytest.raises(Corrupt, match=name):
                await store.get(name)
        await store.close()
    store = await world.open()
    await store.upsert([held[name] for name in missing])
    await store.flush()
    await is_whole(store, held)
    await store.close()
    store = await world.open()
    await is_whole(store, held)
    await store.close()


@pytest.mark.parametrize("stands_for", ["v4", None], ids=["another", "nobody"])
async def test_an_entry_with_a_wrong_id_is_rebuilt(
    stands_for: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    world, held = await filled()
    wrong = 4000 if stands_for is None else id_of(world, stands_for)
    await change(world, Put(dictionary_key("v5"), encode_id(wrong)))
    await is_healed(world, held, caplog)


async def test_an_id_that_stands_in_two_lists_is_found_once(caplog: pytest.LogCaptureFixture) -> None:
    world, held = await filled()
    copied = world.disk.persisted[keys(world, RecordType.POSTING)[0]].value
    await change(
        world,
        Put(posting_key(CENTROID_LEVEL + 99), copied),
        Put(centroid_key(CENTROID_LEVEL + 99), bytes(12)),
    )
    await is_healed(world, held, caplog)


@pytest.mark.parametrize(
    "block",
    [encode_block(0, 1), encode_block(CENTROID_LEVEL, 4096), encode_block(2**63, 2**63)],
    ids=["behind", "centroids", "huge"],
)
async def test_a_block_that_cannot_be_right_is_not_followed(
    block: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    world, held = await filled()
    await change(world, Put(record_prefix(RecordType.BLOCK), block))
    await is_healed(world, held, caplog)


async def test_ids_continue_in_the_block_after_the_largest_that_any_record_names() -> None:
    world, _ = await filled()
    excluded = next(key for key in keys(world, RecordType.METADATA))
    await change(
        world,
        Put(record_prefix(RecordType.BLOCK), JUNK),
        Put(excluded, encode_metadata([], [9000])),
    )
    store = await world.open()
    await store.upsert([vector("new", 1, 1, 1)])
    await store.close()
    assert id_of(world, "new") == 12_288
    assert sum(decode_block(world.disk.persisted[record_prefix(RecordType.BLOCK)].value)) == 16_384


async def test_rebuilt_records_are_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    world, _ = await filled()
    key = posting_key(list_of(world, "v5"))
    await change(world, Put(key, JUNK))
    registry = Registry()
    store = await VectorStore.open(world.config, storage=world.disk.open(), registry=registry)
    assert f"1 records are damaged: posting {key.hex()}" in caplog.text
    assert "v5" in caplog.text
    assert registry.value("vector.damaged_records", kind="posting") == 1
    assert registry.value("vector.vectors_rebuilt") >= 1
    assert registry.value("vector.vectors_lost") == 0
    await store.close()


@pytest.mark.parametrize("ends", ["upsert", "delete"])
async def test_a_vector_that_is_damaged_everywhere_is_named_and_the_rest_works(
    ends: str, caplog: pytest.LogCaptureFixture
) -> None:
    world, held = await filled()
    listed, recorded = posting_key(list_of(world, "v5")), data_key(id_of(world, "v5"))
    await change(world, Put(listed, JUNK), Put(recorded, JUNK))
    lost = held.pop("v5")
    for _ in range(2):
        caplog.clear()
        registry = Registry()
        store = await VectorStore.open(world.config, storage=world.disk.open(), registry=registry)
        assert "1 vectors are lost until they are written again: v5" in caplog.text
        assert registry.value("vector.vectors_lost") == 1
        assert world.disk.persisted[listed].value == JUNK, "the evidence is gone"
        assert {hit.id for hit in await store.search([0, 0, 0], k=100)} == held.keys()
        with pytest.raises(Corrupt, match="'v5' is damaged, write it again"):
            await store.get("v5")
        await store.close()
    store = await world.open()
    if ends == "upsert":
        await store.upsert([lost])
        held["v5"] = lost
    else:
        await store.delete(["v5"])
    await store.flush()
    await is_whole(store, held)
    await store.close()
    assert recorded not in world.disk.persisted
    await is_healed(world, held, caplog)


async def test_a_vector_without_a_readable_name_and_record_stays_away() -> None:
    world, held = await filled()
    await change(world, Put(dictionary_key("v5"), JUNK), Put(data_key(id_of(world, "v5")), JUNK))
    store = await world.open()
    assert {hit.id for hit in await store.search([0, 0, 0], k=100)} == held.keys() - {"v5"}
    with pytest.raises(Corrupt, match="'v5'"):
        await store.get("v5")
    await store.upsert([held["v5"]])
    await store.flush()
    await is_whole(store, held)
    await store.close()
    store = await world.open()
    await is_whole(store, held)
    await store.close()


async def test_a_record_that_two_vectors_claim_or_that_is_deleted_is_not_guessed() -> None:
    world, _ = await filled()
    copied = world.disk.persisted[data_key(id_of(world, "v5"))].value
    await change(world, Put(data_key(4000), copied), Put(dictionary_key("v7"), JUNK))
    with pytest.raises(Corrupt, match="'v5' refers to two vectors"):
        await world.open()
    world, _ = await filled()
    await change(world, Put(record_prefix(RecordType.DELETIONS), encode_ids([id_of(world, "v5")])))
    with pytest.raises(Corrupt, match=r"is among the deletions .* and has a record"):
        await world.open()


@pytest.mark.parametrize("kind", [RecordType.POSITION, RecordType.COLLECTION], ids=["position", "collection"])
async def test_what_stands_nowhere_else_refuses_the_open_and_is_named(kind: RecordType) -> None:
    world, _ = await filled()
    await change(world, Put(record_prefix(kind), b"\xff\xff"))
    with pytest.raises(
        Corrupt, match=record_prefix(kind).hex() if kind is RecordType.POSITION else "collection"
    ):
        await world.open()


@pytest.mark.parametrize("how", ["junk", "missing", "another"])
async def test_a_damaged_hit_is_left_out_and_named_and_the_next_best_is_there(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    world, held = await filled()
    key = data_key(id_of(world, "v5"))
    other = world.disk.persisted[data_key(id_of(world, "v7"))].value
    await change(world, {"junk": Put(key, JUNK), "missing": Delete(key), "another": Put(key, other)}[how])
    registry = Registry()
    store = await VectorStore.open(world.config, storage=world.disk.open(), registry=registry)
    query = held["v5"].vector
    best = [hit.id for hit in await store.search(query, k=4, include_fields=[])]
    assert best[0] == "v5"
    caplog.clear()
    for _ in range(2):
        hits = await store.search(query, k=3)
        assert [hit.id for hit in hits] == best[1:]
        assert hits.damaged == ("v5",)
    assert caplog.text.count("'v5'") == 1
    assert registry.value("vector.damaged_hits") == 2
    assert (await store.search([35, 0, 0], k=1)).damaged == ()
    with pytest.raises(Corrupt, match=f"'v5'.*{key.hex()}"):
        await store.get("v5")
    await store.upsert([held["v5"]])
    await store.flush()
    assert (await store.search(query, k=1)).damaged == ()
    await is_whole(store, held)
    await store.close()


async def test_where_every_record_is_damaged_a_search_ends_and_names_them_all() -> None:
    world, held = await filled()
    await change(world, *(Put(key, JUNK) for key in keys(world, RecordType.DATA)))
    store = await world.open()
    hits = await store.search([0, 0, 0], k=3)
    assert hits == []
    assert set(hits.damaged) == held.keys()
    await store.close()


async def test_a_sound_collection_is_opened_without_reading_the_vectors_records(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, held = await filled()
    before = dict(world.disk.persisted)
    storage = world.disk.open()
    scanned: list[bytes] = []
    scan = storage.scan

    def watched(prefix: bytes, **range_of: Any) -> Any:
        scanned.append(prefix)
        return scan(prefix, **range_of)

    monkeypatch.setattr(storage, "scan", watched)
    with caplog.at_level(logging.WARNING):
        store = await world.open(storage)
    assert record_prefix(RecordType.POSTING) in scanned
    assert record_prefix(RecordType.DATA) not in scanned
    assert caplog.text == ""
    assert world.disk.persisted == before
    assert all(decode_vector(before[key].value, 3).id in held for key in keys(world, RecordType.DATA))
    await store.close()


async def test_a_collection_over_slatedb_is_healed_and_stays_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = dataclasses.replace(CONFIG, store=tmp_path.as_uri())
    held = {f"v{n}": vector(f"v{n}", n, 0, 0, lang="en", year=n) for n in range(30)}
    async with await VectorStore.open(config) as store:
        await store.upsert(held.values())
        await store.flush()
        await store.delete(["v7"])
    del held["v7"]
    storage = await SlateStorage.open(config.store, config.name, merge=merge_records)
    prefixes = [record_prefix(kind) for kind in REBUILT]
    stored = [pair.key for prefix in prefixes for pair in [one async for one in pairs(storage.scan(prefix))]]
    await storage.apply([Put(key, JUNK) for key in stored])
    await storage.flush()
    await storage.close()
    for told in (True, False):
        caplog.clear()
        async with await VectorStore.open(config) as store:
            assert ("damaged" in caplog.text) is told
            assert {hit.id for hit in await store.search([0, 0, 0], k=100)} == held.keys()
            assert [hit.id for hit in await store.search([0, 0, 0], filter=Eq("year", 9))] == ["v9"]
            assert await store.get("v7") is None
