"""The client without an event loop: the same names, calls that wait. For scripts and Spark tasks.

with Client("http://127.0.0.1:4000") as client:
    client.write("clicks", [{"user": 1}])
    for page in client.follow("clicks"):
        ...
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType

import httpx

from penstock.blocking import loop_thread
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.ids import SYSTEM_RNG
from penstock.topics.client import client as _client
from penstock.topics.client.answers import Health, Readiness, TopicSummary
from penstock.topics.client.client import DEFAULT_URL
from penstock.topics.client.pull import pull
from penstock.topics.client.queue_sync import BlockingQueueCalls
from penstock.topics.client.router_sync import BlockingRouterCalls
from penstock.topics.client.watch_sync import BlockingWatchCalls
from penstock.topics.client.work_sync import BlockingWorkCalls
from penstock.topics.config import TopicConfig
from penstock.topics.limits import PAGE_SIZE_MAX, WAIT_MS_MAX
from penstock.topics.model import (
    DeleteResult,
    Page,
    Predicate,
    PutResult,
    RemoveResult,
    TopicState,
    WriteResult,
)
from penstock.units import DurationLike

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
        """One page of `topics`, and the cursor of the next one; None behind the last."""
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
        """The records after `from_seq`, and a tombstone if some of them are gone."""
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
