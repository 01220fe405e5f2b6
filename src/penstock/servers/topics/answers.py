"""Response bodies. Records are joined as the engine keeps them; the rest is small and put around them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import msgspec

from penstock.http import Request, Response
from penstock.servers.topics.cursor import write_cursor
from penstock.topics import DeleteResult, Page, PutResult, RemoveResult, TopicState, WriteResult

__all__ = [
    "delete_answer",
    "list_answer",
    "page_answer",
    "put_answer",
    "remove_answer",
    "state_answer",
    "write_answer",
    "write_performance",
]

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
    """201 when the write created the topic."""
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
    """What a write cost, as every answer to one says it."""
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
