"""The contract of `penstock.coordinator.Storage` as checks for any implementation.

    @pytest.mark.parametrize("check", STORAGE_CHECKS, ids=lambda check: check.__name__)
    async def test_my_storage_keeps_the_contract(check, world):
        await check(world)

A `StorageWorld` opens the same database repeatedly. Its merge operator joins operands. A failed check raises
`AssertionError`, which says what is wrong.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final, Protocol, TypeAlias

from penstock.clock import SYSTEM_CLOCK
from penstock.coordinator import KEY_BYTES_MAX, Delete, KeyValue, Merge, Operation, Put, Storage, pairs
from penstock.errors import Fenced, InvalidInput

__all__ = ["STORAGE_CHECKS", "StorageCheck", "StorageWorld", "join_operands"]


class StorageWorld(Protocol):
    """A database that can be opened again."""

    async def open(self) -> Storage:
        """Open the database as a new process does. This fences the previous writer."""
        ...


StorageCheck: TypeAlias = Callable[[StorageWorld], Awaitable[None]]


def join_operands(key: bytes, operands: Sequence[bytes]) -> bytes:
    """Join the operands. This merge operator is associative and shows their order."""
    return b"".join(operands)


async def _all(pages: AsyncIterator[list[KeyValue]]) -> list[tuple[bytes, bytes]]:
    return [(pair.key, pair.value) async for pair in pairs(pages)]


async def _expect(storage: Storage, **expected: bytes | None) -> None:
    for name, value in expected.items():
        found = await storage.get(name.encode())
        assert found == value, f"{name} holds {found!r}, not {value!r}"


async def check_a_batch_is_applied_in_order(world: StorageWorld) -> None:
    storage = await world.open()
    await storage.apply([Put(b"a", b"1"), Put(b"a", b"2"), Put(b"b", b"1"), Delete(b"b"), Delete(b"never")])
    await storage.apply([Delete(b"c"), Put(b"c", b"3")])
    await storage.apply([])
    await _expect(storage, a=b"2", b=None, c=b"3", never=None)
    await storage.close()


async def check_merges_go_from_the_oldest_to_the_newest(world: StorageWorld) -> None:
    storage = await world.open()
    await storage.apply([Put(b"a", b"1"), Merge(b"a", b"2"), Merge(b"b", b"x")])
    await storage.apply([Merge(b"a", b"3"), Merge(b"b", b"y"), Merge(b"b", b"z")])
    await _expect(storage, a=b"123", b=b"xyz")
    await storage.flush()
    again = await world.open()
    await again.apply([Merge(b"a", b"4"), Delete(b"b"), Merge(b"b", b"new")])
    await _expect(again, a=b"1234", b=b"new")
    assert await _all(again.scan(b"")) == [(b"a", b"1234"), (b"b", b"new")], "a scan shows merged values"
    await again.close()


async def check_a_scan_is_ordered_and_keeps_to_its_prefix(world: StorageWorld) -> None:
    storage = await world.open()
    keys = [b"a", b"b", b"b\x00", b"b\x01", b"b\xff", b"b\xff\xff", b"c", b"\xff", b"\xff\xff"]
    await storage.apply([Put(key, key) for key in reversed(keys)])
    assert await _all(storage.scan(b"")) == [(key, key) for key in keys]
    assert [key for key, _ in await _all(storage.scan(b"b"))] == keys[1:6]
    assert [key for key, _ in await _all(storage.scan(b"\xff"))] == keys[7:]
    assert await _all(storage.scan(b"bb")) == []
    assert [key for key, _ in await _all(storage.scan(b"b", start=b"\x00", stop=b"\xff"))] == keys[2:4]
    assert [key for key, _ in await _all(storage.scan(b"b", start=b"\xff"))] == keys[4:6]
    assert await _all(storage.scan(b"b", start=b"\x05", stop=b"\x05")) == []
    await storage.close()


async def check_a_long_scan_comes_in_pages(world: StorageWorld) -> None:
    storage = await world.open()
    keys = [f"k{number:05}".encode() for number in range(2500)]
    await storage.apply([Put(key, b"v") for key in keys])
    pages = [page async for page in storage.scan(b"k")]
    assert all(pages), "no page is empty"
    assert [pair.key for page in pages for pair in page] == keys
    await storage.close()


async def check_a_snapshot_stays_as_it_is(world: StorageWorld) -> None:
    storage = await world.open()
    await storage.apply([Put(b"a", b"old"), Put(b"gone", b"1")])
    snapshot = await storage.snapshot()
    await storage.apply([Put(b"a", b"new"), Delete(b"gone"), Put(b"more", b"1")])
    await storage.flush()
    assert await snapshot.get(b"a") == b"old"
    assert await _all(snapshot.scan(b"")) == [(b"a", b"old"), (b"gone", b"1")]
    assert await _all((await storage.snapshot()).scan(b"")) == [(b"a", b"new"), (b"more", b"1")]
    await storage.close()


async def check_flushed_batches_are_found_by_the_next_process(world: StorageWorld) -> None:
    storage = await world.open()
    await storage.apply([Put(b"a", b"1"), Put(b"b", b"1")])
    await storage.flush()
    await storage.flush()
    again = await world.open()
    await _expect(again, a=b"1", b=b"1")
    await again.close()


async def check_a_batch_survives_whole_or_not_at_all(world: StorageWorld) -> None:
    storage = await world.open()
    for number in range(5):
        value = str(number).encode()
        await storage.apply([Put(f"k{key}".encode(), value) for key in range(20)])
        if number == 2:
            await storage.flush()
    again = await world.open()
    found = {value for _, value in await _all(again.scan(b"k"))}
    assert len(found) == 1, f"parts of several batches: {found}"
    assert found.pop() >= b"2", "a flushed batch is lost"
    await again.close()


async def check_a_fenced_writer_gets_an_error(world: StorageWorld) -> None:
    storage = await world.open()
    await storage.apply([Put(b"a", b"1")])
    await storage.flush()
    newer = await world.open()
    try:
        await storage.apply([Put(b"a", b"2")])
        await storage.flush()
    except Fenced:
        pass
    else:
        raise AssertionError("a fenced writer flushed a batch without an error")
    await _expect(newer, a=b"1")
    await storage.close()
    await newer.close()


async def check_a_wrong_batch_changes_nothing(world: StorageWorld) -> None:
    storage = await world.open()
    for wrong in (b"", b"k" * (KEY_BYTES_MAX + 1)):
        operations: list[Operation] = [Put(b"a", b"1"), Put(wrong, b"no key")]
        try:
            await storage.apply(operations)
        except InvalidInput:
            pass
        else:
            raise AssertionError(f"a key of {len(wrong)} bytes was accepted")
        await _expect(storage, a=None)
    longest = b"k" * KEY_BYTES_MAX
    await storage.apply([Put(longest, b"1")])
    assert await storage.get(longest) == b"1"
    await storage.close()


async def check_odd_values_come_back_as_they_are(world: StorageWorld) -> None:
    storage = await world.open()
    later_ms = SYSTEM_CLOCK.now_ms() + 3_600_000
    values = [b"", b"\x00", bytes(range(256)) * 300, b"x" * 1_000_000]
    await storage.apply([Put(b"k%d" % number, value) for number, value in enumerate(values)])
    await storage.apply([Put(b"put", b"1", later_ms), Merge(b"merged", b"2", later_ms)])
    await storage.flush()
    again = await world.open()
    for number, value in enumerate(values):
        assert await again.get(b"k%d" % number) == value, f"value {number} has changed"
    await _expect(again, put=b"1", merged=b"2")
    await again.close()


async def check_closing_twice_is_not_an_error(world: StorageWorld) -> None:
    storage = await world.open()
    await storage.close()
    await storage.close()


STORAGE_CHECKS: Final[tuple[StorageCheck, ...]] = (
    check_a_batch_is_applied_in_order,
    check_merges_go_from_the_oldest_to_the_newest,
    check_a_scan_is_ordered_and_keeps_to_its_prefix,
    check_a_long_scan_comes_in_pages,
    check_a_snapshot_stays_as_it_is,
    check_flushed_batches_are_found_by_the_next_process,
    check_a_batch_survives_whole_or_not_at_all,
    check_a_fenced_writer_gets_an_error,
    check_a_wrong_batch_changes_nothing,
    check_odd_values_come_back_as_they_are,
    check_closing_twice_is_not_an_error,
)
