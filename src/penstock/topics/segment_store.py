"""Where segments are kept: a directory of this machine, or a folder of an object store.

Every call blocks. Segments are published by their caller: a file that no metadata names does not count, so a
call that failed half-way is simply made again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Sequence
from typing import Final, Protocol

from penstock.blocking import loop_thread
from penstock.errors import Conflict, Corrupt, MediaError, NotFound, Unavailable
from penstock.objects import ByteRange, ObjectStore, join_key
from penstock.storage import Buffer, FileSystem, FileView, stage
from penstock.topics.errors import Damaged
from penstock.topics.segment import Part, segment_id, segment_name
from penstock.topics.segment_directory import DurableDirectory

__all__ = ["ALL_PARTS", "LocalSegmentStore", "ObjectSegmentStore", "SegmentStore", "parse_file_name"]

ALL_PARTS: Final = (Part.IDX, Part.DATA, Part.TAGS, Part.DEL)
_STAGED = ".tmp"


class SegmentStore(Protocol):
    """The segments of one topic; a segment is named by its first sequence number."""

    def put(self, first_seq: int, data: Sequence[Buffer], idx: Buffer) -> None:
        """Store a segment, replacing what is there; durable on return."""
        ...

    def replace(self, first_seq: int, part: Part, content: Buffer) -> None:
        """Put one file in place in one step: readers see the old one or the new one; durable on return."""
        ...

    def read_range(self, first_seq: int, part: Part, offset: int, length: int) -> memoryview:
        """Exactly these bytes. Raises `NotFound`, and `Damaged` if the file ends before."""
        ...

    def view(self, first_seq: int, part: Part) -> memoryview:
        """The whole file. Raises `NotFound`, and `Damaged` if it cannot be read."""
        ...

    def delete(self, first_seq: int, parts: Collection[Part] = ALL_PARTS) -> None:
        """Remove files of a segment; those that are not there count as removed."""
        ...

    def exists(self, first_seq: int, part: Part) -> bool: ...

    def size(self, first_seq: int, part: Part) -> int:
        """Raises `NotFound`."""
        ...

    def list(self) -> list[int]:
        """The segments of which there is any file, oldest first."""
        ...


def parse_file_name(name: str) -> tuple[int, Part] | None:
    """Segment and part of a file, or None if the name is no such file's."""
    stem, _, ending = name.partition(".")
    first_seq = segment_id(stem)
    if first_seq is None or ending not in Part.__members__.values():
        return None
    return first_seq, Part(ending)


def _file_name(first_seq: int, part: Part) -> str:
    return f"{segment_name(first_seq)}.{part.value}"


class LocalSegmentStore:
    """A `SegmentStore` in a directory, which is made with the first segment. For one writer."""

    def __init__(self, fs: FileSystem, directory: str | DurableDirectory) -> None:
        self._fs = fs
        self._made = DurableDirectory(fs, directory) if isinstance(directory, str) else directory
        self.directory = self._made.path

    def put(self, first_seq: int, data: Sequence[Buffer], idx: Buffer) -> None:
        self._made.ensure()
        self._stage(first_seq, Part.DATA, data)
        self._stage(first_seq, Part.IDX, [idx])
        for part in (Part.DATA, Part.IDX):
            target = self._path(first_seq, part)
            self._fs.rename(target + _STAGED, target)
        self._fs.sync_dir(self.directory)

    def append(
        self, first_seq: int, data_before: int, idx_before: int, data: Sequence[Buffer], idx: Buffer
    ) -> None:
        """Continue a segment whose files count up to these sizes; durable on return.

        What an earlier, failed attempt left beyond is cut off. Raises `Damaged` if a file is shorter.
        """
        self._continue(first_seq, Part.DATA, data_before, data)
        self._continue(first_seq, Part.IDX, idx_before, [idx])

    def replace(self, first_seq: int, part: Part, content: Buffer) -> None:
        self._made.ensure()
        target = self._path(first_seq, part)
        self._stage(first_seq, part, [content])
        self._fs.rename(target + _STAGED, target)
        self._fs.sync_dir(self.directory)

    def read_range(self, first_seq: int, part: Part, offset: int, length: int) -> memoryview:
        raw = self._read(first_seq, part, offset, length)
        return _whole(memoryview(raw), first_seq, part, length)

    def view(self, first_seq: int, part: Part) -> memoryview:
        return memoryview(self._read(first_seq, part, 0, None))

    def opened(self, first_seq: int, part: Part) -> FileView:
        """The file, to be read piece by piece. It outlives the file's name. Raises `NotFound`."""
        return self._fs.open_view(self._path(first_seq, part))

    def _read(self, first_seq: int, part: Part, offset: int, length: int | None) -> bytes:
        try:
            return self._fs.read(self._path(first_seq, part), offset, length)
        except MediaError as error:
            raise Damaged(str(error), {"first_seq": first_seq}) from error

    def delete(self, first_seq: int, parts: Collection[Part] = ALL_PARTS) -> None:
        removed = False
        for part in parts:
            with contextlib.suppress(NotFound):
                self._fs.unlink(self._path(first_seq, part))
                removed = True
        if removed:
            self._fs.sync_dir(self.directory)

    def exists(self, first_seq: int, part: Part) -> bool:
        try:
            self._fs.stat(self._path(first_seq, part))
        except NotFound:
            return False
        return True

    def size(self, first_seq: int, part: Part) -> int:
        return self._fs.stat(self._path(first_seq, part)).size

    def list(self) -> list[int]:
        found = (parse_file_name(name) for name, _ in self._fs.list_files(self.directory))
        return sorted({place[0] for place in found if place is not None})

    def _path(self, first_seq: int, part: Part) -> str:
        return os.path.join(self.directory, _file_name(first_seq, part))

    def _stage(self, first_seq: int, part: Part, buffers: Sequence[Buffer]) -> None:
        staged = self._path(first_seq, part) + _STAGED
        try:
            stage(self._fs, staged, buffers)
        except Conflict:  # left behind by a process that died; there is one writer, so it is nobody's
            self._fs.unlink(staged)
            stage(self._fs, staged, buffers)

    def _continue(self, first_seq: int, part: Part, size: int, buffers: Sequence[Buffer]) -> None:
        path = self._path(first_seq, part)
        try:
            file = self._fs.open_append(path, size)
        except (NotFound, Corrupt) as error:
            raise Damaged(
                f"{path} does not have the {size} bytes it was left with: {error}", {"first_seq": first_seq}
            ) from error
        try:
            file.write(buffers)
            file.datasync()
        finally:
            file.close()


class ObjectSegmentStore:
    """A `SegmentStore` in a folder of an object store. Never call it on an event loop: it waits for one."""

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def put(self, first_seq: int, data: Sequence[Buffer], idx: Buffer) -> None:
        # The index last: where it is, the segment is complete.
        self.replace(first_seq, Part.DATA, b"".join(data) if len(data) != 1 else data[0])
        self.replace(first_seq, Part.IDX, idx)

    def replace(self, first_seq: int, part: Part, content: Buffer) -> None:
        loop_thread().run(self._store.put(self._key(first_seq, part), content))

    def read_range(self, first_seq: int, part: Part, offset: int, length: int) -> memoryview:
        if length == 0:
            return memoryview(b"")
        wanted = ByteRange(start=offset, length=length)
        blob = loop_thread().run(self._store.get(self._key(first_seq, part), wanted))
        if len(blob.data) < length and self.size(first_seq, part) >= offset + length:
            raise Unavailable(f"reading {self._key(first_seq, part)} broke off; try again")
        return _whole(blob.data, first_seq, part, length)

    def view(self, first_seq: int, part: Part) -> memoryview:
        return loop_thread().run(self._store.get(self._key(first_seq, part))).data

    def delete(self, first_seq: int, parts: Collection[Part] = ALL_PARTS) -> None:
        keys = [self._key(first_seq, part) for part in parts]
        for error in loop_thread().run(self._store.delete_many(keys)).values():
            raise error

    def exists(self, first_seq: int, part: Part) -> bool:
        try:
            self.size(first_seq, part)
        except NotFound:
            return False
        return True

    def size(self, first_seq: int, part: Part) -> int:
        return loop_thread().run(self._store.head(self._key(first_seq, part))).size

    def list(self) -> list[int]:
        listed = loop_thread().run(self._store.list(self._prefix))
        found = (parse_file_name(info.key.rpartition("/")[2]) for info in listed)
        return sorted({place[0] for place in found if place is not None})

    def _key(self, first_seq: int, part: Part) -> str:
        return join_key(self._prefix, _file_name(first_seq, part))


def _whole(view: memoryview, first_seq: int, part: Part, length: int) -> memoryview:
    if len(view) != length:
        name = _file_name(first_seq, part)
        raise Damaged(f"{name} ends {length - len(view)} bytes too early", {"first_seq": first_seq})
    return view
