"""Moving old segments to the cold tier and out of it, and the lock that says whose a cold tier is.

Nothing waits for the moves: checkpoints do not, and an engine that closes does not either. Each step is safe
to be cut off and to be made again:

1. `copy` puts copies of segments that a snapshot names into the cold tier;
2. the next snapshot says that those are cold (`copied`, then `recorded`);
3. `let_go` removes the hot data of the segments that it says so of, and what is dead in both tiers.

A data directory keeps an id in `meta/owner.json`; a cold place that it uses has the same id in
`topics/owner.json`. The id is durable before the marker is, and the marker before anything is moved. So a
place without a marker holds nothing that is needed, unless it is not the place that it should be.
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


class ColdTierLock:
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


_LOGGER = logging.getLogger(__name__)
_RETRY_S: Final = 30.0


class RunCold(Protocol):
    """Runs blocking calls to the cold tier, one after the other."""

    def __call__(self, work: Callable[[], None], /) -> Awaitable[None]: ...


def _has(topic: Topic, entry: SegmentEntry) -> bool:
    """Whether the segment is still one of the topic's."""
    return not topic.deleted and any(one.first_seq == entry.first_seq for one in topic.log.segments)


@dataclass(frozen=True, slots=True)
class _Leaving:
    """The files of one topic that a snapshot no longer refers to."""

    topic: Topic
    dead: tuple[int, ...]
    moved: tuple[SegmentEntry, ...]


class Relocation:
    """The cold side of one engine's maintenance. After a failure the cold tier is left alone for a while."""

    def __init__(self, *, tiers: Tiers, config: EngineConfig, clock: Clock, run: RunCold) -> None:
        self._tiers = tiers
        self._config = config
        self._clock = clock
        self._run = run
        self._copied: dict[tuple[int, int], SegmentEntry] = {}
        self._leaving: deque[_Leaving] = deque()
        self._damaged: set[tuple[int, int]] = set()
        """What cannot be copied as it is; only a start looks at it again."""
        self._unfinished = False
        self._retry_s = clock.monotonic()
        self._turn = asyncio.Lock()
        self._closed = False

    @property
    def copied(self) -> dict[tuple[int, int], SegmentEntry]:
        """By topic id and first sequence number: what is in the cold tier and not yet said to be."""
        return dict(self._copied)

    @property
    def is_free(self) -> bool:
        """Whether nothing is in progress and the cold tier may be used."""
        return not self._turn.locked() and self._may_try()

    @property
    def is_behind(self) -> bool:
        """Whether there is something to record, or to be tried again now."""
        return bool(self._copied) or (self.is_free and bool(self._leaving or self._unfinished))

    def recorded(self, cuts: Iterable[TopicCut]) -> None:
        """A snapshot is durable: the hot data of what it says to be cold may go, and all of what is dead."""
        for cut in cuts:
            for entry in cut.moved:
                self._copied.pop((cut.entry.id, entry.first_seq), None)
            for first_seq in cut.dead:
                self._copied.pop((cut.entry.id, first_seq), None)
            if cut.dead or cut.moved:
                self._leaving.append(_Leaving(cut.topic, tuple(cut.dead), tuple(cut.moved)))

    async def tend(self, topics: Iterable[Topic]) -> None:
        """Let go of what is not needed and copy what should be cold; one at a time. Failures are logged."""
        async with self._turn:
            self._unfinished = not self._may_try()
            await self._let_go()
            for topic in topics:
                await self._copy_topic(topic)

    async def let_go(self) -> None:
        """Remove what the last snapshot does without. Failures are logged, and it is tried again."""
        async with self._turn:
            await self._let_go()

    async def remove_topic(self, topic: Topic) -> None:
        """Remove what a deleted topic has in the cold tier. Raises what the tier raises."""
        await self._run(partial(self._checked, partial(self._tiers.remove_cold, topic.id)))
        for key in [key for key in self._copied if key[0] == topic.id]:
            del self._copied[key]

    def close(self) -> None:
        """Begin nothing any more."""
        self._closed = True

    def _may_try(self) -> bool:
        return not self._closed and self._clock.monotonic() >= self._retry_s

    async def _let_go(self) -> None:
        while self._leaving and self._may_try():
            leaving = self._leaving[0]
            topic = leaving.topic
            try:
                # All of a topic that is gone goes with it.
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
            return []  # with many topics that is true of most
        moving = choose(topic.log.segments, retain_segments=retain, retain_bytes=retain_bytes)
        return [entry for entry in moving if not self._is_known(topic, entry)]

    def _is_known(self, topic: Topic, entry: SegmentEntry) -> bool:
        key = topic.id, entry.first_seq
        return key in self._copied or key in self._damaged

    async def _copy_topic(self, topic: Topic) -> None:
        for entry in self._wanted(topic):
            await self._let_go()
            # It may have died while others were copied; then its files are gone, or going.
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
        """Whether it was done. Raises `Damaged`; after any other failure the cold tier is given a rest."""
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
        """Do it only where the cold tier is: what is not mounted looks like an empty place."""
        self._tiers.check_cold()
        work()
