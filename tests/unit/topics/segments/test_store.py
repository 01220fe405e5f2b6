"""One contract for all stores of segments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.blocking import loop_thread
from penstock.errors import ConfigError, Conflict, NotFound
from penstock.objects import LocalStore, MemoryStore
from penstock.storage.fs import OsFileSystem
from penstock.testing.disk import FakeDisk
from penstock.topics.errors import Damaged
from penstock.topics.segments.format import Part
from penstock.topics.segments.store import (
    LocalSegmentRoot,
    LocalSegmentStore,
    ObjectSegmentRoot,
    SegmentRoot,
    open_cold_store,
    parse_file_name,
    topic_folder,
)

ROOTS: dict[str, Callable[[Path], SegmentRoot]] = {
    "disk": lambda path: LocalSegmentRoot(OsFileSystem(), str(path)),
    "fake disk": lambda _path: LocalSegmentRoot(FakeDisk(), "/data"),
    "memory store": lambda _path: ObjectSegmentRoot(MemoryStore()),
    "directory store": lambda path: ObjectSegmentRoot(LocalStore(path)),
}


@pytest.fixture(params=ROOTS)
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SegmentRoot]:
    root = ROOTS[request.param](tmp_path)
    yield root
    root.close()


def test_a_segment_reads_back_as_it_was_put(root: SegmentRoot) -> None:
    store = root.topic(10)
    store.put(1, [b"da", memoryview(b"ta")], b"index")
    assert store.view(1, Part.DATA).tobytes() == b"data"
    assert store.view(1, Part.IDX).tobytes() == b"index"
    assert store.read_range(1, Part.DATA, 1, 2).tobytes() == b"at"
    assert store.read_range(1, Part.DATA, 1, 0).tobytes() == b""
    assert (store.size(1, Part.DATA), store.size(1, Part.IDX)) == (4, 5)


def test_a_segment_without_data_is_a_segment(root: SegmentRoot) -> None:
    store = root.topic(10)
    store.put(1, [], b"i")
    assert store.view(1, Part.DATA).tobytes() == b""
    assert store.exists(1, Part.DATA)


def test_a_range_beyond_the_file_is_damage(root: SegmentRoot) -> None:
    store = root.topic(10)
    store.put(1, [b"data"], b"index")
    with pytest.raises(Damaged, match="ends 1 bytes too early"):
        store.read_range(1, Part.DATA, 3, 2)


def test_a_missing_file_is_not_found(root: SegmentRoot) -> None:
    store = root.topic(10)
    assert store.list() == []
    assert not store.exists(1, Part.DATA)
    for attempt in (
        lambda: store.view(1, Part.DATA),
        lambda: store.read_range(1, Part.IDX, 0, 4),
        lambda: store.size(1, Part.DEL),
    ):
        with pytest.raises(NotFound):
            attempt()


def test_putting_again_replaces(root: SegmentRoot) -> None:
    store = root.topic(10)
    store.put(1, [b"longer data"], b"longer index")
    store.put(1, [b"data"], b"index")
    assert store.view(1, Part.DATA).tobytes() == b"data"
    assert store.view(1, Part.IDX).tobytes() == b"index"


def test_a_sidecar_is_replaced_as_a_whole(root: SegmentRoot) -> None:
    store = root.topic(10)
    store.replace(1, Part.DEL, b"one")
    store.replace(1, Part.DEL, b"2")
    assert store.view(1, Part.DEL).tobytes() == b"2"
    assert not store.exists(1, Part.TAGS)


def test_segments_are_listed_oldest_first_whatever_files_they_have(root: SegmentRoot) -> None:
    store = root.topic(10)
    store.put(10_001, [b"x"], b"y")
    store.put(1, [b"x"], b"y")
    store.replace(2001, Part.DEL, b"z")
    root.topic(11).put(5, [b"x"], b"y")
    assert store.list() == [1, 2001, 10_001]


def test_deleting_removes_all_files_and_may_be_repeated(root: SegmentRoot) -> None:
    store = root.topic(10)
    for _ in range(2):
        store.put(1, [b"x"], b"y")
        store.replace(1, Part.TAGS, b"t")
        store.replace(1, Part.DEL, b"d")
        for _ in range(2):
            store.delete(1)
            assert store.list() == []


def test_single_parts_can_be_deleted(root: SegmentRoot) -> None:
    store = root.topic(10)
    store.put(1, [b"x"], b"y")
    store.delete(1, (Part.DATA,))
    assert not store.exists(1, Part.DATA)
    assert store.view(1, Part.IDX).tobytes() == b"y"


def test_a_view_outlives_its_file(root: SegmentRoot) -> None:
    store = root.topic(10)
    store.put(1, [b"data"], b"index")
    view = store.view(1, Part.DATA)
    store.delete(1)
    assert view.tobytes() == b"data"


def test_a_topic_is_removed_with_everything_it_has_and_no_other(root: SegmentRoot) -> None:
    root.topic(10).put(1, [b"x"], b"y")
    root.topic(10).put(2, [b"x"], b"y")
    root.topic(11).put(1, [b"x"], b"y")
    for _ in range(2):
        root.remove_topic(10)
        assert root.topic(10).list() == []
    assert root.topic(11).list() == [1]


def test_files_are_where_the_layout_says(tmp_path: Path) -> None:
    local, objects = tmp_path / "a", tmp_path / "b"
    for root in (LocalSegmentRoot(OsFileSystem(), str(local)), ObjectSegmentRoot(LocalStore(objects))):
        root.topic(0xAB).put(10_001, [b"x"], b"y")
        root.close()
    for place in (local, objects):
        folder = place / "topics" / "000000AB"
        assert sorted(path.name for path in folder.iterdir()) == [
            "seg-0000000000010001.data",
            "seg-0000000000010001.idx",
        ]
    assert topic_folder(2**40) == "10000000000"


@pytest.fixture
def local(tmp_path: Path) -> LocalSegmentStore:
    return LocalSegmentStore(OsFileSystem(), str(tmp_path / "topics" / "0000000A"))


def test_appending_continues_both_files(local: LocalSegmentStore) -> None:
    local.put(1, [b"data"], b"index")
    local.append(1, 4, 5, [b"-mo", b"re"], b"+")
    assert local.view(1, Part.DATA).tobytes() == b"data-more"
    assert local.view(1, Part.IDX).tobytes() == b"index+"


def test_appending_cuts_off_bytes_beyond_the_valid_size(local: LocalSegmentStore) -> None:
    local.put(1, [b"data and torn bytes"], b"index and torn bytes")
    local.append(1, 4, 5, [b"!"], b"?")
    assert local.view(1, Part.DATA).tobytes() == b"data!"
    assert local.view(1, Part.IDX).tobytes() == b"index?"


def test_a_view_taken_before_an_append_stays_as_it_was(local: LocalSegmentStore) -> None:
    local.put(1, [b"data"], b"index")
    view = local.view(1, Part.DATA)
    local.append(1, 4, 5, [b"x" * 100_000], b"?")
    assert view.tobytes() == b"data"


def test_appending_to_a_file_that_became_shorter_is_damage(local: LocalSegmentStore) -> None:
    local.put(1, [b"data"], b"index")
    with pytest.raises(Damaged, match="does not have the 5 bytes"):
        local.append(1, 5, 5, [b"x"], b"y")
    with pytest.raises(Damaged, match="does not have the 0 bytes"):
        local.append(2, 0, 5, [b"x"], b"y")


def test_a_half_written_file_does_not_block_a_later_write(local: LocalSegmentStore) -> None:
    local.put(1, [b"data"], b"index")
    (Path(local.directory) / "seg-0000000000000001.data.tmp").write_bytes(b"torn")
    local.put(1, [b"new"], b"index")
    assert local.view(1, Part.DATA).tobytes() == b"new"
    assert local.list() == [1]


def test_a_walk_finds_topics_segments_parts_and_strays(tmp_path: Path) -> None:
    root = LocalSegmentRoot(OsFileSystem(), str(tmp_path))
    assert root.scan().topics == {}
    root.topic(10).put(1, [b"x"], b"y")
    root.topic(11).replace(7, Part.DEL, b"z")
    torn = tmp_path / "topics" / "0000000A" / "seg-0000000000000001.del.tmp"
    torn.write_bytes(b"t")
    (tmp_path / "topics" / "notes.txt").write_bytes(b"somebody else's")
    (tmp_path / "topics" / "0a").mkdir()
    (tmp_path / "topics" / "0a" / "x").write_bytes(b"somebody else's")
    found = root.scan()
    assert found.topics == {10: {1: {Part.DATA, Part.IDX}}, 11: {7: {Part.DEL}}}
    assert found.strays == [str(torn)]
    for _ in range(2):
        root.remove_stray(str(torn))
    assert not torn.exists()


@pytest.mark.parametrize(
    "name",
    [
        "seg-0000000000000001",
        "seg-0000000000000001.data.tmp",
        "seg-0000000000000001.DATA",
        "seg-1.idx",
        ".data",
    ],
)
def test_other_names_are_not_parts_of_a_segment(name: str) -> None:
    assert parse_file_name(name) is None


def test_the_cold_tier_is_a_directory_or_a_store(tmp_path: Path) -> None:
    fs = OsFileSystem()
    assert isinstance(open_cold_store(str(tmp_path), fs), LocalSegmentRoot)
    directory = open_cold_store(f"file://{tmp_path}/cold", fs)
    directory.topic(1).put(1, [b"x"], b"y")
    assert (tmp_path / "cold" / "topics" / "00000001" / "seg-0000000000000001.data").read_bytes() == b"x"
    directory.close()
    with pytest.raises(ConfigError, match="unknown scheme"):
        open_cold_store("ftp://somewhere", fs)
    with pytest.raises(ConfigError, match="loses all data"):
        open_cold_store("memory://segments", fs)


@pytest.mark.parametrize("kind", ["directory", "store"])
def test_the_first_marker_stays(tmp_path: Path, kind: str) -> None:
    place = str(tmp_path / "cold") if kind == "directory" else f"file://{tmp_path}/cold"
    root = open_cold_store(place, OsFileSystem())
    with pytest.raises(NotFound):
        root.read_marker()
    root.create_marker(b"mine")
    with pytest.raises(Conflict):
        root.create_marker(b"yours")
    assert root.read_marker() == b"mine"
    root.close()


def test_an_object_that_cannot_be_deleted_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    root = ObjectSegmentRoot(store)
    root.topic(1).put(1, [b"x"], b"y")

    async def refuse(keys: object) -> dict[str, Exception]:
        return {"key": NotFound("no")}

    monkeypatch.setattr(store, "delete_many", refuse)
    for attempt in (lambda: root.topic(1).delete(1), lambda: root.remove_topic(1)):
        with pytest.raises(NotFound):
            attempt()
    assert len(loop_thread().run(store.list(""))) == 2
