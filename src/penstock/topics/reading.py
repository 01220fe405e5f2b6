"""The way out: pages from wherever the records are, at once or as soon as there is something to read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.clock import Clock
from penstock.topics.diff import ByteRange, DiffRequest, Walk
from penstock.topics.errors import Damaged, TopicNotFound
from penstock.topics.limits import WAIT_MS_MAX
from penstock.topics.model import Page
from penstock.topics.segments.reader import Segment
from penstock.topics.topic.catalog import Catalog
from penstock.topics.topic.topic import Topic
from penstock.topics.workers import Workers

__all__ = ["Reader"]


class Reader:
    """Reads from the topics of a catalog. `check` raises when the engine answers nothing."""

    def __init__(self, catalog: Catalog, clock: Clock, workers: Workers, check: Callable[[], None]) -> None:
        self._catalog = catalog
        self._clock = clock
        self._workers = workers
        self._check = check

    async def read(self, topic: Topic, request: DiffRequest, *, wait_ms: int) -> Page:
        """See `Engine.diff`."""
        if not wait_ms:
            return await self._page(topic, request)
        with topic.waiters.register() as published:
            page = await self._page(topic, request)
            if page.fragments or page.tombstone is not None or not page.caught_up:
                return page
            if not await self._wait(published, min(wait_ms, WAIT_MS_MAX)):
                return page
        self._check()
        if topic.gone:
            raise TopicNotFound(topic.name)
        return await self._page(topic, request)

    async def _wait(self, published: asyncio.Future[None], wait_ms: int) -> bool:
        """Whether something was published before the time was over."""
        timer = asyncio.ensure_future(self._clock.sleep(wait_ms / 1000))
        try:
            await asyncio.wait([published, timer], return_when=asyncio.FIRST_COMPLETED)
            return published.done()
        finally:
            timer.cancel()

    def page_at_hand(self, topic: Topic, request: DiffRequest) -> Page | None:
        """A page without waiting; None if some of its bytes would have to be fetched. Raises `Damaged`."""
        walk = self._walk(topic, request)
        while not walk.done:
            if walk.step(topic.view) is not None:
                return None
        return walk.page(topic.name)

    def _walk(self, topic: Topic, request: DiffRequest) -> Walk:
        now_ms = self._clock.now_ms()
        topic.touch(now_ms)
        self._catalog.retain(topic)
        return Walk(
            topic.index,
            topic.floors,
            request,
            now_ms=topic.ages.now_ms(topic.steady_ms(now_ms)),
            ttl_ms=topic.config.ttl_ms,
            trims=topic.trims,
        )

    async def _page(self, topic: Topic, request: DiffRequest) -> Page:
        walk = self._walk(topic, request)
        while not walk.done:
            needed = walk.step(topic.view)
            if needed is not None:
                await self._supply(walk, topic, needed)
        return walk.page(topic.name)

    async def _supply(self, walk: Walk, topic: Topic, needed: ByteRange) -> None:
        """Hand the walk the bytes of a cold segment. Raises `Unavailable` when its tier does not answer.

        If the bytes are gone the walk gets none: they may not be needed any more. Raises `Damaged`, with why
        they are gone, if they are.
        """
        segment = topic.segment_of(needed.run)
        try:
            data = await self._workers.fetch(lambda: segment.read_bytes(needed.start, needed.stop))
        except Damaged as error:
            if topic.gone:
                raise TopicNotFound(topic.name) from None
            self._supply_nothing(walk, topic, segment, error)
        else:
            walk.supply(data)

    def _supply_nothing(self, walk: Walk, topic: Topic, segment: Segment, cause: Damaged) -> None:
        try:
            walk.supply(memoryview(b""))
        except Damaged:
            first, last = segment.first_seq, segment.entry.end_seq - 1
            raise Damaged(
                f'records {first} to {last} of topic "{topic.name}" cannot be read: {cause}',
                {"topic": topic.name, "first_seq": first, "last_seq": last},
            ) from cause
