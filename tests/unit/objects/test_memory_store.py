"""The properties of the memory store: it is deterministic, shared by name, and has a clock."""

from __future__ import annotations

import threading

import pytest

from penstock.errors import Conflict, InvalidInput
from penstock.objects import MemoryStore, named_memory_store
from penstock.testing.clock import ManualClock


async def test_age_comes_from_the_clock() -> None:
    store = MemoryStore(clock=ManualClock(start_ms=1234))
    await store.put("k", b"x")
    assert (await store.head("k")).modified_ms == 1234
    assert [info.modified_ms for info in await store.list("")] == [1234]


async def test_the_same_bytes_stored_again_are_a_new_version() -> None:
    store = MemoryStore()
    first = await store.put("k", b"x")
    await store.put("k", b"x")
    with pytest.raises(Conflict):
        await store.put_if_match("k", b"y", first)


async def test_two_runs_create_the_same_versions() -> None:
    runs = [MemoryStore(), MemoryStore()]
    assert len({await store.put("k", b"x") for store in runs}) == 1


def test_no_call_yields_to_the_event_loop() -> None:
    store = MemoryStore()
    for call in (store.put("k", b"x"), store.get("k"), store.list(""), store.delete_many(["k"])):
        with pytest.raises(StopIteration):
            call.send(None)


def test_a_name_refers_to_the_same_store_in_every_thread() -> None:
    found: list[MemoryStore] = []
    threads = [threading.Thread(target=lambda: found.append(named_memory_store("n"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1


@pytest.mark.parametrize("data", [7, [7], ["text"], None])
async def test_data_that_is_not_a_buffer_is_rejected(data: object) -> None:
    with pytest.raises(InvalidInput, match="buffers"):
        await MemoryStore().put("k", data)
