"""Which cores of a data directory a command is about."""

from __future__ import annotations

import os

from penstock.errors import NotFound
from penstock.quiver import core_directories
from penstock.storage import OsFileSystem

__all__ = ["chosen_cores"]


def chosen_cores(path: str, core: int | None) -> list[tuple[int, str]]:
    """Numbers and directories of the cores below PATH, or of the one that is asked for. Raises `NotFound`."""
    root = os.path.abspath(path)
    if not os.path.isdir(root):
        raise NotFound(f"{path} is not a directory; name the data directory, the one with core_0 in it")
    cores = core_directories(OsFileSystem(), root)
    chosen = [found for found in cores if core in (None, found[0])]
    if not chosen:
        raise NotFound(
            f"there is no core {core} in {path}; there is {', '.join(str(each) for each, _ in cores)}"
        )
    return chosen
