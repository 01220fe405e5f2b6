"""Read-only access to segments, in a data directory that another process may own or as uploaded copies.

Reading changes nothing and takes no lock. A segment may be removed between listing and reading, which raises
`NotFound`. The checksum of a segment is verified before any of its data is used.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from penstock.blocking import loop_thread
from penstock.errors import Corrupt, MediaError, NotFound
from penstock.objects import ObjectStore, join_key, open_store
from penstock.quiver.model import SegmentInfo
from penstock.quiver.segments.file import SegmentReader, check_bytes
from penstock.quiver.segments.metadata import arrow_name, decode_meta, meta_name, seq_of
from penstock.storage import FileSystem, OsFileSystem

_SIDECAR: Final = re.compile(r"core_(0|[1-9][0-9]*)/segments/([^/]+\.meta\.json)")


class SegmentSource(Protocol):
    """The committed segments of all cores of one data directory."""

    @property
    def damaged(self) -> dict[str, Corrupt]:
        """Sidecars that could not be read at the last listing, by name."""
        ...

    def infos(self) -> list[SegmentInfo]:
        """Return every existing segment, ordered by core and number, without damaged ones."""
        ...

    def reader(self, info: SegmentInfo) -> SegmentReader:
        """Open a segment. Raise `NotFound` if it is gone, or `Corrupt` if its bytes have changed."""
        ...


def core_directory(path: str, core_id: int) -> str:
    """Return the directory of one core in a data directory."""
    return os.path.join(path, f"core_{core_id}")


def segment_key(prefix: str, core_id: int, name: str) -> str:
    """Return the key of an uploaded file: the same name as on disk, below `prefix`."""
    place = f"core_{core_id}/segments/{name}"
    return join_key(prefix, place) if prefix else place


def is_store_url(place: str) -> bool:
    """Return whether `place` is the address of a store rather than a directory."""
    return "://" in place


def open_source(place: str) -> SegmentSource:
    """Open the segments at `place`: a data directory, or the address of a store with uploaded segments.

    The address names the folder that contains the `core_…` folders. Raise `ConfigError` for an invalid
    address.
    """
    return StoredSegments(open_store(place)) if is_store_url(place) else LocalSegments(place)


class _Sidecars:
    """A cache of sidecars by name. A sidecar never changes, so each is read once."""

    def __init__(self) -> None:
        self._known: dict[str, SegmentInfo] = {}
        self.damaged: dict[str, Corrupt] = {}

    def unread(self, names: Iterable[str]) -> list[str]:
        """Return the names that still have to be read. Forget sidecars that are no longer listed."""
        present = {name for name in names if _is_sidecar(name)}
        self._known = {name: info for name, info in self._known.items() if name in present}
        self.damaged = {}
        return sorted(present - self._known.keys())

    def add(self, name: str, data: bytes) -> None:
        try:
            info = decode_meta(data, name)
            if name != f"core_{info.core_id}/segments/{meta_name(info.seq)}":
                raise Corrupt(f"{name} describes segment {info.seq} of core {info.core_id}")
            self._known[name] = info
        except Corrupt as error:
            self.damaged[name] = error

    def infos(self) -> list[SegmentInfo]:
        return sorted(self._known.values(), key=lambda info: (info.core_id, info.seq))


def _settled(sidecars: _Sidecars, read: Callable[[], None]) -> list[SegmentInfo]:
    """List the segments, without skipping one that was committed before another one in the list.

    1. A listing passes the place of segment 7 before it exists.
    2. Segments 7 and 8 are committed, and the listing continues and finds 8.
    3. A reader that goes by numbers would take 7 for removed. A second listing that starts after the first
       has ended finds 7. Segments beyond 8 are left for the next call: they may have the same problem.
    """
    read()
    found = sidecars.infos()
    if not _has_holes(found):
        return found
    highest: dict[int, int] = {info.core_id: info.seq for info in found}
    read()
    return [info for info in sidecars.infos() if info.seq <= highest.get(info.core_id, 0)]


def _has_holes(infos: Sequence[SegmentInfo]) -> bool:
    return any(
        one.core_id == two.core_id and two.seq != one.seq + 1 for one, two in itertools.pairwise(infos)
    )


def _is_sidecar(name: str) -> bool:
    found = _SIDECAR.fullmatch(name)
    return found is not None and seq_of(found[2]) is not None


class LocalSegments:
    """The segments below a directory. Each file is read completely."""

    def __init__(self, path: str, fs: FileSystem | None = None) -> None:
        self._path = os.path.abspath(path)
        self._fs = fs or OsFileSystem()
        self._sidecars = _Sidecars()

    @property
    def damaged(self) -> dict[str, Corrupt]:
        return self._sidecars.damaged

    def infos(self) -> list[SegmentInfo]:
        return _settled(self._sidecars, self._read)

    def _read(self) -> None:
        names = [name for name, _ in self._fs.list_files(self._path)]
        for name in self._sidecars.unread(names):
            try:
                self._sidecars.add(name, self._fs.read(os.path.join(self._path, name)))
            except NotFound:
                continue
            except MediaError as error:
                self._sidecars.damaged[name] = error

    def path(self, info: SegmentInfo) -> str:
        """Return the path of a segment's Arrow file."""
        return os.path.join(core_directory(self._path, info.core_id), "segments", arrow_name(info.seq))

    def reader(self, info: SegmentInfo) -> SegmentReader:
        path = self.path(info)
        view = self._fs.read(path)
        check_bytes(view, info, path)
        return SegmentReader(view, path)


class StoredSegments:
    """Uploaded segments in an object store. Each object is fetched completely."""

    def __init__(self, store: ObjectStore, prefix: str = "") -> None:
        self._store = store
        self._prefix = prefix
        self._sidecars = _Sidecars()

    @property
    def damaged(self) -> dict[str, Corrupt]:
        return self._sidecars.damaged

    def infos(self) -> list[SegmentInfo]:
        return _settled(self._sidecars, self._read)

    def _read(self) -> None:
        listed = loop_thread().run(self._store.list(self._prefix))
        keys = {found.key.removeprefix(self._prefix).lstrip("/"): found.key for found in listed}
        for name in self._sidecars.unread(keys):
            try:
                self._sidecars.add(name, bytes(loop_thread().run(self._store.get(keys[name])).data))
            except NotFound:
                continue

    def reader(self, info: SegmentInfo) -> SegmentReader:
        key = segment_key(self._prefix, info.core_id, arrow_name(info.seq))
        view = loop_thread().run(self._store.get(key)).data
        check_bytes(view, info, key)
        return SegmentReader(view, key)
