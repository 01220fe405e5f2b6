"""Looking at the topics server through its own API, without leaving a trace in any topic's priority."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from penstock.clock import Clock
from penstock.errors import Unavailable
from penstock.server.console.rates import Meter
from penstock.server.console.seam import TopicsPlace
from penstock.topics.client import Client, RouterSummary, TopicSummary
from penstock.topics.config import TopicConfig
from penstock.topics.errors import TopicNotFound
from penstock.topics.model import Page, Tombstone, TopicState
from penstock.topics.router import RouterConfig

__all__ = ["RouterView", "TopicsReading", "TopicsSource"]

V = TypeVar("V")

_TIMEOUT_S: Final = 3.0
_CONFIG_KEPT_S: Final = 60.0
_KEPT_MAX: Final = 20_000
_AT_ONCE: Final = 8
_SCANNED_MAX: Final = 1000
_SCANNED_BYTES: Final = 1 << 20
_ROUTERS_MAX: Final = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicsReading:
    """The server at one moment."""

    topics: int
    records_live: int
    bytes_live: int
    frames: int
    """Of its log: one for each record, and for each change of a topic."""
    bytes_written: int
    leases: int
    states: Mapping[str, TopicState]
    """Of the topics that were asked for, as far as they exist."""
    oldest_ms: Mapping[str, int]
    """Of those that a relay is behind in: when the first record it has not relayed came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterView:
    """A router, with its config if it could be asked for."""

    summary: RouterSummary
    config: RouterConfig | None


class _Remembered(OrderedDict[str, V]):
    """The last so many values by name."""

    def keep(self, name: str, value: V) -> V:
        self[name] = value
        while len(self) > _KEPT_MAX:
            self.popitem(last=False)
        return value


class TopicsSource:
    """The topics server of the plan. Its address may change when it is started again."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._place: TopicsPlace | None = None
        self._client: Client | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._configs: _Remembered[tuple[float, TopicConfig]] = _Remembered()
        self._routers: _Remembered[tuple[float, RouterConfig]] = _Remembered()
        self._meters: _Remembered[Meter] = _Remembered()
        self.relayed: Mapping[str, int | None] = {}
        """Topics that are relayed, and how far."""

    def move(self, place: TopicsPlace | None) -> None:
        """Where the server is from now on."""
        if place == self._place:
            return
        self._place = place
        self._drop()
        if place is not None and place.url is not None:
            self._client = Client(place.url, key=place.key, timeout=_TIMEOUT_S, retry_deadline=0)

    def _drop(self) -> None:
        if self._client is not None:
            closing = asyncio.get_running_loop().create_task(self._client.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            self._client = None

    async def close(self) -> None:
        self._drop()
        await asyncio.gather(*self._closing)

    @property
    def client(self) -> Client:
        """Raises `Unavailable` while the server has no address."""
        if self._client is None:
            raise Unavailable("the topics server is not running, or has no address yet")
        return self._client

    async def look(self) -> TopicsReading:
        """The server's numbers, and the topics that are relayed."""
        client = self.client
        numbers, *found = await asyncio.gather(
            client.metrics(), *(self._state(topic) for topic in self.relayed)
        )
        states = {state.topic: state for state in found if isinstance(state, TopicState)}
        behind = {
            topic: position or 0
            for topic, position in self.relayed.items()
            if topic in states and (position or 0) < states[topic].head_seq
        }
        ages = await asyncio.gather(*(self._first_ms(topic, seq) for topic, seq in behind.items()))
        assert isinstance(numbers, dict)
        wal = numbers.get("wal")
        wal = wal if isinstance(wal, dict) else {}
        return TopicsReading(
            topics=_number(numbers.get("topics")),
            records_live=_number(numbers.get("records_live")),
            bytes_live=_number(numbers.get("bytes_live")),
            frames=_number(wal.get("frames")),
            bytes_written=_number(wal.get("bytes_written")),
            leases=_number(numbers.get("queue_leases_in_flight")),
            states=states,
            oldest_ms={topic: ms for topic, ms in zip(behind, ages, strict=True) if ms is not None},
        )

    async def _state(self, topic: str) -> TopicState | None:
        try:
            return await self.client.state(topic, touch=False)
        except TopicNotFound:
            return None

    async def _first_ms(self, topic: str, after: int) -> int | None:
        try:
            page = await self.client.diff(topic, after, limit=1, include_meta=False)
        except TopicNotFound:
            return None
        records = page.records()
        return records[0].ts_ms if records else None

    # --- lists ---------------------------------------------------------------------------------------------

    async def page(
        self, prefix: str, cursor: str, limit: int, *, has_configs: bool = True
    ) -> tuple[list[tuple[TopicSummary, TopicConfig | None, float | None]], str | None]:
        """Topics by name, each with its config and how fast it grows, and where the next page begins.

        A config is a call of its own to the server: without them a long list is quick.
        """
        found, following = await self.client.topics_page(prefix, cursor, page_size=limit)
        now = self._clock.monotonic()
        rates: list[float | None] = []
        for summary in found:
            meter = self._meters.get(summary.topic) or self._meters.keep(summary.topic, Meter())
            meter.read(now, summary.head_seq)
            rates.append(meter.rate)
        configs: Sequence[TopicConfig | None] = [None] * len(found)
        if has_configs:
            configs = await self._configs_of([summary.topic for summary in found])
        return list(zip(found, configs, rates, strict=True)), following

    async def _configs_of(self, topics: Sequence[str]) -> list[TopicConfig | None]:
        limit = asyncio.Semaphore(_AT_ONCE)
        now = self._clock.monotonic()

        async def one(topic: str) -> TopicConfig | None:
            known = self._configs.get(topic)
            if known is not None and now - known[0] < _CONFIG_KEPT_S:
                return known[1]
            async with limit:
                state = await self._state(topic)
            return None if state is None else self._configs.keep(topic, (now, state.config))[1]

        return await asyncio.gather(*(one(topic) for topic in topics))

    async def state(self, topic: str) -> TopicState:
        """One topic now. Raises `TopicNotFound`."""
        return await self.client.state(topic, touch=False)

    async def scan(self, state: TopicState) -> tuple[Tombstone | None, list[int], int | None]:
        """What a reader from the beginning is told, and the last live sequences if there are holes."""
        first = await self.client.diff(state.topic, 0, limit=1, include_meta=False, max_batch_bytes=1)
        span = state.head_seq - state.earliest_seq + 1
        if not state.count or span == state.count:
            return first.tombstone, [], None
        start = max(state.earliest_seq, state.head_seq - _SCANNED_MAX + 1)
        page = await self.client.diff(
            state.topic, start - 1, limit=_SCANNED_MAX, include_meta=False, max_batch_bytes=_SCANNED_BYTES
        )
        if page.next_from_seq < state.head_seq:  # too large to be looked at one by one
            return first.tombstone, [], None
        return first.tombstone, [record.seq for record in page.records()], start

    async def newest(self, topic: str, limit: int) -> Page:
        """The last records of a topic. Raises `TopicNotFound`."""
        state = await self.state(topic)
        after = max(0, state.head_seq - limit)
        return await self.client.diff(
            topic, after, limit=limit, include_tags=True, max_batch_bytes=_SCANNED_BYTES
        )

    async def routers(self) -> list[RouterView]:
        """Every router. Its config is asked for now and then: that makes it copy what there is."""
        found: list[RouterSummary] = []
        async for summary in self.client.routers():
            found.append(summary)
            if len(found) == _ROUTERS_MAX:
                break
        limit = asyncio.Semaphore(_AT_ONCE)

        async def one(summary: RouterSummary) -> RouterView:
            known = self._routers.get(summary.router)
            now = self._clock.monotonic()
            if known is None or now - known[0] >= _CONFIG_KEPT_S:
                async with limit:
                    state = await self.client.router(summary.router)
                known = self._routers.keep(summary.router, (now, state.config))
            return RouterView(summary=summary, config=known[1])

        return list(await asyncio.gather(*(one(summary) for summary in found)))


def _number(value: object) -> int:
    return int(value) if isinstance(value, int | float) else 0
