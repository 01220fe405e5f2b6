"""What a server answers, as values. Unknown fields are ignored: a newer server may add some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec

from penstock.jsontext import decode_list
from penstock.topics.client.errors import UnexpectedAnswer
from penstock.topics.config import TopicConfig
from penstock.topics.jobs import QueueCounts
from penstock.topics.model import (
    DeleteResult,
    Page,
    PutResult,
    RemoveResult,
    Tombstone,
    TopicState,
    WriteResult,
)

__all__ = [
    "Health",
    "Readiness",
    "TopicSummary",
    "delete_result",
    "health",
    "put_result",
    "read_answer",
    "read_list",
    "read_metrics",
    "read_page",
    "read_summaries",
    "read_topic_state",
    "readiness",
    "remove_result",
    "write_result",
]

T = TypeVar("T")


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """That a server is there, which one, and for how long."""

    status: str
    uptime_ms: int
    version: str = ""


class Readiness(msgspec.Struct, frozen=True, kw_only=True):
    """That a server has replayed its log and takes calls."""

    status: str
    topics: int = 0
    wal_replay_complete: bool = True


class TopicSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One topic in a list of them."""

    topic: str
    head_seq: int
    earliest_seq: int
    count: int
    bytes: int
    durable: bool
    effective_priority: int


class _Performance(msgspec.Struct):
    wal_append_ms: float = 0.0
    fsync_ms: float = 0.0
    throttle_wait_ms: float = 0.0
    records_scanned: int = 0
    cold_segments_read: int = 0


class _Put(msgspec.Struct):
    topic: str
    created: bool
    config: TopicConfig


class _State(msgspec.Struct):
    topic: str
    config: TopicConfig
    head_seq: int
    earliest_seq: int
    count: int
    bytes: int
    effective_priority: int
    last_write_ts: int | None = None
    last_read_ts: int | None = None
    queue: QueueCounts | None = None


class _Listing(msgspec.Struct):
    topics: list[TopicSummary]
    next_cursor: str | None = None


class _Removed(msgspec.Struct):
    topic: str
    deleted: bool
    routers_removed: tuple[str, ...] = ()


class _Written(msgspec.Struct):
    topic: str
    first_seq: int
    last_seq: int
    head_seq: int
    created: bool
    deduped: bool
    performance: _Performance = msgspec.field(default_factory=_Performance)


class _Deleted(msgspec.Struct):
    topic: str
    deleted: int
    earliest_seq: int
    head_seq: int
    count: int
    bytes: int


class _Diff(msgspec.Struct):
    topic: str
    records: list[msgspec.Raw]
    next_from_seq: int
    head_seq: int
    earliest_seq: int
    tombstone: Tombstone | None
    performance: _Performance = msgspec.field(default_factory=_Performance)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Turns the body of an answer into one kind of value."""

    what: str

    def read(self, decoder: msgspec.json.Decoder[T], body: bytes) -> T:
        try:
            return decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise UnexpectedAnswer(
                f"the answer to {self.what} is not one of a topics server: {error}"
            ) from error


def read_list(
    what: str, decoder: msgspec.json.Decoder[T], body: bytes, items: Callable[[T], Sequence[bytes]]
) -> tuple[T, list[bytes]]:
    """An answer with a list of objects, which are of any depth, and these as text."""
    try:
        got, deep = decode_list(decoder, body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _Reader(what).read(decoder, body), []
    if deep is None:
        return got, [bytes(item) for item in items(got)]
    if len(items(got)) != len(deep):
        raise UnexpectedAnswer(f"the answer to {what} has more levels than it should")
    return got, deep


def read_answer(what: str, decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """The body of an answer to `what`. Raises `UnexpectedAnswer`."""
    return _Reader(what).read(decoder, body)


_PUT: Final = msgspec.json.Decoder(_Put)
_STATE: Final = msgspec.json.Decoder(_State)
_LISTING: Final = msgspec.json.Decoder(_Listing)
_REMOVED: Final = msgspec.json.Decoder(_Removed)
_WRITTEN: Final = msgspec.json.Decoder(_Written)
_DELETED: Final = msgspec.json.Decoder(_Deleted)
_DIFF: Final = msgspec.json.Decoder(_Diff)
_HEALTH: Final = msgspec.json.Decoder(Health)
_READINESS: Final = msgspec.json.Decoder(Readiness)
_METRICS: Final = msgspec.json.Decoder(dict[str, object])


def put_result(body: bytes) -> PutResult:
    got = _Reader("a put").read(_PUT, body)
    return PutResult(topic=got.topic, created=got.created, config=got.config)


def read_topic_state(body: bytes) -> TopicState:
    got = _Reader("a question for a topic").read(_STATE, body)
    return TopicState(
        topic=got.topic,
        config=got.config,
        head_seq=got.head_seq,
        earliest_seq=got.earliest_seq,
        count=got.count,
        bytes=got.bytes,
        effective_priority=got.effective_priority,
        last_write_ms=got.last_write_ts,
        last_read_ms=got.last_read_ts,
        queue=got.queue,
    )


def read_summaries(body: bytes) -> tuple[list[TopicSummary], str | None]:
    """One page of a list, and the cursor of the next one."""
    got = _Reader("a list").read(_LISTING, body)
    return got.topics, got.next_cursor or None


def remove_result(body: bytes) -> RemoveResult:
    got = _Reader("a removal").read(_REMOVED, body)
    return RemoveResult(topic=got.topic, deleted=got.deleted, routers_removed=got.routers_removed)


def write_result(body: bytes) -> WriteResult:
    got = _Reader("a write").read(_WRITTEN, body)
    return WriteResult(
        topic=got.topic,
        first_seq=got.first_seq,
        last_seq=got.last_seq,
        head_seq=got.head_seq,
        created=got.created,
        deduped=got.deduped,
        wal_append_ms=got.performance.wal_append_ms,
        fsync_ms=got.performance.fsync_ms,
        throttle_wait_ms=got.performance.throttle_wait_ms,
    )


def delete_result(body: bytes) -> DeleteResult:
    got = _Reader("a delete").read(_DELETED, body)
    return DeleteResult(
        topic=got.topic,
        deleted=got.deleted,
        earliest_seq=got.earliest_seq,
        head_seq=got.head_seq,
        count=got.count,
        bytes=got.bytes,
    )


def read_page(body: bytes) -> Page:
    """One page. A record nested deeper than a decoder goes is in it as it is; see `unreadable`."""
    got, fragments = read_list("a diff", _DIFF, body, lambda got: got.records)
    return Page(
        topic=got.topic,
        fragments=fragments,
        next_from_seq=got.next_from_seq,
        head_seq=got.head_seq,
        earliest_seq=got.earliest_seq,
        tombstone=got.tombstone,
        records_scanned=got.performance.records_scanned,
        cold_segments_read=got.performance.cold_segments_read,
    )


def health(body: bytes) -> Health:
    return _Reader("a probe").read(_HEALTH, body)


def readiness(body: bytes) -> Readiness:
    return _Reader("a probe").read(_READINESS, body)


def read_metrics(body: bytes) -> dict[str, object]:
    return _Reader("a question for metrics").read(_METRICS, body)
