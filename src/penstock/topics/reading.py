"""The way out: pages from wherever the records are, at once or as soon as there is something to read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.clock import Clock
from penstock.topics.catalog import Catalog
from penstock.topics.diff import ByteRange, DiffRequest, Walk
from penstock.topics.errors import Damaged, TopicNotFound
from penstock.topics.limits import WAIT_MS_MAX
from penstock.topics.model import Page
from penstock.topics.topic import Topic
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

    async def _page(self, topic: Topic, request: DiffRequest) -> Page:
        now_ms = self._clock.now_ms()
        topic.touch(now_ms)
        self._catalog.retain(topic)
        walk = Walk(topic.index, topic.floors, request, now_ms=now_ms, ttl_ms=topic.config.ttl_ms)
        while not walk.done:
            needed = walk.step(topic.view)
            if needed is not None:
                walk.supply(await self._fetch(topic, needed))
        return walk.page(topic.name)

    async def _fetch(self, topic: Topic, needed: ByteRange) -> memoryview:
        """The bytes of a cold segment; none if they are gone: the walk tells of the records it needs."""
        segment = topic.segment_of(needed.run)
        try:
            return await self._workers.fetch(lambda: segment.read_bytes(needed.start, needed.stop))
        except Damaged:
            if topic.gone:
                raise TopicNotFound(topic.name) from None
            return memoryview(b"")
