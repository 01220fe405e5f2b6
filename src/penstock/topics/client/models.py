"""The bodies of requests and responses as values.

Unknown fields are ignored, as newer servers may add some.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec

from penstock.jsontext import decode_list, json_problem
from penstock.limits import JSON_DEPTH_MAX
from penstock.topics.client.errors import UnexpectedAnswer
from penstock.topics.config import TopicConfig
from penstock.topics.errors import BatchTooLarge, InvalidRequest
from penstock.topics.limits import BATCH_RECORDS_MAX
from penstock.topics.model import (
    DeleteResult,
    NewRecord,
    Page,
    Predicate,
    PutResult,
    QueueCounts,
    RemoveResult,
    Tombstone,
    TopicState,
    WriteResult,
)

T = TypeVar("T")


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The status, version and uptime of a server."""

    status: str
    uptime_ms: int
    version: str = ""


class Readiness(msgspec.Struct, frozen=True, kw_only=True):
    """The readiness of a server that has replayed its log and accepts calls."""

    status: str
    topics: int = 0
    wal_replay_complete: bool = True


class TopicSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One topic in a list."""

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
    """The decoder of a response body into one kind of value."""

    what: str

    def read(self, decoder: msgspec.json.Decoder[T], body: bytes) -> T:
        try:
            return decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise UnexpectedAnswer(
                f"the response to {self.what} is not from a topics server: {error}"
            ) from error


def read_list(
    what: str, decoder: msgspec.json.Decoder[T], body: bytes, items: Callable[[T], Sequence[bytes]]
) -> tuple[T, list[bytes]]:
    """Decode a response with a list of objects of any depth. Return it, and the objects as text."""
    try:
        decoded, deep = decode_list(decoder, body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _Reader(what).read(decoder, body), []
    if deep is None:
        return decoded, [bytes(item) for item in items(decoded)]
    if len(items(decoded)) != len(deep):
        raise UnexpectedAnswer(f"the response to {what} is nested deeper than expected")
    return decoded, deep


def read_answer(what: str, decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decode the body of a response to `what`. Raise `UnexpectedAnswer`."""
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
    decoded = _Reader("a put").read(_PUT, body)
    return PutResult(topic=decoded.topic, created=decoded.created, config=decoded.config)


def read_topic_state(body: bytes) -> TopicState:
    decoded = _Reader("a topic state request").read(_STATE, body)
    return TopicState(
        topic=decoded.topic,
        config=decoded.config,
        head_seq=decoded.head_seq,
        earliest_seq=decoded.earliest_seq,
        count=decoded.count,
        bytes=decoded.bytes,
        effective_priority=decoded.effective_priority,
        last_write_ms=decoded.last_write_ts,
        last_read_ms=decoded.last_read_ts,
        queue=decoded.queue,
    )


def read_summaries(body: bytes) -> tuple[list[TopicSummary], str | None]:
    """Decode one page of a list, and the cursor of the next one."""
    decoded = _Reader("a list").read(_LISTING, body)
    return decoded.topics, decoded.next_cursor or None


def remove_result(body: bytes) -> RemoveResult:
    decoded = _Reader("a removal").read(_REMOVED, body)
    return RemoveResult(topic=decoded.topic, deleted=decoded.deleted, routers_removed=decoded.routers_removed)


def write_result(body: bytes) -> WriteResult:
    decoded = _Reader("a write").read(_WRITTEN, body)
    return WriteResult(
        topic=decoded.topic,
        first_seq=decoded.first_seq,
        last_seq=decoded.last_seq,
        head_seq=decoded.head_seq,
        created=decoded.created,
        deduped=decoded.deduped,
        wal_append_ms=decoded.performance.wal_append_ms,
        fsync_ms=decoded.performance.fsync_ms,
        throttle_wait_ms=decoded.performance.throttle_wait_ms,
    )


def delete_result(body: bytes) -> DeleteResult:
    decoded = _Reader("a delete").read(_DELETED, body)
    return DeleteResult(
        topic=decoded.topic,
        deleted=decoded.deleted,
        earliest_seq=decoded.earliest_seq,
        head_seq=decoded.head_seq,
        count=decoded.count,
        bytes=decoded.bytes,
    )


def read_page(body: bytes) -> Page:
    """Decode one page. Records nested deeper than the decoder allows are included; see `unreadable`."""
    decoded, fragments = read_list("a diff", _DIFF, body, lambda decoded: decoded.records)
    return Page(
        topic=decoded.topic,
        fragments=fragments,
        next_from_seq=decoded.next_from_seq,
        head_seq=decoded.head_seq,
        earliest_seq=decoded.earliest_seq,
        tombstone=decoded.tombstone,
        records_scanned=decoded.performance.records_scanned,
        cold_segments_read=decoded.performance.cold_segments_read,
    )


def health(body: bytes) -> Health:
    return _Reader("a probe").read(_HEALTH, body)


def readiness(body: bytes) -> Readiness:
    return _Reader("a probe").read(_READINESS, body)


def read_metrics(body: bytes) -> dict[str, object]:
    return _Reader("a metrics request").read(_METRICS, body)


class _Record(msgspec.Struct, omit_defaults=True, gc=False):
    data: msgspec.Raw
    tag: str | None = None
    node: str | None = None
    meta: msgspec.Raw | None = None


class _Write(msgspec.Struct, omit_defaults=True):
    records: list[_Record]
    node: str | None = None
    idempotency_key: str | None = None
    create: bool | None = None
    config: TopicConfig | None = None


class _DiffRequest(msgspec.Struct, omit_defaults=True):
    from_seq: int
    limit: int = 0
    node: list[str] = []
    include_tags: bool = False
    include_meta: bool = True
    wait_ms: int = 0
    max_batch_bytes: int = 0
    match: tuple[str, str, str] | None = None


class _Delete(msgspec.Struct, omit_defaults=True):
    before_seq: int | None = None
    match: tuple[str, str, str] | None = None


_ENCODER: Final = msgspec.json.Encoder()
_VALUE_DEPTH_MAX: Final = JSON_DEPTH_MAX - 3
"""The nesting limit of a value: the body of a write adds three levels around it."""
_ANY_JSON: Final = msgspec.json.Decoder(msgspec.Raw)


def put_body(config: TopicConfig) -> bytes:
    return _encoded(config)


def write_body(
    records: Iterable[object],
    *,
    tag: str | None,
    node: str | None,
    idempotency_key: str | None,
    create: bool | None,
    config: TopicConfig | None,
) -> bytes:
    """Encode the body of a write. Raise `InvalidRequest` for a value that JSON cannot hold."""
    if isinstance(records, Mapping | str | bytes | bytearray | memoryview | NewRecord | msgspec.Raw):
        raise InvalidRequest("a write takes a list of records: put a single one in brackets")
    wire = [_wire_record(place, record, tag) for place, record in enumerate(records)]
    if len(wire) > BATCH_RECORDS_MAX:
        raise BatchTooLarge(
            f"{len(wire)} records in one write, which is committed as a whole: {BATCH_RECORDS_MAX} at most",
            {"records": len(wire), "max": BATCH_RECORDS_MAX},
        )
    return _encoded(
        _Write(records=wire, node=node, idempotency_key=idempotency_key, create=create, config=config)
    )


def _wire_record(place: int, record: object, tag: str | None) -> _Record:
    if isinstance(record, NewRecord):
        meta = None if record.meta is None else _checked(place, "meta", record.meta)
        own = tag if record.tag is None else record.tag
        return _Record(data=_checked(place, "data", record.data), tag=own, node=record.node, meta=meta)
    if isinstance(record, bytes | bytearray | memoryview | msgspec.Raw):
        return _Record(data=_checked(place, "data", record), tag=tag)
    try:
        return _Record(data=_limited(place, "data", _ENCODER.encode(record)), tag=tag)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequest(f"record {place} cannot be written as JSON: {error}") from error


def _checked(place: int, part: str, text: bytes | bytearray | memoryview | msgspec.Raw) -> msgspec.Raw:
    """Check JSON text, which is sent as it is. It must be one whole value, or it could add other records."""
    plain = _limited(place, part, bytes(text))
    try:
        return _ANY_JSON.decode(plain)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{part} of record {place} is not JSON text: {error}") from error


def _limited(place: int, part: str, text: bytes) -> msgspec.Raw:
    """Return the text if it fits the limits of a body around it. Raise `InvalidRequest` otherwise."""
    problem = json_problem(text, depth_max=_VALUE_DEPTH_MAX)
    if problem is not None:
        raise InvalidRequest(f"{part} of record {place} {problem}")
    return msgspec.Raw(text)


def diff_body(
    from_seq: int,
    *,
    limit: int,
    node: str | Sequence[str],
    include_tags: bool,
    include_meta: bool,
    wait_ms: int,
    max_batch_bytes: int,
    match: Predicate | str | None = None,
) -> bytes:
    return _encoded(
        _DiffRequest(
            from_seq=from_seq,
            limit=limit,
            node=[node] if isinstance(node, str) else list(node),
            include_tags=include_tags,
            include_meta=include_meta,
            wait_ms=wait_ms,
            max_batch_bytes=max_batch_bytes,
            match=match_tuple(match),
        )
    )


def delete_body(before_seq: int | None, match: Predicate | str | None) -> bytes:
    """Encode the body of a delete. Raise `InvalidRequest` if it selects nothing."""
    if before_seq is None and match is None:
        raise InvalidRequest("a delete needs before_seq, match, or both")
    return _encoded(_Delete(before_seq=before_seq, match=match_tuple(match)))


def match_tuple(match: Predicate | str | None) -> tuple[str, str, str] | None:
    """Return a predicate as it is sent. A string means exactly that tag."""
    if match is None:
        return None
    if isinstance(match, str):
        return ("tag", "Eq", match)
    return ("tag", "Glob", f"{match.value}*") if match.is_prefix else ("tag", "Eq", match.value)


def _encoded(body: msgspec.Struct) -> bytes:
    try:
        return _ENCODER.encode(body)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"the request cannot be written as JSON: {error}") from error
