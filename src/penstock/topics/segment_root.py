"""One tier for all topics: a folder per topic, named by its number."""

from __future__ import annotations

import contextlib
import os
import re
from collections import defaultdict
from typing import Final, Protocol

from penstock.blocking import loop_thread
from penstock.errors import ConfigError, Conflict, NotFound
from penstock.objects import ObjectStore, StoreAddress, join_key, open_store
from penstock.storage import FileSystem, write_durably
from penstock.topics.segment import Part
from penstock.topics.segment_directory import DurableDirectory
from penstock.topics.segment_store import LocalSegmentStore, ObjectSegmentStore, SegmentStore, parse_file_name

__all__ = [
    "OWNER_FILE",
    "LocalSegmentRoot",
    "ObjectSegmentRoot",
    "SegmentRoot",
    "Stored",
    "cold_directory",
    "open_cold_store",
    "topic_folder",
]

OWNER_FILE: Final = "owner.json"
"""What tells whose a tier is, beside the folders of the topics."""

_FOLDER: Final = "topics"
_OWNER_LOCK: Final = "owner.lock"
_NAME = re.compile(r"[0-9A-F]{8,16}")


def topic_folder(topic_id: int) -> str:
    """What a topic's folder is called, in either tier."""
    return f"{topic_id:08X}"


class SegmentRoot(Protocol):
    """The segments of all topics in one tier."""

    def topic(self, topic_id: int) -> SegmentStore: ...

    def remove_topic(self, topic_id: int) -> None:
        """Remove everything a topic has here; nothing there is fine."""
        ...

    def read_marker(self) -> bytes:
        """What tells whose the tier is. Raises `NotFound`."""
        ...

    def create_marker(self, content: bytes) -> None:
        """Put it there; durable on return. Raises `Conflict` if there is one, which then is durable.

        Raises `OutcomeUnknown` if it cannot be told.
        """
        ...

    def close(self) -> None:
        """Release connections; not to be used afterwards."""
        ...


class Stored:
    """What one walk over a directory of segments found."""

    def __init__(self) -> None:
        self.topics: defaultdict[int, dict[int, set[Part]]] = defaultdict(dict)
        """By topic id and first sequence number, the parts there are."""
        self.strays: list[str] = []
        """Paths of files that are no part of a segment: what was being written when the power went."""


class LocalSegmentRoot:
    """A `SegmentRoot` in a directory of this machine."""

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
        """Everything that is here, in one walk."""
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
        """Remove a file that `scan` found to be no part of a segment."""
        with contextlib.suppress(NotFound):
            self._fs.unlink(path)

    def read_marker(self) -> bytes:
        return self._fs.read(os.path.join(self._directory, OWNER_FILE))

    def create_marker(self, content: bytes) -> None:
        self._made.ensure()
        path = os.path.join(self._directory, OWNER_FILE)
        # The lock makes looking and writing one step; the file itself is never seen half written.
        with self._fs.lock(os.path.join(self._directory, _OWNER_LOCK), wait=False):
            try:
                self._fs.stat(path)
            except NotFound:
                write_durably(self._fs, path, [content], staging=self._directory)
                return
            self._fs.sync_dir(self._directory)
        raise Conflict(f"{path} is there already")

    def close(self) -> None:
        """Nothing is held."""


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
    """The directory of this machine that a cold place is, however it is written; None for other stores."""
    address = StoreAddress.parse(place)
    return os.path.abspath(os.path.expanduser(address.path)) if address.scheme == "file" else None


def open_cold_store(place: str, fs: FileSystem) -> SegmentRoot:
    """The cold tier at `place`: a directory, or a store's url. Nothing is contacted. Raises `ConfigError`."""
    if StoreAddress.parse(place).scheme == "memory":
        raise ConfigError(
            f"the cold place {place} forgets everything with the process; "
            "set TOPICS_COLD_DIR (cold_dir) to a directory or an object store"
        )
    if "://" in place:
        return ObjectSegmentRoot(open_store(place))
    return LocalSegmentRoot(fs, os.path.abspath(os.path.expanduser(place)))
