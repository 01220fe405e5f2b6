"""What the real file system does when a call fails halfway."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from penstock.errors import PenstockError
from penstock.storage.fs import OsFileSystem, posix


def test_a_directory_whose_name_could_not_be_synced_is_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str) -> None:
        raise OSError(errno.EIO, path)

    with monkeypatch.context() as broken:
        broken.setattr(posix, "_sync_dir", fail)
        with pytest.raises(PenstockError):
            OsFileSystem().make_dirs(str(tmp_path / "data"))
    assert not (tmp_path / "data").exists()


def test_a_directory_of_somebody_else_stays_when_its_name_cannot_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "data"
    seen = iter([False, True])
    made.mkdir()
    monkeypatch.setattr(posix.os.path, "isdir", lambda path: str(path) != str(made) or next(seen))

    def fail(path: str) -> None:
        raise OSError(errno.EIO, path)

    monkeypatch.setattr(posix, "_sync_dir", fail)
    with pytest.raises(PenstockError):
        OsFileSystem().make_dirs(str(made))
    assert made.exists()
