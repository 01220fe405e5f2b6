"""One process per data directory."""

from __future__ import annotations

import os
from contextlib import ExitStack
from types import TracebackType

from penstock.errors import PenstockError
from penstock.storage.file_access import advised, described
from penstock.storage.fs import FileSystem, LockHeld

__all__ = ["DirectoryLock"]


class DirectoryLock:
    """Keeps a data directory for one owner, as a context manager.

    Entering raises `LockHeld`, which names the holder's process id, if the directory is in use. The lock
    ends with the process however it ends, so nothing is left to clean up after a crash. `name` is the lock
    file in the directory; `note` stands before the process id in it.
    """

    __slots__ = ("_directory", "_fs", "_name", "_note", "_stack")

    def __init__(self, fs: FileSystem, directory: str, *, name: str = "LOCK", note: str = "") -> None:
        self._fs = fs
        self._directory = directory
        self._name = name
        self._note = note
        self._stack = ExitStack()

    def __enter__(self) -> DirectoryLock:
        self._fs.make_dirs(self._directory)
        path = os.path.join(self._directory, self._name)
        note = f"{self._note}{os.getpid()}\n".encode()
        try:
            self._stack.enter_context(self._fs.lock(path, wait=False, note=note))
        except LockHeld as error:
            named = advised(self._holder(path), "stop that process or choose another directory")
            raise LockHeld(f"data directory {self._directory} is in use by {named}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _holder(self, path: str) -> str:
        try:
            text = self._fs.read(path).decode("ascii", "replace").strip()
        except PenstockError:
            text = ""
        text = text.removeprefix(self._note)
        return described(int(text)) if text.isdigit() and len(text) < 20 else "process (unknown)"
