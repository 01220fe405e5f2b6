"""The cold tier: moving segments to it and removing them, and the lock that records its owner.

Checkpoints and the close of an engine do not wait for the moves. Each step can be interrupted and repeated:

1. `copy` copies segments that a snapshot names to the cold tier;
2. the next snapshot marks those segments as cold (`copied`, then `recorded`);
3. `drop_unneeded` removes the hot data of cold segments, and dead segments in both tiers.

A data directory keeps an id in `meta/owner.json`. Its cold place has the same id in `topics/owner.json`. The
id is durable before the marker is written, and the marker is durable before anything is moved. So a place
without a marker contains nothing that is needed, or it is the wrong place.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import msgspec

from penstock.clock import Clock
from penstock.errors import (
    ConfigError,
    Conflict,
    NotFound,
    OutcomeUnknown,
    PenstockError,
    PermissionDenied,
    Unavailable,
)
from penstock.storage import FileSystem, write_durably
from penstock.topics.checkpoints.checkpoint import TopicCut
from penstock.topics.checkpoints.layout import META
from penstock.topics.config import EngineConfig
from penstock.topics.errors import Damaged
from penstock.topics.segments.format import SegmentEntry
from penstock.topics.segments.store import OWNER_FILE, DurableDirectory, SegmentRoot, cold_directory
from penstock.topics.segments.tiering import Tiers, choose
from penstock.topics.topic.topic import Topic

_MOUNTED: Final = "is it mounted, and is TOPICS_COLD_DIR (cold_dir) the one that was used before?"


class _Owner(msgspec.Struct, frozen=True):
    """The content of a marker."""

    id: str


_DECODER = msgspec.json.Decoder(_Owner)


def check_apart(data_dir: str, place: str) -> None:
    """Raise `ConfigError` if a cold place is the data directory, inside it or around it, under any name."""
    cold = cold_directory(place)
    if cold is None:
        return
    data, cold = os.path.realpath(data_dir), os.path.realpath(cold)
    if _is_within(data, cold) or _is_within(cold, data):
        raise ConfigError(
            f"the cold place {place} and the data directory {data_dir} are one, or one is inside the other: "
            "moved segments would be lost; set TOPICS_COLD_DIR (cold_dir) to a directory beside it"
        )


def _is_within(inner: str, outer: str) -> bool:
    """Return whether a path is another path or below it. A directory may have more than one name."""
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


class ColdTierLock:
    """The claim of one data directory on one cold place. Every call blocks."""

    def __init__(self, fs: FileSystem, data_dir: str, root: SegmentRoot, place: str) -> None:
        self._fs = fs
        self._root = root
        self._place = place
        self._meta = DurableDirectory(fs, data_dir).below(META)
        self._id = ""

    def claim(self, *, has_cold: bool) -> None:
        """Claim the place for this data directory, durably.

        Raises `ConfigError` if it belongs to another one, or has no marker although it should hold records
        (`has_cold`).
        """
        if has_cold and self._found() is None:
            raise ConfigError(
                f"the cold place {self._place} has no topics/{OWNER_FILE} although old records are there: "
                + _MOUNTED
            )
        self._id = self._own_id()
        # The marker may already exist, or its outcome may be unknown. The read below decides.
        with contextlib.suppress(Conflict, OutcomeUnknown):
            self._root.create_marker(msgspec.json.encode(_Owner(self._id)))
        if self._found() != self._id:
            raise ConfigError(
                f"the cold place {self._place} belongs to another data directory; "
                "give each server a place of its owner_id (TOPICS_COLD_DIR)"
            )

    def check(self) -> None:
        """Raise `Unavailable` unless the place exists and still belongs to this data directory."""
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
        """Return the id of the data directory, after making it durable."""
        self._meta.ensure()
        path = os.path.join(self._meta.path, OWNER_FILE)
        try:
            owner_id = _decode(self._fs.read(path), path)
        except NotFound:
            owner_id = uuid.uuid4().hex
            write_durably(self._fs, path, [msgspec.json.encode(_Owner(owner_id))], staging=self._meta.path)
        else:
            # The process that wrote it may have ended before the file's name was durable.
            self._fs.sync_dir(self._meta.path)
        return owner_id


def _decode(raw: bytes, path: str) -> str:
    try:
        return _DECODER.decode(raw).id
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Damaged(f"{path} cannot be understood: {error}; restore it from a backup") from error


_LOGGER = logging.getLogger(__name__)
_RETRY_S: Final = 30.0


class RunCold(Protocol):
    """Run blocking calls to the cold tier, one after the other."""

    def __call__(self, work: Callable[[], None], /) -> Awaitable[None]: ...


def _has(topic: Topic, entry: SegmentEntry) -> bool:
    """Return whether the segment still belongs to the topic."""
    return not topic.deleted and any(one.first_seq == entry.first_seq for one in topic.log.segments)


@dataclass(frozen=True, slots=True)
class _Leaving:
    """The files of one topic that a snapshot no longer refers to."""

    topic: Topic
    dead: tuple[int, ...]
    moved: tuple[SegmentEntry, ...]


class Relocation:
    """The moves to and from the cold tier of one engine. After a failure it pauses for a while."""

    def __init__(self, *, tiers: Tiers, config: EngineConfig, clock: Clock, run: RunCold) -> None:
        self._tiers = tiers
        self._config = config
        self._clock = clock
        self._run = run
        self._copied: dict[tuple[int, int], SegmentEntry] = {}
        self._leaving: deque[_Leaving] = deque()
        self._damaged: set[tuple[int, int]] = set()
        """Segments that cannot be copied because they are damaged. Only a restart tries them again."""
        self._unfinished = False
        self._retry_s = clock.monotonic()
        self._turn = asyncio.Lock()
        self._closed = False

    @property
    def copied(self) -> dict[tuple[int, int], SegmentEntry]:
        """By topic id and first sequence number: the copied segments that no snapshot has recorded yet."""
        return dict(self._copied)

    @property
    def is_free(self) -> bool:
        """Return whether no move is in progress and the cold tier may be used."""
        return not self._turn.locked() and self._may_try()

    @property
    def is_behind(self) -> bool:
        """Return whether there is a copy to record, or work that can be retried now."""
        return bool(self._copied) or (self.is_free and bool(self._leaving or self._unfinished))

    def recorded(self, cuts: Iterable[TopicCut]) -> None:
        """Schedule the removal of hot data and dead segments after a snapshot has become durable."""
        for cut in cuts:
            for entry in cut.moved:
                self._copied.pop((cut.entry.id, entry.first_seq), None)
            for first_seq in cut.dead:
                self._copied.pop((cut.entry.id, first_seq), None)
            if cut.dead or cut.moved:
                self._leaving.append(_Leaving(cut.topic, tuple(cut.dead), tuple(cut.moved)))

    async def tend(self, topics: Iterable[Topic]) -> None:
        """Remove unneeded files and copy segments that should be cold.

        Calls run one at a time; failures are logged.
        """
        async with self._turn:
            self._unfinished = not self._may_try()
            await self._drop_unneeded()
            for topic in topics:
                await self._copy_topic(topic)

    async def drop_unneeded(self) -> None:
        """Remove files that the last snapshot no longer needs. Failures are logged and retried later."""
        async with self._turn:
            await self._drop_unneeded()

    async def remove_topic(self, topic: Topic) -> None:
        """Remove the files of a deleted topic in the cold tier. Raise the errors of the tier."""
        await self._run(partial(self._checked, partial(self._tiers.remove_cold, topic.id)))
        for key in [key for key in self._copied if key[0] == topic.id]:
            del self._copied[key]

    def close(self) -> None:
        """Stop accepting new work."""
        self._closed = True

    def _may_try(self) -> bool:
        return not self._closed and self._clock.monotonic() >= self._retry_s

    async def _drop_unneeded(self) -> None:
        while self._leaving and self._may_try():
            leaving = self._leaving[0]
            topic = leaving.topic
            try:
                # The files of a deleted topic are removed with the topic.
                if topic.deleted or await self._attempt(topic, partial(self._remove, leaving)):
                    self._leaving.popleft()
            except Damaged as error:
                self._leaving.popleft()
                _LOGGER.warning('topic "%s": left for the next start to remove: %s', topic.name, error)

    def _remove(self, leaving: _Leaving) -> None:
        tier = self._tiers.topic(leaving.topic.id)
        for first_seq in leaving.dead:
            tier.delete(first_seq)
        for entry in leaving.moved:
            tier.drop_hot(entry)

    def _wanted(self, topic: Topic) -> list[SegmentEntry]:
        retain, retain_bytes = self._config.hot_retain_segments, self._config.hot_retain_bytes
        if len(topic.log.segments) <= retain and not retain_bytes:
            return []  # with many topics, this holds for most of them
        moving = choose(topic.log.segments, retain_segments=retain, retain_bytes=retain_bytes)
        return [entry for entry in moving if not self._is_known(topic, entry)]

    def _is_known(self, topic: Topic, entry: SegmentEntry) -> bool:
        key = topic.id, entry.first_seq
        return key in self._copied or key in self._damaged

    async def _copy_topic(self, topic: Topic) -> None:
        for entry in self._wanted(topic):
            await self._drop_unneeded()
            # The segment may have died while others were copied. Its files may then be gone.
            if topic.deleted or not self._may_try() or entry not in topic.log.segments:
                continue
            key = topic.id, entry.first_seq
            try:
                if await self._attempt(topic, partial(self._copy, topic.id, entry)) and _has(topic, entry):
                    self._copied[key] = entry
            except Damaged as error:
                self._damaged.add(key)
                _LOGGER.warning('topic "%s" stays hot: %s', topic.name, error)

    def _copy(self, topic_id: int, entry: SegmentEntry) -> None:
        self._tiers.topic(topic_id).relocate(entry)

    async def _attempt(self, topic: Topic, work: Callable[[], None]) -> bool:
        """Return whether the work was done. Raise `Damaged`; any other failure pauses the cold tier."""
        try:
            await self._run(partial(self._checked, work))
        except Damaged:
            raise
        except PenstockError as error:
            _LOGGER.warning('the cold tier, topic "%s": %s; trying again later', topic.name, error)
        except Exception:
            _LOGGER.exception('the cold tier, topic "%s"', topic.name)
        else:
            return True
        self._unfinished = True
        self._retry_s = self._clock.monotonic() + _RETRY_S
        return False

    def _checked(self, work: Callable[[], None]) -> None:
        """Run the work only if the cold tier is present: an unmounted directory looks empty."""
        self._tiers.check_cold()
        work()
