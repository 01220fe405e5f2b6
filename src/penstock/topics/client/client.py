"""The asynchronous client of a topics server."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncGenerator, Iterable, Sequence
from types import TracebackType
from typing import Final
from urllib.parse import quote

import httpx

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.ids import SYSTEM_RNG, mint_ulid
from penstock.retry import RetryPolicy
from penstock.topics.client import models
from penstock.topics.client.connection import Call, Connection, Repeat
from penstock.topics.client.models import (
    Health,
    Readiness,
    TopicSummary,
    delete_body,
    diff_body,
    put_body,
    write_body,
)
from penstock.topics.client.queues import QueueCalls, WorkCalls
from penstock.topics.client.routers import RouterCalls
from penstock.topics.client.watch import WatchCalls
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
from penstock.topics.names import check_topic_name
from penstock.units import DurationLike, parse_duration

DEFAULT_URL: Final = "http://127.0.0.1:4000"
KEY_VARIABLE: Final = "TOPICS_API_KEY"
_RETRY_FLOOR_S: Final = 0.05
_RETRY_CEILING_S: Final = 2.0


class Client(QueueCalls, WatchCalls, RouterCalls, WorkCalls):
    """A client of a topics server. Tasks of one event loop may share it.

        async with Client("http://127.0.0.1:4000") as client:
            await client.write("clicks", [{"user": 1}])
            async for page in client.follow("clicks"):
                ...

    **What is retried.** If a server is unreachable, throttles or is not ready yet, the client retries for up
    to `retry_deadline`, no sooner than the server asks. After a lost connection the outcome is unknown. The
    client then repeats reads, and also writes, because each write carries an idempotency key; the client
    generates one unless you pass it. A write that returns is in the topic exactly once.

    **What remains.** The server keeps keys in memory, for the topic's `idempotency_window_ms`. If it restarts
    after an attempt was sent, the attempt may have been applied and its key is lost. The client detects this
    and raises `Unanswered` (an `OutcomeUnknown`) instead of risking a second record. Look for the record
    before you write it again. Keep the window longer than `retry_deadline`: with a shorter window, a write
    whose response was lost may be applied twice.

    Every error is one of `penstock.topics.errors` or `penstock.topics.client`, with the server's `detail`.
    """

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
        """Create a client. `key` defaults to TOPICS_API_KEY. `timeout` limits one attempt, plus `wait_ms`.

        With `mint_keys=False`, a write without its own key is retried only while it is certain that it was
        not applied.
        """
        self._clock = clock
        self._rng = rng
        self._mint_keys = mint_keys
        key = os.environ.get(KEY_VARIABLE) or None if key is None else key
        self._has_key = key is not None
        self._connection = Connection(
            url,
            key=key,
            timeout_s=parse_duration(timeout),
            policy=RetryPolicy(
                floor_s=_RETRY_FLOOR_S,
                ceiling_s=_RETRY_CEILING_S,
                deadline_s=parse_duration(retry_deadline),
            ),
            connections_max=connections_max,
            clock=clock,
            rng=rng,
            transport=transport,
        )

    def __repr__(self) -> str:
        return f"Client({self.url!r}, key={'***' if self._has_key else None})"

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def url(self) -> str:
        return self._connection.url

    async def close(self) -> None:
        """Close the connections. Calls in progress fail with an error."""
        await self._connection.close()

    async def put_topic(self, topic: str, config: TopicConfig | None = None) -> PutResult:
        """Create the topic, or replace its whole config. Omitted values are set to their defaults."""
        body = put_body(config or TopicConfig())
        answer = await self._send("PUT", topic, Repeat.UNAPPLIED, body=body)
        return models.put_result(answer.content)

    async def state(self, topic: str, *, touch: bool = True) -> TopicState:
        """Return the state of the topic.

        With `touch=False` its priority is not affected. Raise `TopicNotFound`.
        """
        answer = await self._send("GET", topic, Repeat.ALWAYS, query={"touch": _flag(touch)})
        return models.read_topic_state(answer.content)

    async def topics(
        self, prefix: str = "", *, page_size: int = PAGE_SIZE_MAX, touch: bool = False
    ) -> AsyncGenerator[TopicSummary, None]:
        """Yield every topic that starts with `prefix` and that the key may see, in order of names."""
        cursor: str | None = ""
        while cursor is not None:
            found, cursor = await self.topics_page(prefix, cursor, page_size=page_size, touch=touch)
            for summary in found:
                yield summary

    async def topics_page(
        self, prefix: str = "", cursor: str = "", *, page_size: int = PAGE_SIZE_MAX, touch: bool = False
    ) -> tuple[list[TopicSummary], str | None]:
        """Return one page of `topics`, and the cursor of the next one or None after the last."""
        query = {"prefix": prefix, "page_size": str(page_size), "touch": _flag(touch)}
        more = {"cursor": cursor} if cursor else {}
        call = Call(method="GET", path="/v0/topics", repeat=Repeat.ALWAYS, query=query | more)
        return models.read_summaries((await self._connection.send(call)).content)

    async def remove_topic(self, topic: str, *, if_empty: bool = False) -> RemoveResult:
        """Remove the topic with its records.

        Raise `TopicNotEmpty` if `if_empty` is set and it has records.
        """
        query = {"if_empty": _flag(if_empty)}
        answer = await self._send("DELETE", topic, Repeat.UNAPPLIED, query=query)
        return models.remove_result(answer.content)

    async def write(
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
        """Append records atomically, in this order. Return when the topic's durability is reached.

        A record is any value that JSON can hold (as `msgspec.json.encode` writes it), JSON text as bytes or
        `msgspec.Raw`, or a `NewRecord` with its own tag, node or meta. `tag` and `node` apply to records
        without their own. `config` is used only if this write creates the topic. `create=False` raises
        `TopicNotFound` instead of creating it.
        """
        if idempotency_key is None and self._mint_keys:
            idempotency_key = mint_ulid(self._clock.now_ms(), self._rng)
        body = write_body(
            records, tag=tag, node=node, idempotency_key=idempotency_key, create=create, config=config
        )
        repeat = Repeat.UNAPPLIED if idempotency_key is None else Repeat.KEYED
        answer = await self._send("POST", topic, repeat, body=body, query={"return_seqs": "false"})
        return models.write_result(answer.content)

    async def diff(
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
        """Return the records after `from_seq`, with a tombstone if some of them were lost.

        If there are none, the server waits up to `wait_ms` for one. Records whose node is in `node` are
        skipped. With `match`, only records with a matching tag are returned. Continue from `next_from_seq`.
        """
        wait_ms = min(max(wait_ms, 0), WAIT_MS_MAX)
        body = diff_body(
            from_seq,
            limit=limit,
            node=node,
            include_tags=include_tags,
            include_meta=include_meta,
            wait_ms=wait_ms,
            max_batch_bytes=max_batch_bytes,
            match=match,
        )
        answer = await self._send("POST", topic, Repeat.ALWAYS, "/diff", body=body, wait_s=wait_ms / 1000)
        return models.read_page(answer.content)

    async def follow(
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
    ) -> AsyncGenerator[Page, None]:
        """Yield pages indefinitely, as records arrive. Each continues at `next_from_seq` of the last.

        A page is yielded when the position moves or when there is a gap. Check `page.tombstone`: it says
        which records are gone and why. The generator raises `Unavailable` if the server is away longer than
        `retry_deadline`, and `TopicNotFound` if the topic is removed. Follow again from the last
        `next_from_seq`.
        """
        while True:
            page = await self.diff(
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
            if page.tombstone is not None or page.next_from_seq != from_seq:
                # Never continue after the head: a recreated topic starts over.
                from_seq = min(page.next_from_seq, page.head_seq)
                yield page

    async def delete(
        self, topic: str, *, before_seq: int | None = None, match: Predicate | str | None = None
    ) -> DeleteResult:
        """Delete the records before `before_seq`, those that match, or those that meet both.

        A string matches exactly that tag. `Predicate(value=..., is_prefix=True)` matches every tag with that
        prefix.
        """
        body = delete_body(before_seq, match)
        answer = await self._send("POST", topic, Repeat.UNAPPLIED, "/delete", body=body)
        return models.delete_result(answer.content)

    async def health(self) -> Health:
        """Return the health of the server. A failure is not retried."""
        return models.health((await self._probe("/v0/health")).content)

    async def ready(self) -> Readiness:
        """Return when the server is ready.

        Raise `NotReady` with the replay progress if it is not. No retries.
        """
        return models.readiness((await self._probe("/v0/ready")).content)

    async def metrics(self) -> dict[str, object]:
        """Return the server's metrics by name. Metrics of its log are under `wal`."""
        return models.read_metrics((await self._probe("/v0/metrics", accept="application/json")).content)

    async def metrics_text(self) -> str:
        """Return the server's metrics in the Prometheus text format, including those of each topic."""
        return (await self._probe("/v0/metrics", accept="text/plain")).text

    async def _probe(self, path: str, accept: str = "application/json") -> httpx.Response:
        call = Call(method="GET", path=path, repeat=Repeat.NEVER, headers={"Accept": accept})
        return await self._connection.send(call)

    async def _send(
        self,
        method: str,
        topic: str,
        repeat: Repeat,
        verb: str = "",
        *,
        body: bytes | None = None,
        query: dict[str, str] | None = None,
        wait_s: float = 0.0,
    ) -> httpx.Response:
        path = f"/v0/topics/{quote(check_topic_name(topic), safe='')}{verb}"
        return await self._connection.send(
            Call(
                method=method,
                path=path,
                repeat=repeat,
                topic=topic,
                body=body,
                query=query or {},
                wait_s=wait_s,
            )
        )


def _flag(value: bool) -> str:
    return "true" if value else "false"
