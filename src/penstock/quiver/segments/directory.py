"""The files of segments and the steps that change them. Each step is durable before the next.

- write: make the data durable, make the sidecar durable, rename the data, rename the sidecar (the commit);
- remove: remove the sidecar, then the data;
- quarantine: move the data, then the sidecar.

Data without a sidecar is therefore not committed, and a sidecar without data shows a loss.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal, TypeAlias

from penstock.errors import Conflict, NotFound, PenstockError
from penstock.quiver.segments.metadata import arrow_name, meta_name
from penstock.storage import Buffer, FileSystem, WritableFile

ReadMode: TypeAlias = Literal["mmap", "read"]

TMP: Final = ".tmp"


class SegmentDirectory:
    """One directory of segments and its quarantine. It keeps no state in memory."""

    def __init__(self, fs: FileSystem, directory: str, quarantine: str, read_mode: ReadMode) -> None:
        self.fs = fs
        self.directory = directory
        self.quarantine = quarantine
        self.read_mode = read_mode

    def make(self) -> None:
        """Create both directories if they are missing."""
        self.fs.make_dirs(self.directory)
        self.fs.make_dirs(self.quarantine)

    def names(self) -> list[str]:
        return [name for name, _ in self.fs.list_files(self.directory)]

    def quarantined(self) -> list[str]:
        return [name for name, _ in self.fs.list_files(self.quarantine)]

    def arrow_path(self, seq: int) -> str:
        return os.path.join(self.directory, arrow_name(seq))

    def meta_path(self, seq: int) -> str:
        return os.path.join(self.directory, meta_name(seq))

    def view(self, seq: int) -> Buffer:
        """Return a segment's data, read or mapped as configured. Raise `NotFound`, or `MediaError` if read.

        Accessing a mapped file kills the process (SIGBUS) if the device cannot read it or the file was
        truncated.
        """
        path = self.arrow_path(seq)
        return self.fs.map(path) if self.read_mode == "mmap" else self.fs.read(path)

    def stage_data(self, seq: int, fill: Callable[[Callable[[Sequence[Buffer]], None]], None]) -> None:
        """Write the bytes from `fill` to the staged data file. It is durable on return."""
        with self._staged(self.arrow_path(seq) + TMP) as file:
            fill(file.write)

    def stage_sidecar(self, seq: int, data: bytes) -> None:
        """Write the staged sidecar. It is durable on return."""
        with self._staged(self.meta_path(seq) + TMP) as file:
            file.write([data])

    def name_data(self, seq: int) -> None:
        """Rename the staged data to its final name. The segment is not committed yet."""
        self._name(self.arrow_path(seq))

    def name_sidecar(self, seq: int) -> None:
        """Rename the staged sidecar to its final name, which commits the segment."""
        self._name(self.meta_path(seq))

    def protect(self, seq: int) -> None:
        """Make the files read-only where possible, because a segment never changes."""
        for path in (self.arrow_path(seq), self.meta_path(seq)):
            with contextlib.suppress(PenstockError):
                self.fs.protect(path)

    def remove(self, seqs: Sequence[int]) -> None:
        """Remove segments durably. A missing file counts as removed."""
        for path_of in (self.meta_path, self.arrow_path):
            for seq in seqs:
                with contextlib.suppress(NotFound):
                    self.fs.unlink(path_of(seq))
            if seqs:
                self.fs.sync_dir(self.directory)

    def move_to_quarantine(self, seq: int) -> None:
        """Durably move the existing files of a segment to the quarantine."""
        for name in (arrow_name(seq), meta_name(seq)):
            with contextlib.suppress(NotFound):
                self.fs.rename(os.path.join(self.directory, name), self._free_name(name))
            self.fs.sync_dir(self.quarantine)
            self.fs.sync_dir(self.directory)

    def _free_name(self, name: str) -> str:
        """Return an unused path in the quarantine. An earlier file of that name stays."""
        taken = set(self.quarantined())
        stem, dot, ending = name.partition(".")
        number, free = 0, name
        while free in taken:
            number += 1
            free = f"{stem}.{number}{dot}{ending}"
        return os.path.join(self.quarantine, free)

    def _name(self, path: str) -> None:
        self.fs.rename(path + TMP, path)
        self.fs.sync_dir(self.directory)

    @contextlib.contextmanager
    def _staged(self, path: str) -> Iterator[WritableFile]:
        """Yield a new file that is durable when the block ends. On failure it is removed."""
        try:
            file = self.fs.create(path)
        except Conflict:
            # The file is left over from an attempt whose clean-up failed.
            self.fs.unlink(path)
            file = self.fs.create(path)
        try:
            try:
                yield file
                file.datasync()
            finally:
                file.close()
        except Exception:
            with contextlib.suppress(PenstockError):
                self.fs.unlink(path)
            raise
