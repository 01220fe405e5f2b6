"""Every store keeps the one contract."""

from __future__ import annotations

import pytest

from penstock.errors import Conflict
from penstock.objects import MemoryStore, ObjectStore, check_conditional_writes
from penstock.testing.store_kit import STORE_CHECKS, StoreCheck, check_counter_loses_no_update

pytestmark = pytest.mark.conformance


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
async def test_store_keeps_the_contract(check: StoreCheck, store: ObjectStore, folder: str) -> None:
    await check(store, folder)


async def test_store_is_seen_to_honour_conditions(store: ObjectStore, folder: str) -> None:
    await check_conditional_writes(store, folder)
    assert await store.list(folder) == []


async def test_every_store_satisfies_the_protocol(store: ObjectStore) -> None:
    assert isinstance(store, ObjectStore)
    assert "secret" not in store.url


@pytest.mark.parametrize("store", ["memory", "local"], indirect=True)
async def test_sixteen_writers_with_many_rounds_lose_no_update(store: ObjectStore, folder: str) -> None:
    await check_counter_loses_no_update(store, folder, rounds=5 if not isinstance(store, MemoryStore) else 50)


async def test_a_conflict_of_a_write_that_was_sent_once_is_definite(store: ObjectStore, folder: str) -> None:
    key = f"{folder}/definite"
    first = await store.put_if_absent(key, b"1")
    await store.put_if_match(key, b"2", first)
    with pytest.raises(Conflict) as lost:
        await store.put_if_match(key, b"3", first)
    assert lost.value.definite
    with pytest.raises(Conflict) as taken:
        await store.put_if_absent(key, b"4")
    assert taken.value.definite
