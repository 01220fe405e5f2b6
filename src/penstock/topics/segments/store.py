"""Storage of segments: a local directory or a folder of an object store, with one folder per topic.

Every call blocks. The caller publishes segments: a file that no metadata names is ignored, so a call that
failed halfway can simply be repeated.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Final, Protocol

from penstock.blocking import loop_thread
from penstock.errors import ConfigError, Conflict, Corrupt, MediaError, NotFound, Unavailable
from penstock.objects import ByteRange, ObjectStore, StoreAddress, join_key, open_store
from penstock.storage import Buffer, FileSystem, FileView, stage, write_durably
from penstock.topics.errors import Damaged
from penstock.topics.segments.format import Part, segment_id, segment_name


class DurableDirectory:
    """A directory that is made durable before anything in it is relied on.

    Its existence proves nothing: its creator may have failed or ended before its name was durable. So every
    process that uses it makes the name durable once.
    """

    __slots__ = ("_ensured", "_fs", "_parent", "path")

    def __init__(self, fs: FileSystem, path: str, parent: DurableDirectory | None = None) -> None:
        self._fs = fs
        self._parent = parent
        self._ensured: set[str] = set() if parent is None else parent._ensured
        self.path = path

    def below(self, name: str) -> DurableDirectory:
        """Return a directory inside this one. Both share the record of durable directories."""
        return DurableDirectory(self._fs, os.path.join(self.path, name), self)

    def forget(self) -> None:
        """Forget that the directory is durable, because it will be removed."""
        self._ensured.discard(self.path)

    def ensure(self) -> None:
        """Create the directory durably if needed. May be called again after a failure."""
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


ALL_PARTS: Final = (Part.IDX, Part.DATA, Part.TAGS, Part.DEL)
_STAGED = ".tmp"


class SegmentStore(Protocol):
    """The segments of one topic. A segment is identified by its first sequence number."""

    def put(self, first_seq: int, data: Sequence[Buffer], idx: Buffer) -> None:
        """Store a segment and replace an existing one, durable on return."""
        ...

    def replace(self, first_seq: int, part: Part, content: Buffer) -> None:
        """Replace one file atomically: readers see the old one or the new one. Durable on return."""
        ...

    def read_range(self, first_seq: int, part: Part, offset: int, length: int) -> memoryview:
        """Return exactly these bytes. Raise `NotFound`, or `Damaged` if the file is too short."""
        ...

    def view(self, first_seq: int, part: Part) -> memoryview:
        """Return the whole file. Raise `NotFound`, or `Damaged` if it cannot be read."""
        ...

    def delete(self, first_seq: int, parts: Collection[Part] = ALL_PARTS) -> None:
        """Remove files of a segment. Missing files are ignored."""
        ...

    def exists(self, first_seq: int, part: Part) -> bool: ...

    def size(self, first_seq: int, part: Part) -> int:
        """Return the size of a file. Raise `NotFound`."""
        ...

    def list(self) -> list[int]:
        """Return the segments that have any file, oldest first."""
        ...


def parse_file_name(name: str) -> tuple[int, Part] | None:
    """Return the segment and part of a file name, or None if it is not the name of such a file."""
    stem, _, ending = name.partition(".")
    first_seq = segment_id(stem)
    if first_seq is None or ending not in Part.__members__.values():
        return None
    return first_seq, Part(ending)


def _file_name(first_seq: int, part: Part) -> str:
    return f"{segment_name(first_seq)}.{part.value}"


class LocalSegmentStore:
    """A `SegmentStore` in a directory, which the first segment creates. For one writer."""

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
        """Append to a segment whose files are valid up to these sizes, durable on return.

        Bytes beyond them from a failed attempt are cut off. Raises `Damaged` if a file is shorter.
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
        """Open the file for partial reads. The view outlives the file's name. Raise `NotFound`."""
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
        except Conflict:  # left by a process that ended; there is only one writer, so it is unused
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
    """A `SegmentStore` in a folder of an object store. It blocks, so never call it on an event loop."""

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def put(self, first_seq: int, data: Sequence[Buffer], idx: Buffer) -> None:
        # The index is written last: if it exists, the segment is complete.
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
            raise Unavailable(f"reading {self._key(first_seq, part)} was interrupted; try again")
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


OWNER_FILE: Final = "owner.json"
"""The marker of a tier's owner, beside the folders of the topics."""

_FOLDER: Final = "topics"
_OWNER_LOCK: Final = "owner.lock"
_NAME = re.compile(r"[0-9A-F]{8,16}")


def topic_folder(topic_id: int) -> str:
    """Return the name of a topic's folder, in either tier."""
    return f"{topic_id:08X}"


class SegmentRoot(Protocol):
    """The segments of all topics in one tier."""

    def topic(self, topic_id: int) -> SegmentStore: ...

    def remove_topic(self, topic_id: int) -> None:
        """Remove all files of a topic, if there are any."""
        ...

    def read_marker(self) -> bytes:
        """Read the marker that names the owner of the tier. Raise `NotFound`."""
        ...

    def create_marker(self, content: bytes) -> None:
        """Create the marker, durable on return. Raise `Conflict` if one exists, which is then durable.

        Raises `OutcomeUnknown` if it is unknown whether the marker was written.
        """
        ...

    def close(self) -> None:
        """Release connections. The root must not be used afterwards."""
        ...


class Stored:
    """The segments found by one scan of a directory."""

    def __init__(self) -> None:
        self.topics: defaultdict[int, dict[int, set[Part]]] = defaultdict(dict)
        """By topic id and first sequence number: the parts that exist."""
        self.strays: list[str] = []
        """Paths of files that are not part of a segment, left by interrupted writes."""


class LocalSegmentRoot:
    """A `SegmentRoot` in a local directory."""

    def __init__(self, fs: FileSystem, directory: str) -> None:
        self._fs = fs
        self._made = DurableDirectory(fs, directory).below(_FOLDER)
        self._directory = self._made.path

    def topic(self, topic_id: int) -> LocalSegmentStore:
        return LocalSegmentStore(self._fs, self._made.below(topic_folder(topic_id)))

    def remove_topic(self, topic_id: int) -> None:
        made = self._made.below(topic_folder(topic_id))
        made.forget()
        directory = made.path
        for name, _ in self._fs.list_files(directory):
            with contextlib.suppress(NotFound):
                self._fs.unlink(os.path.join(directory, name))
        with contextlib.suppress(NotFound):
            self._fs.remove_dir(directory)
            self._fs.sync_dir(self._directory)

    def scan(self) -> Stored:
        """List all segments in one walk."""
        found = Stored()
        for path, _ in self._fs.list_files(self._directory):
            folder, _, name = path.partition("/")
            if _NAME.fullmatch(folder) is None or topic_folder(int(folder, 16)) != folder:
                continue
            segments = found.topics[int(folder, 16)]
            place = parse_file_name(name)
            if place is None:
                found.strays.append(os.path.join(self._directory, path))
            else:
                segments.setdefault(place[0], set()).add(place[1])
        return found

    def remove_stray(self, path: str) -> None:
        """Remove a file that `scan` reported as a stray."""
        with contextlib.suppress(NotFound):
            self._fs.unlink(path)

    def read_marker(self) -> bytes:
        return self._fs.read(os.path.join(self._directory, OWNER_FILE))

    def create_marker(self, content: bytes) -> None:
        self._made.ensure()
        path = os.path.join(self._directory, OWNER_FILE)
        # The lock makes the check and the write one step. The file itself is never visible half-written.
        with self._fs.lock(os.path.join(self._directory, _OWNER_LOCK), wait=False):
            try:
                self._fs.stat(path)
            except NotFound:
                write_durably(self._fs, path, [content], staging=self._directory)
                return
            self._fs.sync_dir(self._directory)
        raise Conflict(f"{path} already exists")

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


class ObjectSegmentRoot:
    """A `SegmentRoot` in an object store, which it owns."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def topic(self, topic_id: int) -> ObjectSegmentStore:
        return ObjectSegmentStore(self._store, join_key(_FOLDER, topic_folder(topic_id)))

    def remove_topic(self, topic_id: int) -> None:
        prefix = join_key(_FOLDER, topic_folder(topic_id))
        keys = [info.key for info in loop_thread().run(self._store.list(prefix))]
        for error in loop_thread().run(self._store.delete_many(keys)).values():
            raise error

    def read_marker(self) -> bytes:
        return loop_thread().run(self._store.get(self._owner_key())).data.tobytes()

    def create_marker(self, content: bytes) -> None:
        loop_thread().run(self._store.put_if_absent(self._owner_key(), content))

    def _owner_key(self) -> str:
        return join_key(_FOLDER, OWNER_FILE)

    def close(self) -> None:
        loop_thread().run(self._store.close())


def cold_directory(place: str) -> str | None:
    """Return the local directory of a cold place, however it is written, or None for other stores."""
    address = StoreAddress.parse(place)
    return os.path.abspath(os.path.expanduser(address.path)) if address.scheme == "file" else None


def open_cold_store(place: str, fs: FileSystem) -> SegmentRoot:
    """Return the cold tier at `place`, a directory or a store URL, without contacting it.

    Raise `ConfigError`.
    """
    if StoreAddress.parse(place).scheme == "memory":
        raise ConfigError(
            f"the cold place {place} loses all data when the process ends; "
            "set TOPICS_COLD_DIR (cold_dir) to a directory or an object store"
        )
    if "://" in place:
        return ObjectSegmentRoot(open_store(place))
    return LocalSegmentRoot(fs, os.path.abspath(os.path.expanduser(place)))
