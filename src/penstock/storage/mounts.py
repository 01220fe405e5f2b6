"""What kind of file system a directory is on, where the machine tells."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

__all__ = ["VOLATILE", "device_kind", "filesystem_of"]

VOLATILE: Final = frozenset({"tmpfs", "ramfs"})
"""File systems that are memory: nothing on them survives a restart of the machine."""


def filesystem_of(path: str, mounts: str) -> str:
    """The type of file system `path` is on, by the text of /proc/mounts; "" if it does not tell."""
    best, kind = "", ""
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ")
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, fields[2]
    return kind


def device_kind(path: str) -> str:
    """The type of file system `path` is on; "" where the machine does not tell."""
    try:
        return filesystem_of(os.path.realpath(path), Path("/proc/mounts").read_text(encoding="utf-8"))
    except OSError:
        return ""
