"""Reads and validates request bodies and queries of the `/v0` API."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Final, Generic, Literal, TypeVar

import msgspec

from penstock.http import JSON, Request, UnsupportedMediaType
from penstock.jsontext import json_problem, parts_problem
from penstock.limits import JSON_DEPTH_MAX
from penstock.topics import (
    NODE_BYTES_MAX,
    SEQ_MAX,
    WATCH_BATCH_BYTES_DEFAULT,
    WATCH_TOPICS_MAX,
    BareRecord,
    Durability,
    FreeText,
    InvalidRequest,
    NewRecord,
    SubscriptionFilter,
    TopicConfig,
    TopicName,
    parse_match,
)

T = TypeVar("T")

# The decoder cannot enforce an upper bound of 64 bits; `_check_u64` does.
_U64 = Annotated[int, msgspec.Meta(ge=0)]
_U32 = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class WireRecord(NewRecord, gc=False):
    """A record whose `meta` is raw JSON text. The engine treats `null` as absent."""

    meta: msgspec.Raw = None  # type: ignore[assignment]


R = TypeVar("R", bound=BareRecord)


class WriteBody(msgspec.Struct, Generic[R]):
    """The body of a write."""

    records: list[R]
    node: FreeText | None = None
    idempotency_key: FreeText | None = None
    create: bool | None = None
    config: TopicConfig | None = None
    disable_backpressure: bool = False


class DiffBody(msgspec.Struct):
    """The body of a diff."""

    from_seq: _U64 = 0
    limit: _U32 = 0
    node: FreeText | list[FreeText] | None = None
    include_tags: bool = False
    include_meta: bool = True
    wait_ms: _U32 = 0
    max_batch_bytes: _U64 = 0
    match: object = None

    @property
    def nodes(self) -> tuple[str, ...]:
        if self.node is None:
            return ()
        return (self.node,) if isinstance(self.node, str) else tuple(self.node)


class DeleteBody(msgspec.Struct):
    """The body of a delete of records; it has at least one selector."""

    before_seq: _U64 | None = None
    match: object = None


_WRITE: Final = msgspec.json.Decoder(WriteBody[WireRecord])
_WRITE_BARE: Final = msgspec.json.Decoder(WriteBody[BareRecord])
_DIFF: Final = msgspec.json.Decoder(DiffBody)
_DELETE: Final = msgspec.json.Decoder(DeleteBody)
_CONFIG: Final = msgspec.json.Decoder(TopicConfig)

_CHOICES: Final = {
    "type": ("log", "queue"),
    "discard": ("old", "reject"),
    "durability": tuple(durability.value for durability in Durability),
}
_WRONG_CHOICE: Final = re.compile(
    r"^Invalid enum value .* - at `\$\.(?:config\.)?(?P<field>\w+)`$", re.DOTALL
)
_TRUNCATED: Final = "Input data was truncated"
_TOO_DEEP: Final = (
    f"the body is nested more than {JSON_DEPTH_MAX} levels deep; send JSON of at most {JSON_DEPTH_MAX} levels"
)
_MALFORMED: Final = "JSON is malformed"
_HALF_PAIR_ERRORS: Final = ("surrogate pair", "end of hex escape")
_HALF_PAIR: Final = re.compile(rb"(?<!\\)(?:\\\\)*\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")
_RECORD_LEVELS: Final = 3
"""Levels around the data of a record in the body of a write."""
_TAIL_BYTES: Final = 32
"""This close to the end, the decoder reports half of a pair as a truncated body."""


def read_write(request: Request) -> WriteBody[BareRecord] | WriteBody[WireRecord]:
    """Read a write. Raise `UnsupportedMediaType` or `InvalidRequest`."""
    text = _text(request)
    body: WriteBody[BareRecord] | WriteBody[WireRecord]
    try:
        body = _WRITE_BARE.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        # Some record has more than data, or the body is invalid: the other decoder reports the error.
        body = _read(_WRITE, request)
    else:
        _check_records(text, body)
    if body.idempotency_key is None:
        body.idempotency_key = _key_of_header(request)
    return body


def read_diff(request: Request) -> DiffBody:
    """Read a diff; an empty body selects everything. Raise `UnsupportedMediaType` or `InvalidRequest`."""
    if not request.body:
        return DiffBody()
    body = _read(_DIFF, request)
    _check_u64("from_seq", body.from_seq)
    _check_u64("max_batch_bytes", body.max_batch_bytes)
    for node in body.nodes:
        if len(node.encode()) > NODE_BYTES_MAX:
            raise InvalidRequest(f"a node has at most {NODE_BYTES_MAX} bytes")
    return body


def read_delete(request: Request) -> DeleteBody:
    """Read a delete. Raise `UnsupportedMediaType` or `InvalidRequest`, also for a body without a selector."""
    body = _read(_DELETE, request)
    if body.before_seq is None and body.match is None:
        raise InvalidRequest("select the records to delete: send before_seq, match, or both")
    if body.before_seq is not None:
        _check_u64("before_seq", body.before_seq)
    return body


def read_config(request: Request) -> TopicConfig:
    """Read a config; an empty body means the defaults. Raise `UnsupportedMediaType` or `InvalidRequest`."""
    return _read(_CONFIG, request) if request.body else TopicConfig()


def query_flag(query: Mapping[str, str], name: str, default: bool) -> bool:
    """Return True for `true` or `1`, False for `false` or `0`, and the default for anything else."""
    text = query.get(name)
    if text in ("true", "1"):
        return True
    return False if text in ("false", "0") else default


def query_number(query: Mapping[str, str], name: str, default: int) -> int:
    """Return a whole number, or the default for anything else."""
    text = query.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 20 else default


def read_json(decoder: msgspec.json.Decoder[T], request: Request) -> T:
    """Decode the body. Raise `UnsupportedMediaType` or `InvalidRequest`."""
    return _read(decoder, request)


def _read(decoder: msgspec.json.Decoder[T], request: Request) -> T:
    text = _text(request)
    problem = json_problem(text)
    if problem is not None:
        raise InvalidRequest(f"the body {problem}")
    return _decoded(decoder, text)


def _check_records(text: bytes, body: WriteBody[BareRecord] | WriteBody[WireRecord]) -> None:
    """Raise `InvalidRequest` for a record that a later stage may be unable to decode."""
    records = body.records
    if len(records) == 1:
        problem = json_problem(text)
    else:
        parts = [record.data for record in records]
        parts += [record.meta for record in records if isinstance(record, WireRecord) and record.meta]
        problem = parts_problem(text, parts, levels=_RECORD_LEVELS)
    if problem is not None:
        raise InvalidRequest(f"the body {problem}")


def _text(request: Request) -> bytes:
    content_type = request.headers.get(b"content-type", b"")
    if content_type != JSON and not content_type.lstrip().lower().startswith(JSON):
        raise UnsupportedMediaType("send the body as `Content-Type: application/json`")
    body = request.body
    if not body.isascii():
        # The decoder does not check the text of payloads.
        try:
            str(body, "utf-8")
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    return body


def _decoded(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except RecursionError:
        raise InvalidRequest(_TOO_DEEP) from None
    except msgspec.MsgspecError as error:
        raise InvalidRequest(_decode_error(body, str(error))) from None


def _decode_error(body: bytes, text: str) -> str:
    """Return the decoder's message, or a better one where the decoder reports the wrong mistake."""
    if not body.strip():
        return "the body is empty; send a JSON object"
    if text.startswith(_MALFORMED) and any(words in text for words in _HALF_PAIR_ERRORS):
        return f"text with half of a surrogate pair has no UTF-8 form: {text}"
    if text == _TRUNCATED and _HALF_PAIR.search(body[-_TAIL_BYTES:]):
        return "text with half of a surrogate pair has no UTF-8 form; it is near the end of the body"
    if (place := _WRONG_CHOICE.search(text)) and (choices := _CHOICES.get(place["field"])):
        text = f"{text}; expected one of {', '.join(choices)}"
    return f"the body is invalid: {text}"


def _check_u64(name: str, value: int) -> None:
    if value > SEQ_MAX:
        raise InvalidRequest(f"{name} must be below 2^64")


def _key_of_header(request: Request) -> str | None:
    header = request.headers.get(b"idempotency-key")
    if not header:
        return None
    try:
        return header.decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest("the Idempotency-Key header is not UTF-8") from None


_ABSENT: Final = -1


class ClaimBody(msgspec.Struct):
    """The body of a claim. A missing node is reported only after the queue is known to exist."""

    node: FreeText = ""
    max: _U32 = 1
    lease_ms: _U64 | None = None


class JobsBody(msgspec.Struct):
    """The body of an ack, and the common part of the others."""

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
    """Read a claim. Raise `UnsupportedMediaType` or `InvalidRequest`."""
    if not request.body:
        raise InvalidRequest("the body is empty; send a JSON object with the node that claims")
    body = read_json(_CLAIM, request)
    _check_u64("lease_ms", body.lease_ms or 0)
    return body


def read_ack(request: Request) -> JobsBody:
    """Read an ack. Raise `UnsupportedMediaType` or `InvalidRequest`."""
    return _checked(read_json(_ACK, request))


def read_nack(request: Request) -> NackBody:
    """Read a nack. Raise `UnsupportedMediaType` or `InvalidRequest`."""
    body = read_json(_NACK, request)
    _checked(body)
    _check_u64("delay_ms", body.delay_ms)
    return body


def read_extend(request: Request) -> ExtendBody:
    """Read an extend. Raise `UnsupportedMediaType` or `InvalidRequest`."""
    body = read_json(_EXTEND, request)
    _checked(body)
    _check_u64("lease_ms", body.lease_ms)
    return body


def _checked(body: JobsBody) -> JobsBody:
    _check_u64("seqs", max(body.seqs, default=0))
    return body


def read_work(query: Mapping[str, str]) -> WorkQuery:
    """Read the query of a work stream; invalid values give the defaults."""
    lease_ms = query_number(query, "lease_ms", _ABSENT)
    return WorkQuery(
        node=query.get("node", ""),
        max=query_number(query, "max", 1),
        lease_ms=None if lease_ms == _ABSENT else lease_ms,
    )


HEARTBEAT_MS_MAX: Final = 60_000
HEARTBEAT_MS_DEFAULT: Final = 15_000


class Start(msgspec.Struct, frozen=True):
    """The start of a subscription: after a sequence number, or at the current head."""

    from_seq: _U64 = 0
    tail: bool = False


class WatchBody(msgspec.Struct):
    """The body of a new watch."""

    topics: dict[TopicName, Start]
    node: FreeText | list[FreeText] | None = None
    limit: _U32 = 0
    max_batch_bytes: _U64 = WATCH_BATCH_BYTES_DEFAULT
    heartbeat_ms: _U64 = HEARTBEAT_MS_DEFAULT
    include_meta: bool = True
    include_data: bool = True
    include_tags: bool = False
    consistency: Literal["eventual", "strong"] = "eventual"
    match: object = None


_WATCH: Final = msgspec.json.Decoder(WatchBody)


def read_watch(request: Request) -> tuple[WatchBody, SubscriptionFilter]:
    """Read a new watch and its filter. Raise `UnsupportedMediaType` or `InvalidRequest`."""
    body = read_json(_WATCH, request)
    prefixes = sum(name.endswith("*") for name in body.topics)
    if not body.topics or max(prefixes, len(body.topics) - prefixes) > WATCH_TOPICS_MAX:
        raise InvalidRequest(f"a watch names 1 to {WATCH_TOPICS_MAX} topics, not {len(body.topics)}")
    check_starts(body.topics)
    want = want_of(
        node=body.node,
        limit=body.limit,
        max_batch_bytes=body.max_batch_bytes,
        include_meta=body.include_meta,
        include_data=body.include_data,
        include_tags=body.include_tags,
        match=body.match,
        strong=body.consistency == "strong",
    )
    return body, want


def check_starts(topics: dict[str, Start]) -> None:
    """Raise `InvalidRequest` for a sequence above 64 bits, which the decoder does not reject."""
    for start in topics.values():
        if start.from_seq > SEQ_MAX:
            raise InvalidRequest("from_seq must be below 2^64")


def want_of(
    *,
    node: str | list[str] | None,
    limit: int,
    max_batch_bytes: int,
    include_meta: bool,
    include_data: bool,
    include_tags: bool,
    match: object,
    strong: bool = False,
) -> SubscriptionFilter:
    """Return the filter of a subscription. Raise `InvalidRequest` for an invalid node or predicate."""
    nodes = [node] if isinstance(node, str) else node or []
    if any(len(one.encode()) > NODE_BYTES_MAX for one in nodes):
        raise InvalidRequest(f"a node has at most {NODE_BYTES_MAX} bytes")
    if max_batch_bytes > SEQ_MAX:
        raise InvalidRequest("max_batch_bytes must be below 2^64")
    return SubscriptionFilter.of(
        limit=limit,
        max_batch_bytes=max_batch_bytes,
        nodes=nodes,
        include_meta=include_meta,
        include_data=include_data,
        include_tags=include_tags,
        match=None if match is None else parse_match(match),
        strong=strong,
    )


def prefix_of(name: str) -> str | None:
    """Return the prefix before a `*` at the end of `name`, or None. No topic's name contains a `*`."""
    return name[:-1] if name.endswith("*") else None
