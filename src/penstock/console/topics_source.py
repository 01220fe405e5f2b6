"""Reads the topics server through its API, without affecting the priority of topics."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar
from urllib.parse import quote, urlencode

import httpx

from penstock.clock import Clock
from penstock.console.http_poller import HttpPoller
from penstock.console.poller import Meter
from penstock.errors import Unavailable
from penstock.topics import (
    Client,
    Page,
    RouterConfig,
    RouterSummary,
    Tombstone,
    TopicConfig,
    TopicNotFound,
    TopicState,
    TopicSummary,
    check_topic_name,
    failure_of_answer,
    read_metrics,
    read_page,
    read_summaries,
    read_topic_state,
)

V = TypeVar("V")

_OK: Final = 200
_TIMEOUT_S: Final = 2.5
"""Shorter than the time limit of a poller, so that the error names the server."""
_CONFIG_KEPT_S: Final = 60.0
_KEPT_MAX: Final = 20_000
_AT_ONCE: Final = 8
_SCANNED_MAX: Final = 1000
_SCANNED_BYTES: Final = 1 << 20
_ROUTERS_MAX: Final = 2000
_FIRST_AFTER: Final = b'{"from_seq":%d,"limit":1,"include_meta":false}'


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicsNumbers:
    """The figures of the whole server, over all topics."""

    topics: int
    frames: int
    """Entries of its log: one for each record and for each change of a topic."""
    bytes_written: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicsReading:
    """The state of the relayed topics."""

    states: Mapping[str, TopicState]
    """Only topics that exist."""
    oldest_ms: Mapping[str, int]
    """The time of the first record that is not relayed yet, for each topic whose relay lags."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterView:
    """A router, with its configuration if that could be read."""

    summary: RouterSummary
    config: RouterConfig | None


class _Remembered(OrderedDict[str, V]):
    """The last values by name."""

    def keep(self, name: str, value: V) -> V:
        self[name] = value
        while len(self) > _KEPT_MAX:
            self.popitem(last=False)
        return value


class TopicsSource:
    """The topics server of the fleet. Its address may change when it is restarted."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._place: tuple[str | None, str | None] = (None, None)
        self._client: Client | None = None
        self._poller: HttpPoller | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._configs: _Remembered[tuple[float, TopicConfig]] = _Remembered()
        self._routers: _Remembered[tuple[float, RouterConfig]] = _Remembered()
        self._meters: _Remembered[Meter] = _Remembered()
        self.relayed: Mapping[str, int | None] = {}
        """The relayed topics and their positions."""

    def move(self, url: str | None, key: str | None) -> None:
        """Set the server's address."""
        if (url, key) == self._place:
            return
        self._place = (url, key)
        self._drop()
        if url is not None:
            self._client = Client(url, key=key, timeout=_TIMEOUT_S, retry_deadline=0)
            self._poller = HttpPoller("the topics server", url, key, timeout_s=_TIMEOUT_S)

    def _drop(self) -> None:
        if self._poller is not None:
            self._poller.close()
            self._poller = None
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
        """The client for occasional requests. Raise `Unavailable` without an address."""
        if self._client is None:
            raise _absent()
        return self._client

    async def _ask(self, path: str, topic: str | None = None, body: bytes | None = None) -> bytes:
        """Send a frequent request. Raise the errors of `Client`, or `Unavailable`."""
        poller = self._poller
        if poller is None:
            raise _absent()
        answer = await poller.ask(path, body)
        if answer.status == _OK:
            return answer.body
        request = httpx.Request("GET", f"{poller.url}{path}")
        response = httpx.Response(answer.status, content=answer.body, request=request)
        raise failure_of_answer(response, topic, changes=False).error

    async def numbers(self) -> TopicsNumbers:
        """Read the server's figures."""
        found = read_metrics(await self._ask("/v0/metrics"))
        wal = found.get("wal")
        wal = wal if isinstance(wal, dict) else {}
        return TopicsNumbers(
            topics=_number(found.get("topics")),
            frames=_number(wal.get("frames")),
            bytes_written=_number(wal.get("bytes_written")),
        )

    async def look(self) -> TopicsReading:
        """Read the relayed topics."""
        found = await asyncio.gather(*(self._state(topic) for topic in self.relayed))
        states = {state.topic: state for state in found if state is not None}
        lagging = {
            topic: position or 0
            for topic, position in self.relayed.items()
            if topic in states and (position or 0) < states[topic].head_seq
        }
        ages = await asyncio.gather(*(self._first_ms(topic, seq) for topic, seq in lagging.items()))
        return TopicsReading(
            states=states,
            oldest_ms={topic: ms for topic, ms in zip(lagging, ages, strict=True) if ms is not None},
        )

    async def _state(self, topic: str) -> TopicState | None:
        try:
            return await self.state(topic)
        except TopicNotFound:
            return None

    async def _first_ms(self, topic: str, after: int) -> int | None:
        try:
            body = await self._ask(f"{_path(topic)}/diff", topic, _FIRST_AFTER % after)
        except TopicNotFound:
            return None
        records = read_page(body).records()
        return records[0].ts_ms if records else None

    # --- lists ---------------------------------------------------------------------------------------------

    async def page(
        self, prefix: str, cursor: str, limit: int, *, has_configs: bool = True
    ) -> tuple[list[tuple[TopicSummary, TopicConfig | None, float | None]], str | None]:
        """Return topics by name with configuration and rate, and the start of the next page.

        Each configuration takes a request to the server. Without them, a long list is fast.
        """
        query = {"prefix": prefix, "page_size": str(limit), "touch": "false"}
        more = {"cursor": cursor} if cursor else {}
        found, following = read_summaries(await self._ask(f"/v0/topics?{urlencode(query | more)}"))
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

        async def fetch(topic: str) -> None:
            async with limit:
                state = await self._state(topic)
            if state is None:
                self._configs.pop(topic, None)
            else:
                self._configs.keep(topic, (now, state.config))

        old = [topic for topic in topics if self._config_age_s(topic, now) >= _CONFIG_KEPT_S]
        await asyncio.gather(*(fetch(topic) for topic in old))
        known = (self._configs.get(topic) for topic in topics)
        return [None if each is None else each[1] for each in known]

    def _config_age_s(self, topic: str, now: float) -> float:
        known = self._configs.get(topic)
        return math.inf if known is None else now - known[0]

    async def state(self, topic: str) -> TopicState:
        """Read the state of a topic. Raise `TopicNotFound`."""
        return read_topic_state(await self._ask(f"{_path(topic)}?touch=false", topic))

    async def scan(self, state: TopicState) -> tuple[Tombstone | None, list[int], int | None]:
        """Return the tombstone for a reader from the beginning, the last sequences, and where those start.

        Sequences are read only if there are gaps.
        """
        first = await self.client.diff(state.topic, 0, limit=1, include_meta=False, max_batch_bytes=1)
        span = state.head_seq - state.earliest_seq + 1
        if not state.count or span == state.count:
            return first.tombstone, [], None
        start = max(state.earliest_seq, state.head_seq - _SCANNED_MAX + 1)
        page = await self.client.diff(
            state.topic, start - 1, limit=_SCANNED_MAX, include_meta=False, max_batch_bytes=_SCANNED_BYTES
        )
        if page.next_from_seq < state.head_seq:  # too large to read one by one
            return first.tombstone, [], None
        return first.tombstone, [record.seq for record in page.records()], start

    async def newest(self, topic: str, limit: int) -> Page:
        """Read the last records of a topic. Raise `TopicNotFound`."""
        state = await self.state(topic)
        after = max(0, state.head_seq - limit)
        return await self.client.diff(
            topic, after, limit=limit, include_tags=True, max_batch_bytes=_SCANNED_BYTES
        )

    async def routers(self) -> list[RouterView]:
        """Read every router. Configurations are read rarely, because a read makes the server copy records."""
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


def _path(topic: str) -> str:
    return f"/v0/topics/{quote(check_topic_name(topic), safe='')}"


def _absent() -> Unavailable:
    return Unavailable("the topics server is not running, or has no address yet")


def _number(value: object) -> int:
    return int(value) if isinstance(value, int | float) else 0
