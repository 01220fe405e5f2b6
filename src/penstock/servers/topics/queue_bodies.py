"""Request bodies and queries of the queue endpoints, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

import msgspec

from penstock.http import Request
from penstock.servers.topics.bodies import query_number, read_json
from penstock.topics import SEQ_MAX, FreeText, InvalidRequest

__all__ = [
    "ClaimBody",
    "ExtendBody",
    "JobsBody",
    "NackBody",
    "WorkQuery",
    "read_ack",
    "read_claim",
    "read_extend",
    "read_nack",
    "read_work",
]

_U64 = Annotated[int, msgspec.Meta(ge=0)]
_U32 = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
_ABSENT: Final = -1


class ClaimBody(msgspec.Struct):
    """The body of a claim. A missing node is told after it is known that the queue is there."""

    node: FreeText = ""
    max: _U32 = 1
    lease_ms: _U64 | None = None


class JobsBody(msgspec.Struct):
    """The body of an ack, and the beginning of the others."""

    seqs: list[_U64]
    node: FreeText = ""
    lease_ids: list[FreeText] = []


class NackBody(JobsBody):
    delay_ms: _U64 = 0


class ExtendBody(JobsBody, kw_only=True):
    lease_ms: _U64


class WorkQuery(msgspec.Struct):
    """The query of a work stream."""

    node: FreeText
    max: int
    lease_ms: int | None


_CLAIM: Final = msgspec.json.Decoder(ClaimBody)
_ACK: Final = msgspec.json.Decoder(JobsBody)
_NACK: Final = msgspec.json.Decoder(NackBody)
_EXTEND: Final = msgspec.json.Decoder(ExtendBody)


def read_claim(request: Request) -> ClaimBody:
    """Raises `UnsupportedMediaType` or `InvalidRequest`."""
    if not request.body:
        raise InvalidRequest("the body is empty; send a JSON object with the node that claims")
    body = read_json(_CLAIM, request)
    _check_u64("lease_ms", body.lease_ms or 0)
    return body


def read_ack(request: Request) -> JobsBody:
    """Raises `UnsupportedMediaType` or `InvalidRequest`."""
    return _checked(read_json(_ACK, request))


def read_nack(request: Request) -> NackBody:
    """Raises `UnsupportedMediaType` or `InvalidRequest`."""
    body = read_json(_NACK, request)
    _checked(body)
    _check_u64("delay_ms", body.delay_ms)
    return body


def read_extend(request: Request) -> ExtendBody:
    """Raises `UnsupportedMediaType` or `InvalidRequest`."""
    body = read_json(_EXTEND, request)
    _checked(body)
    _check_u64("lease_ms", body.lease_ms)
    return body


def _checked(body: JobsBody) -> JobsBody:
    _check_u64("seqs", max(body.seqs, default=0))
    return body


def _check_u64(name: str, value: int) -> None:
    if value > SEQ_MAX:
        raise InvalidRequest(f"{name} must be below 2^64")


def read_work(query: Mapping[str, str]) -> WorkQuery:
    """What cannot be read is the default."""
    lease_ms = query_number(query, "lease_ms", _ABSENT)
    return WorkQuery(
        node=query.get("node", ""),
        max=query_number(query, "max", 1),
        lease_ms=None if lease_ms == _ABSENT else lease_ms,
    )
