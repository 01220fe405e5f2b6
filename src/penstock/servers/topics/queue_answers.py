"""Response bodies of the queue endpoints. Jobs are joined as the engine keeps them."""

from __future__ import annotations

from typing import Final

import msgspec

from penstock.http import Request, Response
from penstock.servers.topics.answers import elapsed_ms
from penstock.topics import AckResult, ClaimResult, ExtendResult, NackResult

__all__ = ["ack_answer", "claim_answer", "extend_answer", "nack_answer"]

_ENCODE: Final = msgspec.json.Encoder().encode
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
