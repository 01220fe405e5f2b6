"""A topics server as a Python object."""

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
    """Calls a topics server; many tasks of one event loop may share it.

        async with Client("http://127.0.0.1:4000") as client:
            await client.write("clicks", [{"user": 1}])
            async for page in client.follow("clicks"):
                ...

    **What is sent again.** A server that is away, throttles or is not ready yet is asked again for up to
    `retry_deadline`, no sooner than it asks for. After a connection that was cut the outcome is unknown: then
    reads are repeated, and so are writes, because each carries an idempotency key, minted here unless given.
    Whatever happened to its attempts, a write that returns is in the topic once.

    **What remains.** The server remembers keys in memory, for the topic's `idempotency_window_ms`. If it
    restarted after an attempt was sent, that attempt may have been applied and its key is forgotten: the
    client notices and raises `Unanswered` (an `OutcomeUnknown`) instead of risking a second record. Look for
    the record before writing it again. Keep the window longer than `retry_deadline`; a topic with a shorter
    one may double a record whose answer was lost.

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
        """`key` is taken from TOPICS_API_KEY unless given. `timeout` is for one attempt; `wait_ms` is added.

        With `mint_keys=False` a write without a key of its own is sent again only while it is certain that it
        was not applied.
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
        """Close the connections. Calls in progress end in an error."""
        await self._connection.close()

    async def put_topic(self, topic: str, config: TopicConfig | None = None) -> PutResult:
        """Create the topic, or give it this config: all of it, also what is at its default here."""
        body = put_body(config or TopicConfig())
        answer = await self._send("PUT", topic, Repeat.UNAPPLIED, body=body)
        return models.put_result(answer.content)

    async def state(self, topic: str, *, touch: bool = True) -> TopicState:
        """The topic now. `touch=False` leaves no trace in its priority. Raises `TopicNotFound`."""
        answer = await self._send("GET", topic, Repeat.ALWAYS, query={"touch": _flag(touch)})
        return models.read_topic_state(answer.content)

    async def topics(
        self, prefix: str = "", *, page_size: int = PAGE_SIZE_MAX, touch: bool = False
    ) -> AsyncGenerator[TopicSummary, None]:
        """Every topic whose name begins with `prefix` and that the key may see, by name."""
        cursor: str | None = ""
        while cursor is not None:
            found, cursor = await self.topics_page(prefix, cursor, page_size=page_size, touch=touch)
            for summary in found:
                yield summary

    async def topics_page(
        self, prefix: str = "", cursor: str = "", *, page_size: int = PAGE_SIZE_MAX, touch: bool = False
    ) -> tuple[list[TopicSummary], str | None]:
        """One page of `topics`, and the cursor of the next one; None after the last."""
        query = {"prefix": prefix, "page_size": str(page_size), "touch": _flag(touch)}
        more = {"cursor": cursor} if cursor else {}
        call = Call(method="GET", path="/v0/topics", repeat=Repeat.ALWAYS, query=query | more)
        return models.read_summaries((await self._connection.send(call)).content)

    async def remove_topic(self, topic: str, *, if_empty: bool = False) -> RemoveResult:
        """Remove the topic with its records. Raises `TopicNotEmpty` if it must be empty and is not."""
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
        """Append records, all or none, in this order; returns when the topic's class says they are safe.

        A record is any value that JSON can hold (as `msgspec.json.encode` writes it), JSON text as bytes or
        `msgspec.Raw`, or a `NewRecord` with a tag, a node or meta of its own. `tag` and `node` are for the
        records that have none. `config` is used only if this write creates the topic; `create=False` raises
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
        """The records after `from_seq`, and a tombstone if some of them were lost.

        Where there are none the server waits up to `wait_ms` for one. Records whose node is among `node` are
        left out, and with `match` those without such a tag. Ask again from `next_from_seq`.
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
        """Yield pages without end, as records arrive. Each continues at `next_from_seq` of the one before.

        A page comes when the position moves or when there is a gap: look at `page.tombstone`, it tells which
        records are gone and why. A server that is away longer than `retry_deadline` ends it with
        `Unavailable`, a removed topic with `TopicNotFound`; follow again from the last `next_from_seq`.
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
                # Behind the head there is nothing to come: a topic that was recreated starts over.
                from_seq = min(page.next_from_seq, page.head_seq)
                yield page

    async def delete(
        self, topic: str, *, before_seq: int | None = None, match: Predicate | str | None = None
    ) -> DeleteResult:
        """Delete the records before `before_seq`, those that `match`, or those that are both; for good.

        A string matches that tag exactly; `Predicate(value=..., is_prefix=True)` every tag that begins so.
        """
        body = delete_body(before_seq, match)
        answer = await self._send("POST", topic, Repeat.UNAPPLIED, "/delete", body=body)
        return models.delete_result(answer.content)

    async def health(self) -> Health:
        """That the server is there. Asked once: a failure is the answer."""
        return models.health((await self._probe("/v0/health")).content)

    async def ready(self) -> Readiness:
        """That the server takes calls. Raises `NotReady`, whose detail tells how far the replay is."""
        return models.readiness((await self._probe("/v0/ready")).content)

    async def metrics(self) -> dict[str, object]:
        """The server's numbers by name; those of its log below `wal`."""
        return models.read_metrics((await self._probe("/v0/metrics", accept="application/json")).content)

    async def metrics_text(self) -> str:
        """The server's numbers as Prometheus reads them, those of each topic included."""
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
