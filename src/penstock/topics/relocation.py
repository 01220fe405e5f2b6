"""Old segments on their way to the cold tier, and out of it, at the pace of the cold tier.

Nothing that has to go on waits for it: checkpoints do not, and an engine that closes does not either. Each
step is safe to be cut off and to be made again:

1. `copy` puts copies of segments that a snapshot names into the cold tier;
2. the next snapshot says that those are cold (`copied`, then `recorded`);
3. `let_go` removes the hot data of the segments that it says so of, and what is dead in both tiers.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from penstock.clock import Clock
from penstock.errors import PenstockError
from penstock.topics.checkpoint import TopicCut
from penstock.topics.config import EngineConfig
from penstock.topics.errors import Damaged
from penstock.topics.segment import SegmentEntry
from penstock.topics.tier import Tiers, choose
from penstock.topics.topic import Topic

__all__ = ["Relocation", "RunCold"]

_LOGGER = logging.getLogger(__name__)
_RETRY_S: Final = 30.0


class RunCold(Protocol):
    """Runs blocking calls to the cold tier, one after the other."""

    def __call__(self, work: Callable[[], None], /) -> Awaitable[None]: ...


def _has(topic: Topic, entry: SegmentEntry) -> bool:
    """Whether the segment is still one of the topic's."""
    return not topic.gone and any(one.first_seq == entry.first_seq for one in topic.segments)


@dataclass(frozen=True, slots=True)
class _Leaving:
    """What a snapshot does without, of one topic."""

    topic: Topic
    dead: tuple[int, ...]
    moved: tuple[SegmentEntry, ...]


class Relocation:
    """The cold side of one engine's upkeep. After a failure the cold tier is left alone for a while."""

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
        """Whether nothing goes on, and something may."""
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
        """Remove what a topic that is durably gone has in the cold tier. Raises what the tier raises."""
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
                if topic.gone or await self._attempt(topic, partial(self._remove, leaving)):
                    self._leaving.popleft()
            except Damaged as error:
                self._leaving.popleft()
                _LOGGER.warning('topic "%s": left behind for the next start: %s', topic.name, error)

    def _remove(self, leaving: _Leaving) -> None:
        tier = self._tiers.topic(leaving.topic.id)
        for first_seq in leaving.dead:
            tier.delete(first_seq)
        for entry in leaving.moved:
            tier.drop_hot(entry)

    def _wanted(self, topic: Topic) -> list[SegmentEntry]:
        retain, retain_bytes = self._config.hot_retain_segments, self._config.hot_retain_bytes
        if len(topic.segments) <= retain and not retain_bytes:
            return []  # with many topics that is true of most
        moving = choose(topic.segments, retain_segments=retain, retain_bytes=retain_bytes)
        return [entry for entry in moving if not self._is_known(topic, entry)]

    def _is_known(self, topic: Topic, entry: SegmentEntry) -> bool:
        key = topic.id, entry.first_seq
        return key in self._copied or key in self._damaged

    async def _copy_topic(self, topic: Topic) -> None:
        for entry in self._wanted(topic):
            await self._let_go()
            # It may have died while others were copied; then its files are gone, or going.
            if topic.gone or not self._may_try() or entry not in topic.segments:
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
