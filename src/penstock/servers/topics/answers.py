"""Response bodies of the `/v0` API. Records and jobs are joined without decoding them."""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Sequence
from typing import Final

import msgspec

from penstock.http import Request, Response
from penstock.topics import (
    AckResult,
    ClaimResult,
    Damaged,
    DeleteResult,
    ExtendResult,
    InvalidRequest,
    NackResult,
    Page,
    PutResult,
    RemoveResult,
    TopicState,
    WriteResult,
)

_ENCODE: Final = msgspec.json.Encoder().encode
_BOOL: Final = (b"false", b"true")
_ONE_BUFFER_BYTES_MAX: Final = 64 * 1024
_WRITE: Final = (
    b'{"topic":%b,"first_seq":%d,"last_seq":%d,%b"head_seq":%d,"count":%d,"created":%b,"deduped":%b,'
    b'"performance":%b}'
)
_WRITE_COST: Final = b'{"server_total_ms":%.3f,"wal_append_ms":%.3f,"fsync_ms":%.3f%b}'
_PAGE: Final = (
    b'],"next_from_seq":%d,"head_seq":%d,"earliest_seq":%d,"caught_up":%b,"tombstone":%b,"lag":%d,'
    b'"performance":{"server_total_ms":%.3f,"records_scanned":%d%b}}'
)


def elapsed_ms(request: Request) -> float:
    return (time.perf_counter() - request.started_s) * 1000


def _performance(request: Request) -> dict[str, float]:
    return {"server_total_ms": round(elapsed_ms(request), 3)}


def write_answer(request: Request, result: WriteResult, *, return_seqs: bool) -> Response:
    """Return the response to a write, with status 201 if it created the topic."""
    first, last = result.first_seq, result.last_seq
    if not return_seqs:
        seqs = b""
    elif first == last:
        seqs = b'"seqs":[%d],' % first
    else:
        seqs = b'"seqs":%b,' % _ENCODE(range_list(first, last))
    body = _WRITE % (
        _ENCODE(result.topic),
        first,
        last,
        seqs,
        result.head_seq,
        last - first + 1,
        _BOOL[result.created],
        _BOOL[result.deduped],
        write_performance(result, elapsed_ms(request)),
    )
    return Response(201 if result.created else 200, body)


def write_performance(result: WriteResult, total_ms: float) -> bytes:
    """Return the durations of a write, as JSON for its response."""
    held = b',"throttle_wait_ms":%.3f' % result.throttle_wait_ms if result.throttle_wait_ms else b""
    return _WRITE_COST % (total_ms, result.wal_append_ms, result.fsync_ms, held)


def range_list(first: int, last: int) -> list[int]:
    return list(range(first, last + 1))


def page_answer(request: Request, page: Page) -> Response:
    records = b",".join(page.fragments)
    head = b'{"topic":%b,"records":[' % _ENCODE(page.topic)
    tombstone = b"null" if page.tombstone is None else _ENCODE(page.tombstone)
    cold = b',"cold_segments_read":%d' % page.cold_segments_read if page.cold_segments_read else b""
    next_from_seq, head_seq = page.next_from_seq, page.head_seq
    tail = _PAGE % (
        next_from_seq,
        head_seq,
        page.earliest_seq,
        _BOOL[next_from_seq == head_seq],
        tombstone,
        head_seq - next_from_seq,
        elapsed_ms(request),
        page.records_scanned,
        cold,
    )
    if len(records) > _ONE_BUFFER_BYTES_MAX:
        return Response(200, [head, records, tail])
    return Response(200, head + records + tail)


def put_answer(request: Request, result: PutResult) -> Response:
    body = {
        "topic": result.topic,
        "created": result.created,
        "config": result.config,
        "performance": _performance(request),
    }
    return Response(201 if result.created else 200, _ENCODE(body))


def state_answer(request: Request, state: TopicState) -> Response:
    body: dict[str, object] = {
        "topic": state.topic,
        "type": state.config.type,
        "head_seq": state.head_seq,
        "earliest_seq": state.earliest_seq,
        "next_seq": state.head_seq + 1,
        "count": state.count,
        "bytes": state.bytes,
        "config": state.config,
        "effective_priority": state.effective_priority,
        "last_write_ts": state.last_write_ms,
        "last_read_ts": state.last_read_ms,
    }
    if state.queue is not None:
        body["queue"] = state.queue
    body["performance"] = _performance(request)
    return Response(200, _ENCODE(body))


def list_answer(request: Request, states: Sequence[TopicState], after: str | None) -> Response:
    body: dict[str, object] = {
        "topics": [
            {
                "topic": state.topic,
                "head_seq": state.head_seq,
                "earliest_seq": state.earliest_seq,
                "count": state.count,
                "bytes": state.bytes,
                "durable": state.config.durable,
                "effective_priority": state.effective_priority,
            }
            for state in states
        ]
    }
    if after is not None:
        body["next_cursor"] = write_cursor(after)
    body["performance"] = _performance(request)
    return Response(200, _ENCODE(body))


def remove_answer(request: Request, result: RemoveResult) -> Response:
    body = {
        "topic": result.topic,
        "deleted": result.deleted,
        "routers_removed": result.routers_removed,
        "performance": _performance(request),
    }
    return Response(200, _ENCODE(body))


def delete_answer(request: Request, result: DeleteResult) -> Response:
    body = {
        "topic": result.topic,
        "deleted": result.deleted,
        "earliest_seq": result.earliest_seq,
        "head_seq": result.head_seq,
        "count": result.count,
        "bytes": result.bytes,
        "performance": _performance(request),
    }
    return Response(200, _ENCODE(body))


_CLAIM: Final = b'{"topic":%b,"claimed":[%b],"count":%d,"ready":%d,"performance":{"server_total_ms":%.3f}}'
_RETURNED: Final = (
    b'{"topic":%b,"%b":%d,"skipped":%b,"ready":%d,"in_flight":%d,"performance":{"server_total_ms":%.3f%b}}'
)


def claim_answer(request: Request, result: ClaimResult) -> Response:
    body = _CLAIM % (
        _ENCODE(result.topic),
        b",".join(result.fragments),
        len(result.fragments),
        result.ready,
        elapsed_ms(request),
    )
    return Response(200, body)


def ack_answer(request: Request, result: AckResult) -> Response:
    fsync = b',"fsync_ms":%.3f' % result.fsync_ms if result.fsync_ms > 0 else b""
    return _returned(request, b"acked", result.acked, result, fsync)


def nack_answer(request: Request, result: NackResult) -> Response:
    return _returned(request, b"nacked", result.nacked, result)


def _returned(
    request: Request, verb: bytes, count: int, result: AckResult | NackResult, more: bytes = b""
) -> Response:
    body = _RETURNED % (
        _ENCODE(result.topic),
        verb,
        count,
        _ENCODE(result.skipped) if result.skipped else b"[]",
        result.ready,
        result.in_flight,
        elapsed_ms(request),
        more,
    )
    return Response(200, body)


def extend_answer(request: Request, result: ExtendResult) -> Response:
    body = {
        "topic": result.topic,
        "extended": len(result.deadlines_ms),
        "skipped": result.skipped,
        "deadlines": result.deadlines_ms,
        "performance": {"server_total_ms": round(elapsed_ms(request), 3)},
    }
    return Response(200, _ENCODE(body))


class _Cursor(msgspec.Struct):
    after: str


def write_cursor(after: str) -> str:
    return base64.b64encode(msgspec.json.encode(_Cursor(after))).decode()


def read_cursor(text: str) -> str:
    """Return the name to continue after; an empty cursor means the start. Raise `InvalidRequest`."""
    if not text:
        return ""
    try:
        return msgspec.json.decode(base64.b64decode(text, validate=True), type=_Cursor).after
    except (binascii.Error, ValueError, msgspec.MsgspecError, RecursionError):
        raise InvalidRequest("the cursor was not issued by this server") from None


def damaged_in(topic: str, error: Damaged) -> Damaged:
    """Return the same error with the topic in its message and detail."""
    return Damaged(f'topic "{topic}": {error}', {"topic": topic, **(error.detail or {})})
