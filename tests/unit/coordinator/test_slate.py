"""SlateDB specifics: addresses, errors, speed of the binding, and a coordinator over it."""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.coordinator.doubles import COUNTER, WordDelta, WordFlusher, words_in

from penstock.coordinator import (
    CoordinatorConfig,
    Delete,
    Durability,
    FlushFenced,
    Merge,
    Operation,
    Put,
    WriteCoordinator,
    pairs,
    slate_batch,
)
from penstock.coordinator.slate import SlateStorage, SlateStore
from penstock.coordinator.slate_batch import SlateBatch, is_quick, slatedb
from penstock.errors import ConfigError, InvalidInput, OutcomeUnknown, Unavailable, Unsupported
from penstock.metrics import Registry
from penstock.testing.storage_kit import join_operands

NOWHERE = {
    "aws_endpoint": "http://127.0.0.1:1",
    "aws_allow_http": "true",
    "aws_region": "here",
    "aws_access_key_id": "key",
    "aws_secret_access_key": "secret",
}


async def coordinator_over(storage: SlateStorage) -> WriteCoordinator[str, WordDelta, object]:
    coordinator: WriteCoordinator[str, WordDelta, object] = WriteCoordinator(
        WordDelta,
        WordFlusher(storage),
        image=int(await storage.get(COUNTER) or 0),
        snapshot=await storage.snapshot(),
        config=CoordinatorConfig(sync_mode="every_flush"),  # type: ignore[arg-type]
        registry=Registry(),
    )
    coordinator.start()
    return coordinator


def files(directory: Path) -> list[Path]:
    return list(directory.rglob("*.sst"))


async def test_a_database_of_words_survives_in_a_directory(tmp_path: Path) -> None:
    for start in (0, 10):
        storage = await SlateStorage.open(tmp_path.as_uri(), "words")
        coordinator = await coordinator_over(storage)
        for number in range(10):
            await coordinator.write(f"{start + number}")
        await coordinator.close()
        assert await words_in(storage) == [str(number) for number in range(start + 10)]
        await storage.close()
    assert files(tmp_path)


@pytest.mark.parametrize("persist_at_once", [False, True])
async def test_a_fenced_coordinator_acknowledges_nothing(persist_at_once: bool) -> None:
    store = SlateStore("memory:///")
    old = await SlateStorage.open(store, "words", persist_at_once=persist_at_once)
    coordinator = await coordinator_over(old)
    newer = await SlateStorage.open(store, "words")
    handle = await coordinator.write("lost")
    await coordinator.flush()
    with pytest.raises(FlushFenced):
        await handle.wait(Durability.DURABLE)
    with pytest.raises(FlushFenced):
        await coordinator.close()
    assert await words_in(newer) == []
    await old.close()
    await newer.close()


async def test_a_sync_that_began_with_an_earlier_write_does_not_vouch_for_a_later_one() -> None:
    store = SlateStore("memory:///")
    storage = await SlateStorage.open(store, "rows", settings={"flush_interval": None}, persist_at_once=True)
    await storage.apply([Put(b"a", b"1")])
    await storage.apply([Put(b"b", b"2")])
    await storage.flush()
    newer = await SlateStorage.open(store, "rows")  # writes that were not durable are lost
    assert [await newer.get(key) for key in (b"a", b"b")] == [b"1", b"2"]
    await storage.close()
    await newer.close()


@pytest.mark.parametrize(
    ("url", "path"),
    [("memory:///", "db"), ("file:///var/lib/x/", "var/lib/x/db"), ("memory:///deep/er", "deep/er/db")],
)
def test_the_directory_of_a_url_goes_into_the_path_of_the_database(url: str, path: str) -> None:
    assert SlateStore(url).path("/db/") == path


@pytest.mark.parametrize("url", ["", "nowhere", "s3://", "ftp://host/x"])
def test_a_wrong_url_is_a_config_error(url: str) -> None:
    with pytest.raises(ConfigError):
        SlateStore(url)


async def test_a_wrong_setting_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="SlateDB"):
        await SlateStorage.open("memory:///", "db", settings={"flush_interval": 7})


async def test_a_closed_database_and_a_long_key_are_errors() -> None:
    storage = await SlateStorage.open("memory:///", "db")
    with pytest.raises(InvalidInput, match="1 to 65535 bytes"):
        await storage.apply([Put(b"k" * 65_536, b"")])
    await storage.close()
    with pytest.raises(Unavailable, match="closed"):
        await storage.get(b"a")


class _Late:
    """A fake of SlateDB's builder, whose database opens on command, and of that database."""

    def __init__(self) -> None:
        self.go, self.closed = asyncio.Event(), asyncio.Event()
        self.error: Exception | None = None

    def __call__(self, path: str, store: object) -> _Late:
        return self

    def with_settings(self, settings: object) -> None: ...

    async def build(self) -> _Late:
        await self.go.wait()
        if self.error is not None:
            raise self.error
        return self

    async def shutdown(self) -> None:
        self.closed.set()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> _Late:
    made = _Late()
    monkeypatch.setattr(slatedb(), "DbBuilder", made)
    return made


@pytest.mark.filterwarnings("default::ResourceWarning")
async def test_an_unresponsive_store_is_unavailable_in_time_and_named() -> None:
    store = SlateStore("s3://bucket/lake", {**NOWHERE, "aws_secret_access_key": "hidden-secret"})
    with pytest.raises(Unavailable) as told:
        await SlateStorage.open(store, "words", open_timeout_s=0.2)
    assert "s3://bucket/lake" in str(told.value)
    assert "'words'" in str(told.value)
    assert "within 0.2 s" in str(told.value)
    assert "endpoint" in str(told.value)
    assert "hidden" not in str(told.value)


def test_the_name_of_a_store_has_no_secrets() -> None:
    assert SlateStore("memory:///a/b").url == "memory:///a/b"
    assert SlateStore("s3://key:secret@bucket/lake?token=x", NOWHERE).url == "s3://bucket/lake"


async def test_a_database_that_opens_after_all_is_closed(late: _Late) -> None:
    with pytest.raises(Unavailable, match="within"):
        await SlateStorage.open("memory:///", "words", open_timeout_s=0.01)
    assert not late.closed.is_set()
    late.go.set()
    await asyncio.wait_for(late.closed.wait(), 10)


async def test_a_database_whose_opening_was_cancelled_is_closed_when_it_opens(late: _Late) -> None:
    opening = asyncio.ensure_future(SlateStorage.open("memory:///", "words"))
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    late.go.set()
    await asyncio.wait_for(late.closed.wait(), 10)


async def test_an_abandoned_open_that_fails_raises_no_error(late: _Late) -> None:
    with pytest.raises(Unavailable, match="within"):
        await SlateStorage.open("memory:///", "words", open_timeout_s=0.01)
    late.error = slatedb().Error.Unavailable(message="away")
    late.go.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not late.closed.is_set()


async def broken() -> SlateStorage:
    """Return a database that SlateDB closed because one of its tasks failed."""

    def fail(key: bytes, operands: object) -> bytes:
        raise ValueError("a merge operator that breaks its promise")

    storage = await SlateStorage.open("memory:///", "db", merge=fail)
    await storage.apply([Put(b"a", b"1")])
    await storage.apply([Merge(b"a", b"2")])
    await storage.flush()
    binding = slatedb()
    # The running call may get another error. Later calls report that the database is closed.
    with pytest.raises(binding.Error):
        await storage._source.flush_with_options(binding.FlushOptions(flush_type=binding.FlushType.MEM_TABLE))
    for _ in range(1000):
        try:
            await storage._source.get(b"nothing")
        except binding.Error.Closed:
            return storage
        except binding.Error:
            pass
        await asyncio.sleep(0.01)
    raise AssertionError("SlateDB continues")


async def test_a_database_that_stopped_permanently_is_not_reported_as_one_to_retry() -> None:
    storage = await broken()
    for call in (storage.get(b"a"), storage.snapshot(), anext(storage.scan(b"")), storage.flush()):
        with pytest.raises(OutcomeUnknown, match=r"stopped permanently.*open it again"):
            await call
    with pytest.raises(OutcomeUnknown):
        await storage.apply([Put(b"b", b"")])
    await storage.close()


def test_a_megabyte_is_handed_over_without_a_loop_in_python() -> None:
    batch = slatedb().WriteBatch()
    value = b"x" * 1_000_000
    began = time.process_time()
    for number in range(4):
        batch.put(b"key%d" % number, value)
    # Byte by byte, this takes a second and more.
    assert time.process_time() - began < 0.4


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slate_batch, "_GENERATED", "slatedb_is_not_here")
    slatedb.cache_clear()
    try:
        with pytest.raises(Unsupported, match=r"pip install 'penstock\[databases\]'"):
            slatedb()
    finally:
        slatedb.cache_clear()


OPERATIONS: list[Operation] = [
    Put(b"gone", b"1"),
    Delete(b"gone"),
    Put(b"put", b"\x00" * 70_000),
    Put(b"until", b"", expire_at_ms=4_102_444_800_000),
    Merge(b"merged", b"a", expire_at_ms=4_102_444_800_000),
    Merge(b"merged", b"b", expire_at_ms=4_102_444_800_000),
]


async def stored(operations: list[Operation]) -> list[tuple[bytes, bytes, int | None]]:
    """Return the content of a database after these operations, with the expiry of each entry."""
    storage = await SlateStorage.open("memory:///", "db", merge=join_operands)
    await storage.apply(operations)
    every = slatedb().KeyRange(start=None, start_inclusive=True, end=None, end_inclusive=False)
    rows = await (await storage._source.scan_prefix(b"", every)).next_batch(100)
    read = {key: value async for key, value in pairs(storage.scan(b""))}
    await storage.close()
    return [(row.key, read[row.key], row.expire_ts) for row in rows]


@pytest.fixture
def asked_again() -> Iterator[None]:
    """Clear the caches of the binding before and after."""
    is_quick.cache_clear()
    yield
    is_quick.cache_clear()


def test_the_binding_that_is_installed_is_filled_quickly() -> None:
    assert is_quick()


@pytest.mark.usefixtures("asked_again")
@pytest.mark.parametrize("change", ["a name", "a signature", "a structure"])
async def test_a_binding_of_another_shape_is_filled_through_its_methods(
    change: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    quickly = await stored(OPERATIONS)
    is_quick.cache_clear()
    if change == "a name":
        monkeypatch.delattr(slatedb(), "_UniffiForeignBytes")
    elif change == "a signature":
        delete = getattr(slatedb()._UniffiLib, slate_batch._METHOD + "delete")
        monkeypatch.setattr(delete, "argtypes", (ctypes.c_uint64, *delete.argtypes))
    else:
        # The binding's class cannot be changed, so change the one in this package.
        monkeypatch.setattr(slate_batch, "_Foreign", slatedb()._UniffiRustBuffer)
    assert not is_quick()
    assert "has changed" in caplog.text
    if change == "a signature":
        monkeypatch.undo()
        monkeypatch.setattr(slate_batch, "is_quick", lambda: False)
    assert await stored(OPERATIONS) == quickly
    assert [key for key, _, _ in quickly] == [b"merged", b"put", b"until"]
    with pytest.raises(InvalidInput):
        SlateBatch().add(Put(b"", b""))
