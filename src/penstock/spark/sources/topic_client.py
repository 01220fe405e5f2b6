"""Requests of the driver and the tasks to a topics server: record pages, bounds, and record times."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final
from urllib.parse import quote

import msgspec

from penstock.blocking import loop_thread
from penstock.clock import SYSTEM_CLOCK
from penstock.ids import SYSTEM_RNG
from penstock.retry import RetryPolicy
from penstock.spark.sources.offsets import Bounds
from penstock.spark.sources.topic_options import TopicAddress
from penstock.topics import (
    BATCH_BYTES_MAX,
    DIFF_LIMIT_MAX,
    Call,
    Connection,
    Record,
    Repeat,
    Tombstone,
    UnexpectedAnswer,
    diff_body,
    read_page,
    read_topic_state,
)

_TIMEOUT_S: Final = 30.0
_POLICY: Final = RetryPolicy(floor_s=0.05, ceiling_s=2.0, deadline_s=30.0)
_CONNECTIONS_MAX: Final = 16
_connections: dict[tuple[int, TopicAddress], Connection] = {}


class RecordPage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of records whose `data` and `meta` are slices of the response."""

    records: list[Record]
    next_from_seq: int
    head_seq: int
    tombstone: Tombstone | None


_PAGE: Final = msgspec.json.Decoder(RecordPage)


def topic_connection(address: TopicAddress) -> Connection:
    """Return this process's connections to a server."""
    key = (os.getpid(), address)
    connection = _connections.get(key)
    if connection is None:
        connection = _connections[key] = Connection(
            address.url,
            key=address.key,
            timeout_s=_TIMEOUT_S,
            policy=_POLICY,
            connections_max=_CONNECTIONS_MAX,
            clock=SYSTEM_CLOCK,
            rng=SYSTEM_RNG,
            transport=None,
        )
    return connection


def fetch_page(
    address: TopicAddress, topic: str, from_seq: int, limit: int = DIFF_LIMIT_MAX, *, with_meta: bool = True
) -> RecordPage:
    """Fetch records after `from_seq`. Raise the client's errors: `TopicNotFound`, `Unreachable`, …"""
    body = diff_body(
        from_seq,
        limit=limit,
        node=(),
        include_tags=True,
        include_meta=with_meta,
        wait_ms=0,
        max_batch_bytes=BATCH_BYTES_MAX,
    )
    call = Call(method="POST", path=f"{_path(topic)}/diff", repeat=Repeat.ALWAYS, topic=topic, body=body)
    content = loop_thread().run(topic_connection(address).send(call)).content
    try:
        return _read_page(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UnexpectedAnswer(
            f"the response to a diff of {topic} is not that of a topics server: {error}"
        ) from error


def _read_page(content: bytes) -> RecordPage:
    """Decode a page. Keep a record as text if it is nested deeper than the decoder's limit."""
    try:
        return _PAGE.decode(content)
    except RecursionError:
        found = read_page(content)
        return RecordPage(
            records=found.records(),
            next_from_seq=found.next_from_seq,
            head_seq=found.head_seq,
            tombstone=found.tombstone,
        )


def bounds_of_topics(address: TopicAddress, topics: Sequence[str]) -> dict[str, Bounds]:
    """Return the bounds of each topic."""
    return {topic: _bounds(address, topic) for topic in topics}


def _bounds(address: TopicAddress, topic: str) -> Bounds:
    query = {"touch": "false"}
    call = Call(method="GET", path=_path(topic), repeat=Repeat.ALWAYS, topic=topic, query=query)
    state = read_topic_state(loop_thread().run(topic_connection(address).send(call)).content)
    return Bounds(first=state.earliest_seq, following=state.head_seq + 1)


def record_time(address: TopicAddress, topic: str, seq: int) -> int | None:
    """Return the time of record `seq`, or None if it does not exist."""
    if seq < 1:
        return None
    page = fetch_page(address, topic, seq - 1, limit=1, with_meta=False)
    found = page.records[0] if page.records else None
    return found.ts_ms if found is not None and found.seq == seq else None


def _path(topic: str) -> str:
    return f"/v0/topics/{quote(topic, safe='')}"
