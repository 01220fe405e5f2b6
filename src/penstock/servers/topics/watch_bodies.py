"""What a client wants to follow, checked."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from penstock.http import Request
from penstock.servers.topics.bodies import read_json
from penstock.topics import (
    NODE_BYTES_MAX,
    SEQ_MAX,
    WATCH_BATCH_BYTES_DEFAULT,
    WATCH_TOPICS_MAX,
    FreeText,
    InvalidRequest,
    TopicName,
    Want,
    parse_match,
)

__all__ = ["HEARTBEAT_MS_MAX", "Start", "WatchBody", "prefix_of", "read_watch", "want_of"]

HEARTBEAT_MS_MAX: Final = 60_000
HEARTBEAT_MS_DEFAULT: Final = 15_000
_U64 = Annotated[int, msgspec.Meta(ge=0)]
_U32 = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class Start(msgspec.Struct, frozen=True):
    """Where to begin in a topic: behind a sequence, or at the head as it is now."""

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


def read_watch(request: Request) -> tuple[WatchBody, Want]:
    """Raises `UnsupportedMediaType` or `InvalidRequest`."""
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
    """Raises `InvalidRequest` for a number above 64 bits, for which the decoder knows no bound."""
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
) -> Want:
    """Raises `InvalidRequest` for a node or a predicate that can be none."""
    nodes = [node] if isinstance(node, str) else node or []
    if any(len(one.encode()) > NODE_BYTES_MAX for one in nodes):
        raise InvalidRequest(f"a node has at most {NODE_BYTES_MAX} bytes")
    if max_batch_bytes > SEQ_MAX:
        raise InvalidRequest("max_batch_bytes must be below 2^64")
    return Want.of(
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
    """What stands before a `*` at the end of a name, which no topic has; None if there is none."""
    return name[:-1] if name.endswith("*") else None
