"""Directories that are there after a power cut."""

from __future__ import annotations

import os

from penstock.errors import NotFound
from penstock.storage import FileSystem

__all__ = ["DurableDirectory"]


class DurableDirectory:
    """A directory that is made, durably, before anything in it is relied on.

    That it exists proves nothing: whoever made it may have failed, or died, before its name was durable. So
    its name is made durable once by every process that is going to use it.
    """

    __slots__ = ("_ensured", "_fs", "_parent", "path")

    def __init__(self, fs: FileSystem, path: str, parent: DurableDirectory | None = None) -> None:
        self._fs = fs
        self._parent = parent
        self._ensured: set[str] = set() if parent is None else parent._ensured
        self.path = path

    def below(self, name: str) -> DurableDirectory:
        """A directory inside this one. Both remember together which are known to be durable."""
        return DurableDirectory(self._fs, os.path.join(self.path, name), self)

    def forget(self) -> None:
        """The directory is going to be removed."""
        self._ensured.discard(self.path)

    def ensure(self) -> None:
        """On return the directory is there and will be. After a failure it may be tried again."""
        if self.path in self._ensured:
            return
        if self._parent is not None:
            self._parent.ensure()
        try:
            self._fs.stat(self.path)
        except NotFound:
            self._fs.make_dirs(self.path)
        else:
            self._fs.sync_dir(os.path.dirname(self.path))
        self._ensured.add(self.path)
