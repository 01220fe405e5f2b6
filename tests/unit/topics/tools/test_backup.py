"""Backup of a data directory while it changes, and restore."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.unit.topics.data_directories import FS, GROWING, SEALED, DataDirectory

from penstock.errors import NotFound, Rejected, Unsupported
from penstock.storage import FileView, LockHeld, OsFileSystem
from penstock.storage.log_scan import scan
from penstock.topics.checkpoints.layout import LOCK_FILE
from penstock.topics.checkpoints.snapshot import load_latest
from penstock.topics.errors import Damaged
from penstock.topics.log.frame_scan import WalFormat
from penstock.topics.segments.format import Part, encode_deleted
from penstock.topics.segments.store import LocalSegmentRoot
from penstock.topics.tools.backup import backup, read_manifest
from penstock.topics.tools.restore import restore
from penstock.topics.tools.verify import verify


@pytest.fixture
def made(tmp_path: Path) -> DataDirectory:
    return DataDirectory(tmp_path / "data")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "backup"


def frames(directory: Path) -> int:
    return sum(file.frame_count for file in scan(FS, str(directory / "wal"), WalFormat()).files)


def test_a_backup_is_a_clean_data_directory_with_its_list(made: DataDirectory, target: Path) -> None:
    made.write_log(3)
    manifest = backup(FS, str(made.path), str(target))
    assert verify(FS, str(target)).findings == []
    assert manifest.snapshot == 3
    assert manifest.topics == 1
    assert {file.path for file in manifest.files} == {
        *(f"{SEALED}.{part.value}" for part in Part),
        f"{GROWING}.data",
        f"{GROWING}.idx",
        "meta/snapshot-0000000000000003.bin",
        made.active_log(),
        "wal/CURRENT",
    }
    assert read_manifest(FS, str(target)) == manifest
    assert frames(target) == frames(made.path)


def test_only_valid_bytes_are_copied(made: DataDirectory, target: Path) -> None:
    backup(FS, str(made.path), str(target))
    assert len((target / f"{GROWING}.data").read_bytes()) == made.entries[1].data_bytes
    assert len((target / f"{GROWING}.idx").read_bytes()) == made.entries[1].idx_bytes
    assert len((target / made.active_log()).read_bytes()) == made.log.end.offset


def test_a_directory_without_a_snapshot_is_backed_up_as_its_log(made: DataDirectory, target: Path) -> None:
    (made.path / "meta" / "snapshot-0000000000000003.bin").unlink()
    assert backup(FS, str(made.path), str(target)).snapshot == 0
    assert frames(target) == frames(made.path)


def test_a_backup_needs_its_own_directory(made: DataDirectory, target: Path) -> None:
    target.mkdir()
    (target / "mine").write_text("x")
    with pytest.raises(Rejected, match="not empty"):
        backup(FS, str(made.path), str(target))
    assert [path.name for path in target.iterdir()] == ["mine"]


def test_there_must_be_something_to_back_up(tmp_path: Path, target: Path) -> None:
    with pytest.raises(NotFound):
        backup(FS, str(tmp_path / "none"), str(target))
    assert not target.exists()


def test_a_foreign_directory_cannot_be_backed_up(tmp_path: Path, target: Path) -> None:
    (tmp_path / "photos").mkdir()
    with pytest.raises(Rejected, match="is not a data directory of topics"):
        backup(FS, str(tmp_path / "photos"), str(target))
    assert not target.exists()


def test_an_empty_directory_cannot_be_backed_up(tmp_path: Path, target: Path) -> None:
    (tmp_path / "new" / "wal").mkdir(parents=True)
    with pytest.raises(Rejected, match=r"nothing in .* to back up yet"):
        backup(FS, str(tmp_path / "new"), str(target))
    assert list(target.iterdir()) == []


def test_a_backup_that_fails_leaves_nothing_and_can_be_repeated(made: DataDirectory, target: Path) -> None:
    made.damage(f"{SEALED}.data", 60)
    with pytest.raises(Damaged):
        backup(FS, str(made.path), str(target))
    assert list(target.iterdir()) == []
    made.damage(f"{SEALED}.data", 60)
    backup(FS, str(made.path), str(target))
    assert verify(FS, str(target)).findings == []


class _Power(BaseException):
    """The process is killed without any cleanup."""


def cut_off(made: DataDirectory, target: Path) -> None:
    """Interrupt a backup in the middle, as if the process had been killed."""

    def kill() -> None:
        raise _Power

    dying = _Moving(".log", kill)
    dying.unlink = lambda path: kill()  # type: ignore[method-assign]
    with pytest.raises(_Power):
        backup(dying, str(made.path), str(target))
    assert (target / "backup.unfinished").exists()
    assert (target / f"{SEALED}.data").exists()


def test_a_backup_that_was_cut_off_can_be_repeated(made: DataDirectory, target: Path) -> None:
    cut_off(made, target)
    with pytest.raises(Rejected, match="a backup that was not finished"):
        verify(FS, str(target))
    (target / "topics" / "00000009").mkdir()
    (target / "topics" / "00000009" / "seg-0000000000000001.data").write_bytes(b"of a topic that is gone")
    (target / "backup.json.0123").write_bytes(b"{")
    manifest = backup(FS, str(made.path), str(target))
    names = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    assert names == {file.path for file in manifest.files} | {"backup.json"}
    assert verify(FS, str(target)).findings == []


def test_an_unfinished_backup_with_something_else_beside_it_is_left_alone(
    made: DataDirectory, target: Path
) -> None:
    cut_off(made, target)
    (target / "mine").write_text("x")
    with pytest.raises(Rejected, match="it has mine"):
        backup(FS, str(made.path), str(target))
    assert (target / f"{SEALED}.data").exists()


def test_two_backups_do_not_share_a_directory(made: DataDirectory, target: Path) -> None:
    target.mkdir()
    with (
        FS.lock(str(target / "backup.unfinished"), note=b"pid=4711\n"),
        pytest.raises(LockHeld, match="4711"),
    ):
        backup(FS, str(made.path), str(target))


def test_a_backup_is_not_overwritten(made: DataDirectory, target: Path) -> None:
    backup(FS, str(made.path), str(target))
    before = (target / "backup.json").read_bytes()
    with pytest.raises(Rejected, match="not empty"):
        backup(FS, str(made.path), str(target))
    (target / "backup.unfinished").touch()  # the power failed after the list was written
    assert verify(FS, str(target)).findings == []
    with pytest.raises(Rejected, match=r"it has backup\.json"):
        backup(FS, str(made.path), str(target))
    assert (target / "backup.json").read_bytes() == before


class _Moving(OsFileSystem):
    """A file system that runs a callback when a certain file is first read."""

    def __init__(self, ending: str, act: object) -> None:
        super().__init__()
        self.ending = ending
        self.act = act

    def read(self, path: str, start: int | None = 0, length: int | None = None) -> bytes:
        self._act_on(path)
        return super().read(path, start, length)

    def open_view(self, path: str) -> FileView:
        self._act_on(path)
        return super().open_view(path)

    def _act_on(self, path: str) -> None:
        if path.endswith(self.ending) and self.act is not None:
            act, self.act = self.act, None
            assert callable(act)
            act()


def test_a_segment_that_vanishes_makes_it_start_over_from_the_newer_snapshot(
    made: DataDirectory, target: Path
) -> None:
    def drop_the_oldest() -> None:
        made.log.rotate()
        made.write_log(2)
        made.snapshot(4, made.entries[1])
        made.root.topic(1).delete(1)
        made.log.drop_before(made.log.end.file)

    manifest = backup(_Moving(f"{SEALED}.idx", drop_the_oldest), str(made.path), str(target))
    assert manifest.snapshot == 4
    assert not (target / f"{SEALED}.data").exists()
    assert not (target / "meta" / "snapshot-0000000000000003.bin").exists()
    assert sorted(path.name for path in (target / "wal").iterdir()) == ["CURRENT", made.active_log()[4:]]
    assert verify(FS, str(target)).findings == []


def test_a_topic_that_was_deleted_since_the_snapshot_is_left_out(made: DataDirectory, target: Path) -> None:
    manifest = backup(_Moving(f"{SEALED}.idx", made.remove_topic), str(made.path), str(target))
    assert (manifest.snapshot, manifest.topics) == (3, 0)
    loaded = load_latest(FS, str(target / "meta")).snapshot
    assert loaded is not None
    assert loaded.topics == ()
    assert verify(FS, str(target)).findings == []


def test_it_waits_for_the_next_snapshot_of_a_running_server(made: DataDirectory, target: Path) -> None:
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            made.snapshot(4, made.entries[1])

    made.root.topic(1).delete(1)
    with FS.lock(str(made.path / LOCK_FILE)):
        manifest = backup(FS, str(made.path), str(target), sleep=sleep)
    assert manifest.snapshot == 4
    assert len(waits) == 3


def test_without_a_server_a_missing_segment_is_damage(made: DataDirectory, target: Path) -> None:
    made.root.topic(1).delete(1, [Part.DATA])
    with pytest.raises(Damaged, match="a segment of clicks is missing"):
        backup(FS, str(made.path), str(target))
    assert not (target / "backup.json").exists()


def test_a_log_truncated_during_the_copy_makes_it_start_over(made: DataDirectory, target: Path) -> None:
    def checkpoint() -> None:
        made.log.rotate()
        made.write_log(2)
        made.snapshot(4)
        made.log.drop_before(made.log.end.file)

    first = os.path.basename(made.active_log())
    assert backup(_Moving(first, checkpoint), str(made.path), str(target)).snapshot == 4
    assert verify(FS, str(target)).findings == []


def test_a_log_that_grows_meanwhile_is_copied_up_to_a_complete_frame(
    made: DataDirectory, target: Path
) -> None:
    backup(_Moving(".log", lambda: made.write_log(7)), str(made.path), str(target))
    assert verify(FS, str(target)).findings == []
    assert frames(target) == frames(made.path)


def test_a_damaged_original_cannot_be_backed_up(made: DataDirectory, target: Path) -> None:
    made.damage(f"{SEALED}.data", 60)
    with pytest.raises(Damaged, match=r"so may be the original: .*seg-0000000000000001\.data, bytes"):
        backup(FS, str(made.path), str(target))
    with pytest.raises(Rejected, match="no backup"):
        restore(FS, str(target), str(target.parent / "again"))


def test_a_backup_does_not_depend_on_the_cold_tier(made: DataDirectory, target: Path, tmp_path: Path) -> None:
    cold = LocalSegmentRoot(FS, str(tmp_path / "cold"))
    store = made.root.topic(1)
    cold.topic(1).put(1, [store.view(1, Part.DATA)], store.view(1, Part.IDX))
    cold.topic(1).replace(1, Part.DEL, encode_deleted(1, np.zeros(10, np.bool_)))
    store.delete(1, [Part.DATA])
    moved = msgspec.structs.replace(made.entries[0], cold=True)
    made.snapshot(4, moved, made.entries[1])
    with pytest.raises(Rejected, match="name it with --cold"):
        backup(FS, str(made.path), str(target))
    manifest = backup(FS, str(made.path), str(target.parent / "whole"), cold=cold)
    assert f"{SEALED}.data" in {file.path for file in manifest.files}
    assert (target.parent / "whole" / f"{SEALED}.del").read_bytes() == store.view(1, Part.DEL)
    loaded = load_latest(FS, str(target.parent / "whole" / "meta")).snapshot
    assert loaded is not None
    assert [entry.cold for entry in loaded.topics[0].segments] == [False, False]
    assert verify(FS, str(target.parent / "whole")).findings == []


@pytest.fixture
def taken(made: DataDirectory, target: Path) -> Path:
    backup(FS, str(made.path), str(target))
    return target


def test_a_restore_equals_the_backed_up_directory(taken: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    restore(FS, str(taken), str(again))
    names = {str(path.relative_to(taken)) for path in taken.rglob("*") if path.is_file()} - {"backup.json"}
    restored = {str(path.relative_to(again)) for path in again.rglob("*") if path.is_file()}
    assert restored == names | {LOCK_FILE}
    for name in names:
        assert (again / name).read_bytes() == (taken / name).read_bytes()
    assert not (again / "restoring").exists()


def test_restoring_needs_an_empty_directory(taken: Path, made: DataDirectory) -> None:
    with pytest.raises(Rejected, match="not empty"):
        restore(FS, str(taken), str(made.path))


def test_restoring_refuses_a_directory_with_a_server(
    taken: Path, made: DataDirectory, tmp_path: Path
) -> None:
    with FS.lock(str(made.path / LOCK_FILE), note=b"pid=4711\n"), pytest.raises(LockHeld, match="4711"):
        restore(FS, str(taken), str(made.path))
    empty = tmp_path / "empty"
    empty.mkdir()
    with FS.lock(str(empty / LOCK_FILE), note=b"pid=4711\n"), pytest.raises(LockHeld, match="4711"):
        restore(FS, str(taken), str(empty))


def test_a_lock_file_without_a_holder_does_not_block_a_restore(taken: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / LOCK_FILE).write_text("pid=1\n")
    restore(FS, str(taken), str(tmp_path / "empty"))


@pytest.mark.parametrize("spoil", ["flip", "cut", "remove"])
def test_a_modified_backup_is_not_restored(taken: Path, tmp_path: Path, spoil: str) -> None:
    path = taken / f"{SEALED}.data"
    raw = path.read_bytes()
    if spoil == "remove":
        path.unlink()
    else:
        path.write_bytes(raw[:-1] if spoil == "cut" else b"\xff" + raw[1:])
    with pytest.raises(Damaged, match="seg-0000000000000001"):
        restore(FS, str(taken), str(tmp_path / "again"))
    assert not (tmp_path / "again" / "meta").exists()
    assert not (tmp_path / "again" / "wal").exists()

    assert [path.name for path in (tmp_path / "again").iterdir()] == [LOCK_FILE]
    path.write_bytes(raw)
    restore(FS, str(taken), str(tmp_path / "again"))


class _Dying(OsFileSystem):
    """A file system that stops at a certain rename and does nothing more."""

    def __init__(self, renames: int) -> None:
        super().__init__()
        self.renames = renames

    def rename(self, source: str, target: str) -> None:
        if not self.renames:
            raise _Power
        self.renames -= 1
        super().rename(source, target)

    def unlink(self, path: str) -> None:
        if not self.renames:
            raise _Power
        super().unlink(path)


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_restore_that_was_cut_off_can_be_repeated(taken: Path, tmp_path: Path, renames: int) -> None:
    again = tmp_path / "again"
    with pytest.raises(_Power):
        restore(_Dying(renames), str(taken), str(again))
    with pytest.raises(Rejected, match="restore it again"):
        verify(FS, str(again))
    restore(FS, str(taken), str(again))
    assert verify(FS, str(again)).findings == []
    assert sorted(path.name for path in again.iterdir()) == [LOCK_FILE, "meta", "topics", "wal"]


def test_files_a_server_wrote_after_an_interrupted_restore_are_not_removed(
    taken: Path, tmp_path: Path
) -> None:
    again = tmp_path / "again"
    with pytest.raises(_Power):
        restore(_Dying(1), str(taken), str(again))
    (again / "meta" / "snapshot-0000000000000009.bin").write_bytes(b"newer")
    with pytest.raises(Rejected, match="not empty"):
        restore(FS, str(taken), str(again))
    assert (again / "meta" / "snapshot-0000000000000009.bin").exists()


@pytest.mark.parametrize(
    "path", ["../out", "/etc/passwd", "meta/../../out", "other/x", "wal//x", "meta/.hidden", "wal"]
)
def test_a_list_with_a_path_outside_is_refused(taken: Path, tmp_path: Path, path: str) -> None:
    manifest = json.loads((taken / "backup.json").read_text())
    manifest["files"][0]["path"] = path
    (taken / "backup.json").write_text(json.dumps(manifest))
    with pytest.raises(Damaged, match="not a file of a backup"):
        restore(FS, str(taken), str(tmp_path / "again"))
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", Damaged),
        ("[]", Damaged),
        ('{"version":2,"created_ms":1,"snapshot":0,"topics":0,"files":[]}', Unsupported),
    ],
)
def test_an_unreadable_list_is_reported(
    taken: Path, tmp_path: Path, text: str, error: type[Exception]
) -> None:
    (taken / "backup.json").write_text(text)
    with pytest.raises(error):
        restore(FS, str(taken), str(tmp_path / "again"))
