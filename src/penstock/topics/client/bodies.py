"""What a client sends: records and selectors as the JSON of the contract."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from penstock.jsontext import json_problem
from penstock.limits import JSON_DEPTH_MAX
from penstock.topics.config import TopicConfig
from penstock.topics.errors import BatchTooLarge, InvalidRequest
from penstock.topics.limits import BATCH_RECORDS_MAX
from penstock.topics.model import NewRecord, Predicate

__all__ = ["delete_body", "diff_body", "match_tuple", "put_body", "write_body"]


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


class _Diff(msgspec.Struct, omit_defaults=True):
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
"""The body of a write has three levels around a value."""
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
    """The body of a write. Raises `InvalidRequest` for a value that JSON cannot hold."""
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
        return _Record(data=_within(place, "data", _ENCODER.encode(record)), tag=tag)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequest(f"record {place} cannot be written as JSON: {error}") from error


def _checked(place: int, part: str, text: bytes | bytearray | memoryview | msgspec.Raw) -> msgspec.Raw:
    """JSON text goes out as it is, so it must be one whole value: more could pass for another record."""
    plain = _within(place, part, bytes(text))
    try:
        return _ANY_JSON.decode(plain)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{part} of record {place} is not JSON text: {error}") from error


def _within(place: int, part: str, text: bytes) -> msgspec.Raw:
    """The text, if it keeps the limits of a body with what is around it. Raises `InvalidRequest`."""
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
        _Diff(
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
    """The body of a delete. Raises `InvalidRequest` when it selects nothing."""
    if before_seq is None and match is None:
        raise InvalidRequest("a delete needs before_seq, match, or both")
    return _encoded(_Delete(before_seq=before_seq, match=match_tuple(match)))


def match_tuple(match: Predicate | str | None) -> tuple[str, str, str] | None:
    """A predicate as it is sent; a string means that tag exactly."""
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
