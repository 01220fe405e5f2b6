"""Whose a cold place is: one data directory's, and never that directory itself.

A data directory keeps an id in `meta/owner.json`; a cold place that it uses has the same id in
`topics/owner.json`. The id is durable before the marker is, and the marker before anything is moved. So a
place without a marker holds nothing that is needed, unless it is not the place that it should be.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from typing import Final

import msgspec

from penstock.errors import ConfigError, Conflict, NotFound, OutcomeUnknown, PermissionDenied, Unavailable
from penstock.storage import FileSystem, write_durably
from penstock.topics.data_directory import META
from penstock.topics.errors import Damaged
from penstock.topics.segment_directory import DurableDirectory
from penstock.topics.segment_root import OWNER_FILE, SegmentRoot, cold_directory

__all__ = ["ColdOwner", "check_apart"]

_MOUNTED: Final = "is it mounted, and is TOPICS_COLD_DIR (cold_dir) the one that was used before?"


class _Owner(msgspec.Struct, frozen=True):
    """What a marker says."""

    id: str


_DECODER = msgspec.json.Decoder(_Owner)


def check_apart(data_dir: str, place: str) -> None:
    """Raises `ConfigError` if a cold place is the data directory, in it or around it, by whatever name."""
    cold = cold_directory(place)
    if cold is None:
        return
    data, cold = os.path.realpath(data_dir), os.path.realpath(cold)
    if _is_within(data, cold) or _is_within(cold, data):
        raise ConfigError(
            f"the cold place {place} and the data directory {data_dir} are one, or one is inside the other: "
            "what is moved would be lost; set TOPICS_COLD_DIR (cold_dir) to a directory beside it"
        )


def _is_within(inner: str, outer: str) -> bool:
    """Whether a path is another one or below it; a directory may have more than one name."""
    same = _identity(outer)
    return any(path == outer or (same is not None and _identity(path) == same) for path in _upwards(inner))


def _upwards(path: str) -> Iterator[str]:
    yield path
    while (parent := os.path.dirname(path)) != path:
        yield (path := parent)


def _identity(path: str) -> tuple[int, int] | None:
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_dev, info.st_ino


class ColdOwner:
    """The claim of one data directory on one cold place. Every call blocks."""

    def __init__(self, fs: FileSystem, data_dir: str, root: SegmentRoot, place: str) -> None:
        self._fs = fs
        self._root = root
        self._place = place
        self._meta = DurableDirectory(fs, data_dir).below(META)
        self._id = ""

    def claim(self, *, has_cold: bool) -> None:
        """Make the place this data directory's; on return that is durable.

        Raises `ConfigError` if it is another one's, or has no marker although records are there (`has_cold`).
        """
        if has_cold and self._found() is None:
            raise ConfigError(
                f"the cold place {self._place} has no topics/{OWNER_FILE} although old records are there: "
                + _MOUNTED
            )
        self._id = self._own_id()
        # That it is there already, or may be, is seen by reading it.
        with contextlib.suppress(Conflict, OutcomeUnknown):
            self._root.create_marker(msgspec.json.encode(_Owner(self._id)))
        if self._found() != self._id:
            raise ConfigError(
                f"the cold place {self._place} belongs to another data directory; "
                "give each server a place of its own (TOPICS_COLD_DIR)"
            )

    def check(self) -> None:
        """Raises `Unavailable` unless the place is there and still this data directory's."""
        try:
            found = self._found()
        except PermissionDenied as error:
            raise Unavailable(f"the cold place {self._place} cannot be read: {error}") from error
        if found is None:
            raise Unavailable(f"the cold place {self._place} is not there now: {_MOUNTED}")
        if found != self._id:
            raise Unavailable(f"the cold place {self._place} was taken over by another data directory")

    def _found(self) -> str | None:
        try:
            raw = self._root.read_marker()
        except NotFound:
            return None
        return _decode(raw, f"topics/{OWNER_FILE} in the cold place {self._place}")

    def _own_id(self) -> str:
        """The id of the data directory, durably its own."""
        self._meta.ensure()
        path = os.path.join(self._meta.path, OWNER_FILE)
        try:
            own = _decode(self._fs.read(path), path)
        except NotFound:
            own = uuid.uuid4().hex
            write_durably(self._fs, path, [msgspec.json.encode(_Owner(own))], staging=self._meta.path)
        else:
            # Whoever wrote it may have died before its name was durable.
            self._fs.sync_dir(self._meta.path)
        return own


def _decode(raw: bytes, path: str) -> str:
    try:
        return _DECODER.decode(raw).id
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Damaged(f"{path} cannot be understood: {error}; restore it from a backup") from error
