"""Directories that are there for sure before something in them counts as kept."""

from __future__ import annotations

import contextlib
import os

from penstock.errors import PermissionDenied
from penstock.fs import FileSystem

__all__ = ["make_durably"]


def make_durably(fs: FileSystem, path: str) -> None:
    """Make a directory and those above it; on return their names survive a power cut.

    Also when an earlier call made them and failed before their names were durable, which making them again
    would not notice. Raises what the disk raises.
    """
    fs.make_dirs(path)
    above = os.path.dirname(path)
    while above != path:
        # Where we may not look we did not make anything either.
        with contextlib.suppress(PermissionDenied):
            fs.sync_dir(above)
        path, above = above, os.path.dirname(above)
