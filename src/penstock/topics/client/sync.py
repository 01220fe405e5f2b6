"""The blocking client: the same names, calls that wait. For scripts and Spark tasks.

with Client("http://127.0.0.1:4000") as client:
    client.write("clicks", [{"user": 1}])
    for page in client.follow("clicks"):
        ...
"""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Literal, TypeVar

import httpx

from penstock.blocking import LoopThread, loop_thread
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.ids import SYSTEM_RNG
from penstock.topics.client import client as _client
from penstock.topics.client.client import DEFAULT_URL
from penstock.topics.client.models import Health, Readiness, TopicSummary
from penstock.topics.client.queues import JobRef, QueueCalls, WorkCalls
from penstock.topics.client.routers import RouterCalls, RouterSummary
from penstock.topics.client.watch import WatchCalls, WatchEvent
from penstock.topics.config import TopicConfig
from penstock.topics.limits import PAGE_SIZE_MAX, WAIT_MS_MAX
from penstock.topics.model import (
    AckResult,
    ClaimedJob,
    ClaimResult,
    DeleteResult,
    ExtendResult,
    NackResult,
    Page,
    Predicate,
    PutResult,
    RemoveResult,
    TopicState,
    WriteResult,
)
from penstock.topics.routers.model import RouterConfig, RouterPut, RouterRemoved, RouterState
from penstock.units import DurationLike

__all__ = ["pull"]

T = TypeVar("T")


def pull(loop: LoopThread, source: AsyncGenerator[T, None]) -> Iterator[T]:
    """Values of an async iterator, one at a time, each when it is asked for."""

    async def following() -> T | None:
        return await anext(source, None)

    async def closing() -> None:
        await source.aclose()

    try:
        while (value := loop.run(following())) is not None:
            yield value
    finally:
        loop.run(closing())


__all__ = ["BlockingQueueCalls"]


class BlockingQueueCalls:
    """Blocking twin of `QueueCalls`."""

    _loop: LoopThread
    _inner: QueueCalls

    def claim(self, topic: str, node: str, *, max: int = 1, lease_ms: int | None = None) -> ClaimResult:
        """Take up to `max` jobs for as long as the lease."""
        return self._loop.run(self._inner.claim(topic, node, max=max, lease_ms=lease_ms))

    def ack(self, topic: str, node: str, jobs: Sequence[JobRef]) -> AckResult:
        """These jobs are done: delete them."""
        return self._loop.run(self._inner.ack(topic, node, jobs))

    def nack(self, topic: str, node: str, jobs: Sequence[JobRef], *, delay_ms: int = 0) -> NackResult:
        """Give these jobs back, to be claimed again at once or after `delay_ms`."""
        return self._loop.run(self._inner.nack(topic, node, jobs, delay_ms=delay_ms))

    def extend(self, topic: str, node: str, jobs: Sequence[JobRef], *, lease_ms: int) -> ExtendResult:
        """Keep these jobs until `lease_ms` from now."""
        return self._loop.run(self._inner.extend(topic, node, jobs, lease_ms=lease_ms))


__all__ = ["BlockingRouterCalls"]


class BlockingRouterCalls:
    """Blocking twin of `RouterCalls`."""

    _loop: LoopThread
    _inner: RouterCalls

    def put_router(self, router: str, config: RouterConfig) -> RouterPut:
        """Copy what is appended to one topic from now on into another one, or change how."""
        return self._loop.run(self._inner.put_router(router, config))

    def router(self, router: str) -> RouterState:
        """The router, after it has copied what there is."""
        return self._loop.run(self._inner.router(router))

    def routers(
        self,
        prefix: str = "",
        *,
        source: str | None = None,
        dest: str | None = None,
        page_size: int = PAGE_SIZE_MAX,
    ) -> Iterator[RouterSummary]:
        """Every router that the key may see, by name: of this source, of this destination."""
        return pull(self._loop, self._inner.routers(prefix, source=source, dest=dest, page_size=page_size))

    def remove_router(self, router: str) -> RouterRemoved:
        """Copy nothing more; what was copied stays."""
        return self._loop.run(self._inner.remove_router(router))


__all__ = ["BlockingWatchCalls"]


class BlockingWatchCalls:
    """Blocking twin of `WatchCalls`."""

    _loop: LoopThread
    _inner: WatchCalls

    def watch(
        self,
        topics: Iterable[str] | Mapping[str, int | Literal["tail"]],
        *,
        node: str | Sequence[str] = (),
        limit: int = 0,
        max_batch_bytes: int = 262_144,
        heartbeat_ms: int = 15_000,
        include_tags: bool = False,
        include_meta: bool = True,
        include_data: bool = True,
        match: Predicate | str | None = None,
    ) -> Iterator[WatchEvent]:
        """What happens in these topics, as it happens."""
        return pull(
            self._loop,
            self._inner.watch(
                topics,
                node=node,
                limit=limit,
                max_batch_bytes=max_batch_bytes,
                heartbeat_ms=heartbeat_ms,
                include_tags=include_tags,
                include_meta=include_meta,
                include_data=include_data,
                match=match,
            ),
        )


__all__ = ["BlockingWorkCalls"]


class BlockingWorkCalls:
    """Blocking twin of `WorkCalls`."""

    _loop: LoopThread
    _inner: WorkCalls

    def work(
        self, topic: str, node: str, *, max: int = 1, lease_ms: int | None = None
    ) -> Iterator[ClaimedJob]:
        """Jobs of a queue as they come, never more than `max` that are neither acked nor nacked."""
        return pull(self._loop, self._inner.work(topic, node, max=max, lease_ms=lease_ms))


__all__ = ["Client"]


class Client(BlockingQueueCalls, BlockingWatchCalls, BlockingRouterCalls, BlockingWorkCalls):
    """Blocking twin of `penstock.topics.client.Client`; threads may share it."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        key: str | None = None,
        timeout: DurationLike = "30s",
        retry_deadline: DurationLike = "30s",
        mint_keys: bool = True,
        connections_max: int = 64,
        clock: Clock = SYSTEM_CLOCK,
        rng: random.Random = SYSTEM_RNG,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._loop = loop_thread()
        self._inner: _client.Client = _client.Client(
            url,
            key=key,
            timeout=timeout,
            retry_deadline=retry_deadline,
            mint_keys=mint_keys,
            connections_max=connections_max,
            clock=clock,
            rng=rng,
            transport=transport,
        )

    def __repr__(self) -> str:
        return repr(self._inner)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        return self._inner.url

    def close(self) -> None:
        """Close the connections."""
        self._loop.run(self._inner.close())

    def put_topic(self, topic: str, config: TopicConfig | None = None) -> PutResult:
        """Create the topic, or give it this config, the whole of it."""
        return self._loop.run(self._inner.put_topic(topic, config))

    def state(self, topic: str, *, touch: bool = True) -> TopicState:
        """The topic now."""
        return self._loop.run(self._inner.state(topic, touch=touch))

    def topics(
        self, prefix: str = "", *, page_size: int = PAGE_SIZE_MAX, touch: bool = False
    ) -> Iterator[TopicSummary]:
        """Every topic whose name begins with `prefix` and that the key may see, by name."""
        return pull(self._loop, self._inner.topics(prefix, page_size=page_size, touch=touch))

    def topics_page(
        self, prefix: str = "", cursor: str = "", *, page_size: int = PAGE_SIZE_MAX, touch: bool = False
    ) -> tuple[list[TopicSummary], str | None]:
        """One page of `topics`, and the cursor of the next one; None after the last."""
        return self._loop.run(self._inner.topics_page(prefix, cursor, page_size=page_size, touch=touch))

    def remove_topic(self, topic: str, *, if_empty: bool = False) -> RemoveResult:
        """Remove the topic with its records."""
        return self._loop.run(self._inner.remove_topic(topic, if_empty=if_empty))

    def write(
        self,
        topic: str,
        records: Iterable[object],
        *,
        tag: str | None = None,
        node: str | None = None,
        idempotency_key: str | None = None,
        create: bool | None = None,
        config: TopicConfig | None = None,
    ) -> WriteResult:
        """Append records, all or none, in this order."""
        return self._loop.run(
            self._inner.write(
                topic,
                records,
                tag=tag,
                node=node,
                idempotency_key=idempotency_key,
                create=create,
                config=config,
            )
        )

    def diff(
        self,
        topic: str,
        from_seq: int = 0,
        *,
        limit: int = 0,
        node: str | Sequence[str] = (),
        include_tags: bool = False,
        include_meta: bool = True,
        wait_ms: int = 0,
        max_batch_bytes: int = 0,
        match: Predicate | str | None = None,
    ) -> Page:
        """The records after `from_seq`, and a tombstone if some of them were lost."""
        return self._loop.run(
            self._inner.diff(
                topic,
                from_seq,
                limit=limit,
                node=node,
                include_tags=include_tags,
                include_meta=include_meta,
                wait_ms=wait_ms,
                max_batch_bytes=max_batch_bytes,
                match=match,
            )
        )

    def follow(
        self,
        topic: str,
        from_seq: int = 0,
        *,
        limit: int = 0,
        node: str | Sequence[str] = (),
        include_tags: bool = False,
        include_meta: bool = True,
        wait_ms: int = WAIT_MS_MAX,
        max_batch_bytes: int = 0,
        match: Predicate | str | None = None,
    ) -> Iterator[Page]:
        """Pages for ever, as records arrive; look at `page.tombstone` for gaps."""
        return pull(
            self._loop,
            self._inner.follow(
                topic,
                from_seq,
                limit=limit,
                node=node,
                include_tags=include_tags,
                include_meta=include_meta,
                wait_ms=wait_ms,
                max_batch_bytes=max_batch_bytes,
                match=match,
            ),
        )

    def delete(
        self, topic: str, *, before_seq: int | None = None, match: Predicate | str | None = None
    ) -> DeleteResult:
        """Delete the records before `before_seq`, those that `match`, or those that are both."""
        return self._loop.run(self._inner.delete(topic, before_seq=before_seq, match=match))

    def health(self) -> Health:
        """That the server is there."""
        return self._loop.run(self._inner.health())

    def ready(self) -> Readiness:
        """That the server takes calls."""
        return self._loop.run(self._inner.ready())

    def metrics(self) -> dict[str, object]:
        """The server's numbers by name."""
        return self._loop.run(self._inner.metrics())

    def metrics_text(self) -> str:
        """The server's numbers as Prometheus reads them."""
        return self._loop.run(self._inner.metrics_text())
