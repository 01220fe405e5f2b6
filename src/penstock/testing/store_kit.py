"""The contract of `ObjectStore` as checks for any implementation.

    @pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
    async def test_my_store_keeps_the_contract(check, my_store):
        await check(my_store, "a-folder-of-its-own")

Every check uses only the given folder. A failed check raises `AssertionError`, which says what is wrong.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeAlias, overload

from penstock.clock import SYSTEM_CLOCK
from penstock.errors import Conflict, InvalidInput, NotFound, OutcomeUnknown, PenstockError, Rejected
from penstock.objects import ByteRange, ObjectStore, Version
from penstock.retry import Backoff, RetryPolicy

__all__ = [
    "ODD_KEYS",
    "STORE_CHECKS",
    "StoreCheck",
    "add_one",
    "check_counter_loses_no_update",
    "expect",
]

StoreCheck: TypeAlias = Callable[[ObjectStore, str], Awaitable[None]]

ODD_KEYS: Final = (
    "a b/c d",
    "plus+and&equals=",
    "dots..inside/.hidden",
    "umlaut-äöü/日本語/emoji-🚰",
    "colon:semi;comma,at@dollar$bang!",
    "(round)'single'",
    "x" * 200,
)
"""Valid keys that a client or server may handle incorrectly."""

_BIG_BYTES: Final = 8 * 1024 * 1024
_WRITERS: Final = 16


async def expect(kind: type[PenstockError], call: Awaitable[object]) -> PenstockError:
    """Return the error of this kind that the call raises. Raise `AssertionError` if it returns."""
    try:
        result = await call
    except kind as error:
        return error
    raise AssertionError(f"expected {kind.__name__}, got {result!r}")


async def _bytes(store: ObjectStore, key: str, byte_range: ByteRange | None = None) -> bytes:
    return bytes((await store.get(key, byte_range)).data)


async def _version(store: ObjectStore, key: str) -> Version:
    version = (await store.get(key)).version
    assert version is not None, "a complete read returns the version"
    return version


async def an_object_reads_back_as_it_was_stored(store: ObjectStore, folder: str) -> None:
    key = f"{folder}/a/b.bin"
    written = await store.put(key, b"hello")
    blob = await store.get(key)
    assert bytes(blob.data) == b"hello"
    assert blob.version == written


async def put_replaces(store: ObjectStore, folder: str) -> None:
    key = f"{folder}/k"
    first = await store.put(key, b"one")
    second = await store.put(key, b"two")
    assert first != second
    assert await _bytes(store, key) == b"two"


async def several_buffers_are_stored_one_after_the_other(store: ObjectStore, folder: str) -> None:
    key = f"{folder}/parts"
    parts: list[bytes | bytearray | memoryview] = [b"ab", bytearray(b"cd"), memoryview(b"xefx")[1:3], b""]
    await store.put(key, parts)
    assert await _bytes(store, key) == b"abcdef"
    await store.put_if_match(key, parts + parts, await _version(store, key))
    assert await _bytes(store, key) == b"abcdefabcdef"
    await store.put_if_absent(f"{folder}/parts-2", [b"one", b"two"])
    assert await _bytes(store, f"{folder}/parts-2") == b"onetwo"


class _BuiltOnDemand(Sequence[memoryview]):
    """Buffers that are created on demand."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> memoryview: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[memoryview]: ...
    def __getitem__(self, index: int | slice) -> memoryview | Sequence[memoryview]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(self._count))]
        if index >= self._count:
            raise IndexError(index)
        return memoryview(bytes([index % 256]) * 1000)


async def buffers_may_be_built_on_demand(store: ObjectStore, folder: str) -> None:
    parts = _BuiltOnDemand(1500)
    expected = b"".join(parts)
    key = f"{folder}/lazy"
    written = await store.put(key, parts)
    blob = await store.get(key)
    assert bytes(blob.data) == expected
    assert blob.version == written
    await store.put_if_match(key, parts[:3], written)
    assert await _bytes(store, key) == expected[:3000]
    await store.put_if_absent(f"{folder}/lazy-2", parts)
    assert await _bytes(store, f"{folder}/lazy-2") == expected


async def a_stored_object_does_not_follow_its_source_buffer(store: ObjectStore, folder: str) -> None:
    source = bytearray(b"before")
    await store.put(f"{folder}/k", source)
    source[:] = b"after!"
    assert await _bytes(store, f"{folder}/k") == b"before"


async def an_empty_object_exists(store: ObjectStore, folder: str) -> None:
    key = f"{folder}/empty"
    await store.put_if_absent(key, b"")
    assert await _bytes(store, key) == b""
    assert await _bytes(store, key, ByteRange(start=None, length=22)) == b""
    assert await _bytes(store, key, ByteRange(start=0, length=10)) == b""
    assert (await store.head(key)).size == 0
    await expect(Conflict, store.put_if_absent(key, b"x"))
    await store.put_if_match(key, b"full", await _version(store, key))
    await store.put(key, [])
    assert await _bytes(store, key) == b""


async def a_big_object_reads_back_whole_and_in_parts(store: ObjectStore, folder: str) -> None:
    key = f"{folder}/big"
    data = random.Random(8).randbytes(_BIG_BYTES)
    await store.put_if_absent(key, data)
    assert await _bytes(store, key) == data
    assert await _bytes(store, key, ByteRange(start=_BIG_BYTES - 5, length=100)) == data[-5:]
    await store.put_if_match(key, [data, data], await _version(store, key))
    assert (await store.head(key)).size == 2 * _BIG_BYTES
    assert await _bytes(store, key, ByteRange(start=_BIG_BYTES - 2, length=4)) == data[-2:] + data[:2]


async def ranges_return_the_existing_bytes(store: ObjectStore, folder: str) -> None:
    key = f"{folder}/digits"
    await store.put(key, b"0123456789")
    cases: list[tuple[int | None, int, bytes]] = [
        (0, 10, b"0123456789"), (0, 1, b"0"), (3, 4, b"3456"), (8, 100, b"89"), (10, 5, b""), (50, 5, b""),
        (4, 0, b""), (None, 3, b"789"), (None, 10, b"0123456789"), (None, 99, b"0123456789"), (None, 0, b""),
    ]  # fmt: skip
    for start, length, expected in cases:
        blob = await store.get(key, ByteRange(start=start, length=length))
        assert bytes(blob.data) == expected, f"bytes {start}+{length}"
        assert blob.version is None, "a part has no version"


async def a_missing_object_is_not_found(store: ObjectStore, folder: str) -> None:
    key = f"{folder}/nowhere"
    await expect(NotFound, store.get(key))
    await expect(NotFound, store.get(key, ByteRange(start=0, length=1)))
    await expect(NotFound, store.get(key, ByteRange(start=None, length=1)))
    await expect(NotFound, store.get(key, ByteRange(start=0, length=0)))
    await expect(NotFound, store.head(key))
    await expect(NotFound, store.get_if_changed(key, Version(etag='"x"', generation="1")))


async def create_wins_once(store: ObjectStore, folder: str) -> None:
    key = f"{folder}/k"
    version = await store.put_if_absent(key, b"first")
    await expect(Conflict, store.put_if_absent(key, b"second"))
    assert await _bytes(store, key) == b"first"
    assert await _version(store, key) == version


async def create_works_again_after_delete(store: ObjectStore, folder: str) -> None:
    key = f"{folder}/k"
    await store.put_if_absent(key, b"first")
    assert await store.delete_many([key]) == {}
    await store.put_if_absent(key, b"second")
    assert await _bytes(store, key) == b"second"


async def replace_needs_the_current_version(store: ObjectStore, folder: str) -> None:
    key = f"{folder}/k"
    first = await store.put_if_absent(key, b"1")
    second = await store.put_if_match(key, b"2", first)
    await expect(Conflict, store.put_if_match(key, b"3", first))
    assert await _bytes(store, key) == b"2"
    third = await store.put_if_match(key, b"3", second)
    assert await _version(store, key) == third
    assert await _bytes(store, key) == b"3"


async def replacing_a_missing_object_conflicts(store: ObjectStore, folder: str) -> None:
    key = f"{folder}/k"
    version = await store.put(key, b"x")
    await store.delete_many([key])
    await expect(Conflict, store.put_if_match(key, b"y", version))
    await expect(NotFound, store.get(key))


async def an_unchanged_object_is_not_sent_again(store: ObjectStore, folder: str) -> None:
    key = f"{folder}/k"
    version = await store.put(key, b"one")
    assert await store.get_if_changed(key, version) is None
    newer = await store.put(key, b"two")
    blob = await store.get_if_changed(key, version)
    assert blob is not None
    assert bytes(blob.data) == b"two"
    assert blob.version == newer
    assert await store.get_if_changed(key, newer) is None


async def head_returns_size_age_and_version(store: ObjectStore, folder: str) -> None:
    key = f"{folder}/k"
    version = await store.put(key, b"12345")
    info = await store.head(key)
    assert (info.key, info.size, info.version) == (key, 5, version)
    assert abs(info.modified_ms - SYSTEM_CLOCK.now_ms()) < 60_000


async def a_version_from_head_can_be_replaced(store: ObjectStore, folder: str) -> None:
    key = f"{folder}/k"
    await store.put(key, b"12345")
    version = (await store.head(key)).version
    assert version is not None
    await store.put_if_match(key, b"6", version)
    assert await _bytes(store, key) == b"6"


async def list_is_in_key_order_and_goes_deep(store: ObjectStore, folder: str) -> None:
    names = ["b", "a/2", "a/1/x", "a-b", "a0", "z/z/z/z"]
    for name in names:
        await store.put(f"{folder}/{name}", name.encode())
    found = await store.list(folder)
    assert [info.key for info in found] == sorted(f"{folder}/{name}" for name in names)
    assert [info.size for info in found] == [len(info.key) - len(folder) - 1 for info in found]
    assert all(abs(info.modified_ms - SYSTEM_CLOCK.now_ms()) < 60_000 for info in found)


async def a_prefix_is_a_folder(store: ObjectStore, folder: str) -> None:
    for name in ("a/x", "ab/x", "a.b"):
        await store.put(f"{folder}/{name}", b"")
    assert [info.key for info in await store.list(f"{folder}/a")] == [f"{folder}/a/x"]
    assert [info.key for info in await store.list(f"/{folder}//a/")] == [f"{folder}/a/x"]
    assert await store.list(f"{folder}/nothing") == []
    assert await store.list(f"{folder}/a/x") == []
    assert {f"{folder}/a/x", f"{folder}/a.b"} <= {info.key for info in await store.list("")}


async def delete_many_counts_missing_keys_as_deleted(store: ObjectStore, folder: str) -> None:
    keys = [f"{folder}/k{index}" for index in range(5)]
    for key in keys:
        await store.put(key, b"x")
    assert await store.delete_many([*keys[:3], f"{folder}/never"]) == {}
    assert [info.key for info in await store.list(folder)] == keys[3:]
    assert await store.delete_many([]) == {}
    assert await store.delete_many(iter(keys)) == {}
    assert await store.list(folder) == []


async def odd_keys_are_kept_apart(store: ObjectStore, folder: str) -> None:
    for key in ODD_KEYS:
        await store.put_if_absent(f"{folder}/{key}", key.encode())
    for key in ODD_KEYS:
        assert await _bytes(store, f"{folder}/{key}") == key.encode()
    assert [info.key for info in await store.list(folder)] == sorted(f"{folder}/{key}" for key in ODD_KEYS)
    assert await store.delete_many(f"{folder}/{key}" for key in ODD_KEYS) == {}
    assert await store.list(folder) == []


async def keys_have_one_spelling(store: ObjectStore, folder: str) -> None:
    await store.put(f"/{folder}//a///b/", b"x")
    assert await _bytes(store, f"{folder}/a/b") == b"x"
    assert [info.key for info in await store.list(folder)] == [f"{folder}/a/b"]


async def bad_keys_are_rejected_by_every_call(store: ObjectStore, folder: str) -> None:
    version = Version(etag='"x"', generation="1")
    for key in ("", "/", "a/../b", "a?b", "a#b", "a%20b", "tab\t", "nul\0", "k" * 2000):
        for call in (
            store.get(key), store.head(key), store.put(key, b""), store.put_if_absent(key, b""),
            store.put_if_match(key, b"", version), store.get_if_changed(key, version),
        ):  # fmt: skip
            await expect(Rejected, call)
        assert list(await store.delete_many([key])) == [key]
    await expect(InvalidInput, store.list(f"{folder}/.."))


async def a_create_race_has_one_winner(store: ObjectStore, folder: str) -> None:
    async def attempt(key: str, writer: int) -> int | None:
        try:
            await store.put_if_absent(key, str(writer).encode())
        except Conflict:
            return None
        return writer

    for round_ in range(2):
        key = f"{folder}/race-{round_}"
        winners = [
            writer
            for writer in await asyncio.gather(*(attempt(key, n) for n in range(_WRITERS)))
            if writer is not None
        ]
        assert len(winners) == 1, f"{len(winners)} winners"
        assert await _bytes(store, key) == str(winners[0]).encode()


async def sixteen_writers_lose_no_update(store: ObjectStore, folder: str) -> None:
    await check_counter_loses_no_update(store, folder, rounds=3)


async def check_counter_loses_no_update(store: ObjectStore, folder: str, *, rounds: int) -> None:
    """Let sixteen writers add `rounds` each to one counter. Check that every addition counts exactly once."""
    key = f"{folder}/counter"
    await store.put_if_absent(key, b"0")

    async def writer(seed: int) -> None:
        for round_ in range(rounds):
            await add_one(store, key, random.Random(seed * 1000 + round_))

    await asyncio.gather(*(writer(seed) for seed in range(_WRITERS)))
    assert await _bytes(store, key) == str(_WRITERS * rounds).encode()


async def add_one(store: ObjectStore, key: str, rng: random.Random) -> None:
    """Repeat a read-modify-write until it succeeds. Raise `AssertionError` for an unknown outcome."""
    backoff = Backoff(
        RetryPolicy(floor_s=0.002, ceiling_s=0.25, deadline_s=90.0), clock=SYSTEM_CLOCK, rng=rng
    )
    while True:
        blob = await store.get(key)
        assert blob.version is not None
        try:
            await store.put_if_match(key, str(int(bytes(blob.data)) + 1).encode(), blob.version)
        except OutcomeUnknown as error:
            raise AssertionError(f"a healthy store does not leave outcomes open: {error}") from error
        except Conflict:
            assert await backoff.pause(), "a contended writer did not succeed in time"
        else:
            return


STORE_CHECKS: Final[tuple[StoreCheck, ...]] = (
    a_big_object_reads_back_whole_and_in_parts,
    a_create_race_has_one_winner,
    a_missing_object_is_not_found,
    a_prefix_is_a_folder,
    a_stored_object_does_not_follow_its_source_buffer,
    a_version_from_head_can_be_replaced,
    an_empty_object_exists,
    an_object_reads_back_as_it_was_stored,
    an_unchanged_object_is_not_sent_again,
    bad_keys_are_rejected_by_every_call,
    buffers_may_be_built_on_demand,
    create_wins_once,
    create_works_again_after_delete,
    delete_many_counts_missing_keys_as_deleted,
    head_returns_size_age_and_version,
    keys_have_one_spelling,
    list_is_in_key_order_and_goes_deep,
    odd_keys_are_kept_apart,
    put_replaces,
    ranges_return_the_existing_bytes,
    replace_needs_the_current_version,
    replacing_a_missing_object_conflicts,
    several_buffers_are_stored_one_after_the_other,
    sixteen_writers_lose_no_update,
)
