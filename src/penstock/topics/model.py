"""What goes into the engine and what comes out, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec

from penstock.jsontext import members, shallow, stored_problem
from penstock.topics.config import TopicConfig
from penstock.topics.jobs import QueueCounts
from penstock.topics.names import FreeText

__all__ = [
    "BareRecord",
    "DeleteResult",
    "NewRecord",
    "Page",
    "Predicate",
    "PutResult",
    "Record",
    "RemoveResult",
    "Tombstone",
    "TombstoneReason",
    "TopicState",
    "UnreadableRecord",
    "WriteResult",
    "record_of",
    "records_of",
    "unreadable",
]

TombstoneReason: TypeAlias = Literal[
    "cap", "ttl", "mixed", "source_trim", "lost", "recreated", "from_seq_too_old"
]
"""The last one is only for who watches: already the place where it began was gone, by whatever cause."""


class BareRecord(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """One record of a write that has nothing but data, as most have."""

    data: msgspec.Raw


class NewRecord(BareRecord, gc=False, forbid_unknown_fields=False):
    """One record of a write. `data` and `meta` are JSON text; it is checked, compacted and kept as it is."""

    tag: FreeText | None = None
    node: FreeText | None = None
    meta: msgspec.Raw | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicate:
    """Which tags a delete means: one tag, or every tag that starts with `value`."""

    value: str
    is_prefix: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tombstone:
    """Records `gap_from` to `gap_to` are gone without anybody having deleted them."""

    gap_from: int
    gap_to: int
    reason: TombstoneReason
    missed_estimate: int
    earliest_seq: int
    head_seq: int


_ABSENT = msgspec.Raw()


class Record(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One stored record as a diff tells it; `data` and `meta` are JSON text."""

    seq: int = msgspec.field(name="$seq")
    ts_ms: int = msgspec.field(name="$ts")
    data: msgspec.Raw
    tag: str | None = msgspec.field(name="$tag", default=None)
    node: str | None = msgspec.field(name="$node", default=None)
    meta_text: msgspec.Raw = msgspec.field(name="meta", default=_ABSENT)

    @property
    def meta(self) -> msgspec.Raw | None:
        """None if the record has none, or it was not asked for."""
        return None if self.meta_text is _ABSENT else self.meta_text


_RECORD = msgspec.json.Decoder(Record)
_RECORDS = msgspec.json.Decoder(list[Record])
_TEXTS = ("data", "meta")


def records_of(fragments: Sequence[bytes]) -> list[Record]:
    """Records from their JSON objects. One nested deeper than a decoder goes is among them, as its text."""
    try:
        return _RECORDS.decode(b"[" + b",".join(fragments) + b"]")
    except RecursionError:
        return [record_of(fragment) for fragment in fragments]


def record_of(fragment: bytes) -> Record:
    """One record from its JSON object, of any depth."""
    try:
        return _RECORD.decode(fragment)
    except RecursionError:
        found = members(fragment)
        plain = [
            b"%b:%b" % (msgspec.json.encode(name), b"null" if name in _TEXTS else text)
            for name, text in found.items()
        ]
        meta = msgspec.Raw(found["meta"]) if "meta" in found else _ABSENT
        record = _RECORD.decode(b"{" + b",".join(plain) + b"}")
        return msgspec.structs.replace(record, data=msgspec.Raw(found["data"]), meta_text=meta)


@dataclass(frozen=True, slots=True, kw_only=True)
class PutResult:
    topic: str
    created: bool
    config: TopicConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveResult:
    """What became of a topic that was to be deleted; `routers_removed` is sorted."""

    topic: str
    deleted: bool
    routers_removed: tuple[str, ...] = ()


class WriteResult(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Where the records of one write stand: `first_seq` to `last_seq`, without a gap."""

    topic: str
    first_seq: int
    last_seq: int
    head_seq: int
    created: bool
    deduped: bool
    wal_append_ms: float = 0.0
    fsync_ms: float = 0.0
    throttle_wait_ms: float = 0.0
    """How long the commit was held open for more, under pressure."""

    @property
    def count(self) -> int:
        return self.last_seq - self.first_seq + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicState:
    """One topic at one moment. `count` and `bytes` are exact: nothing deleted or expired is in them."""

    topic: str
    config: TopicConfig
    head_seq: int
    earliest_seq: int
    count: int
    bytes: int
    effective_priority: int
    last_write_ms: int | None
    last_read_ms: int | None
    queue: QueueCounts | None = None
    """None for a log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteResult:
    """What a delete of records did; `deleted` counts those that were live before."""

    topic: str
    deleted: int
    earliest_seq: int
    head_seq: int
    count: int
    bytes: int


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """One answer to a diff. `fragments` are the records as JSON objects, ready to be joined by commas."""

    topic: str
    fragments: Sequence[bytes]
    next_from_seq: int
    head_seq: int
    earliest_seq: int
    tombstone: Tombstone | None
    records_scanned: int
    cold_segments_read: int = 0

    def records(self) -> list[Record]:
        """The records as objects, for callers that live in the same process."""
        return records_of(self.fragments)

    @property
    def caught_up(self) -> bool:
        return self.next_from_seq == self.head_seq

    @property
    def lag(self) -> int:
        return self.head_seq - self.next_from_seq


class UnreadableRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A stored record that decoders may refuse, by its place; an earlier version took it."""

    seq: int
    ts_ms: int
    reason: str


class _Place(msgspec.Struct):
    seq: int = msgspec.field(name="$seq")
    ts_ms: int = msgspec.field(name="$ts")


_PLACE = msgspec.json.Decoder(_Place)


def unreadable(fragment: bytes) -> UnreadableRecord | None:
    """Where a record stands that breaks the limits of JSON, and why; None for one that decodes."""
    problem = stored_problem(fragment)
    if problem is None:
        return None
    place = _PLACE.decode(shallow(fragment, 1).text)
    return UnreadableRecord(seq=place.seq, ts_ms=place.ts_ms, reason=problem)
