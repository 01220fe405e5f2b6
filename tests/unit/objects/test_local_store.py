"""The properties of the local store: plain files, a side directory, and the limits of a file system."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import InvalidInput, NotFound, PermissionDenied, Rejected, Unavailable
from penstock.objects import LocalStore, Version


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "root")


async def test_every_object_is_a_plain_file_at_its_key(store: LocalStore, tmp_path: Path) -> None:
    await store.put("a/b.bin", b"exactly these")
    await store.put_if_absent("c", [b"and ", b"these"])
    assert (tmp_path / "root/a/b.bin").read_bytes() == b"exactly these"
    assert (tmp_path / "root/c").read_bytes() == b"and these"
    visible = {path.name for path in (tmp_path / "root").iterdir()}
    assert visible == {"a", "c", ".penstock"}


async def test_files_created_by_other_tools_are_objects(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "root/x").mkdir(parents=True)
    (tmp_path / "root/x/y").write_bytes(b"foreign")
    (tmp_path / "root/x/not#a key").write_bytes(b"skipped")
    blob = await store.get("x/y")
    assert bytes(blob.data) == b"foreign"
    assert blob.version is not None
    assert [info.key for info in await store.list("")] == ["x/y"]
    await store.put_if_match("x/y", b"ours", blob.version)


async def test_the_same_bytes_have_the_same_version(store: LocalStore) -> None:
    assert await store.put("a", [b"on", b"e"]) == await store.put("b", b"one")
    assert await store.put("a", b"two") != await store.put("b", b"one")


@pytest.mark.parametrize("key", [".penstock", ".penstock/locks/00", ".penstock-x"])
async def test_the_side_directory_is_not_accessible(store: LocalStore, key: str) -> None:
    for call in (store.get(key), store.put(key, b""), store.put_if_absent(key, b""), store.head(key)):
        with pytest.raises(InvalidInput, match="is reserved for the store"):
            await call
    assert list(await store.delete_many([key])) == [key]
    assert await store.list(".penstock") == []


async def test_an_object_is_not_a_folder(store: LocalStore) -> None:
    await store.put("a/b", b"x")
    version = Version(etag="x")
    for key in ("a", "a/b/c", "a/b/c/d"):
        for call in (
            store.put(key, b"y"),
            store.put_if_absent(key, b"y"),
            store.put_if_match(key, b"y", version),
        ):
            with pytest.raises(InvalidInput, match="folder"):
                await call
        with pytest.raises(NotFound):
            await store.get(key)
        with pytest.raises(NotFound):
            await store.head(key)
        assert await store.delete_many([key]) == {}
    assert [info.key for info in await store.list("")] == ["a/b"]


async def test_a_read_creates_no_directory(store: LocalStore, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        await store.get("a/b")
    assert await store.list("") == []
    assert not (tmp_path / "root").exists()


async def test_a_folder_removed_under_a_running_store_is_created_again(
    store: LocalStore, tmp_path: Path
) -> None:
    await store.put("a/b", b"x")
    shutil.rmtree(tmp_path / "root")
    with contextlib.suppress(Unavailable):
        await store.put("a/b", b"y")
    await store.put("a/b", b"z")
    assert bytes((await store.get("a/b")).data) == b"z"


async def test_a_swept_staging_file_fails_that_write_cleanly(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = await store.put("k", b"old")
    real = os.rename

    def swept(source: str, target: str) -> None:
        os.unlink(source)
        real(source, target)

    monkeypatch.setattr(os, "rename", swept)
    with pytest.raises(Unavailable, match="try again"):
        await store.put_if_match("k", b"new", version)
    monkeypatch.undo()
    assert bytes((await store.get("k")).data) == b"old"
    await store.put_if_match("k", b"new", version)


@contextlib.contextmanager
def without_privileges(root: Path) -> Iterator[None]:
    """Make `root` unwritable. A superuser gives up its privileges inside the context."""
    root.chmod(0o555)
    superuser = os.geteuid() == 0
    if superuser:
        os.seteuid(65534)
    try:
        yield
    finally:
        if superuser:
            os.seteuid(0)
        root.chmod(0o755)


async def test_an_inaccessible_directory_is_permission_denied(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    version = await LocalStore(root).put("k", b"old")
    store = LocalStore(root)
    with without_privileges(root):
        for call in (store.put("new", b"x"), store.put_if_absent("new", b"x")):
            with pytest.raises(PermissionDenied, match="access"):
                await call
    assert await store.put_if_match("k", b"new", version)


async def test_a_closed_store_raises_an_error(store: LocalStore) -> None:
    await store.put("k", b"x")
    await store.close()
    await store.close()
    with pytest.raises(Rejected, match="closed"):
        await store.get("k")


async def test_cancelling_a_call_leaves_the_store_usable(store: LocalStore) -> None:
    task = asyncio.create_task(store.put("k", b"x" * 1_000_000))
    await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await store.put("other", b"y")
    assert bytes((await store.get("other")).data) == b"y"
