"""The arguments and results of the engine as plain values: records, pages, predicates and jobs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import msgspec

from penstock.jsontext import members, shallow, stored_problem
from penstock.topics.config import TopicConfig
from penstock.topics.errors import InvalidRequest
from penstock.topics.names import FreeText

_ABSENT = msgspec.Raw()
_LEASE_NAME: Final = re.compile(r"lease_([0-9a-f]{1,16})")


class ClaimedJob(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One job and its lease. `data` and `meta` are JSON text."""

    seq: int = msgspec.field(name="$seq")
    lease_id: str
    deadline_ms: int = msgspec.field(name="deadline")
    ts_ms: int = msgspec.field(name="$ts")
    deliveries: int
    data: msgspec.Raw
    tag: str | None = msgspec.field(name="$tag", default=None)
    meta_text: msgspec.Raw = msgspec.field(name="meta", default=_ABSENT)

    @property
    def meta(self) -> msgspec.Raw | None:
        """Return the meta, or None if the job has none."""
        return None if self.meta_text is _ABSENT else self.meta_text


_JOB = msgspec.json.Decoder(ClaimedJob)
_TEXTS = ("data", "meta")


def job_of(fragment: bytes) -> ClaimedJob:
    """Decode a job from its JSON object, of any depth."""
    try:
        return _JOB.decode(fragment)
    except RecursionError:
        found = members(fragment)
        plain = [
            b"%b:%b" % (msgspec.json.encode(name), b"null" if name in _TEXTS else text)
            for name, text in found.items()
        ]
        meta = msgspec.Raw(found["meta"]) if "meta" in found else _ABSENT
        job = _JOB.decode(b"{" + b",".join(plain) + b"}")
        return msgspec.structs.replace(job, data=msgspec.Raw(found["data"]), meta_text=meta)


class ClaimResult(msgspec.Struct, frozen=True, kw_only=True):
    """A response to a claim. `fragments` are the jobs as JSON objects, ready to be joined by commas."""

    topic: str
    fragments: Sequence[bytes]
    seqs: Sequence[int]
    ready: int
    """The number of ready jobs that remain."""

    def jobs(self) -> list[ClaimedJob]:
        """Return the jobs as objects, for callers in the same process."""
        return [job_of(fragment) for fragment in self.fragments]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueCounts:
    """The job counts of a queue. `dead_lettered` counts from the queue's creation."""

    ready: int
    in_flight: int
    dead_lettered: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AckResult:
    """Acked and deleted jobs, and those that the caller did not hold."""

    topic: str
    acked: int
    skipped: Sequence[int]
    ready: int
    in_flight: int
    fsync_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NackResult:
    """Jobs returned to the queue, and those that the caller did not hold."""

    topic: str
    nacked: int
    skipped: Sequence[int]
    ready: int
    in_flight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendResult:
    """New lease deadlines by sequence number, and the jobs that the caller did not hold."""

    topic: str
    deadlines_ms: dict[int, int]
    skipped: Sequence[int]


def lease_name(lease_id: int) -> str:
    """Return the fencing token of a lease."""
    return f"lease_{lease_id:x}"


def parse_lease_ids(names: Sequence[str]) -> list[int]:
    """Return the numbers of fencing tokens, 0 for an empty one. Raise `InvalidRequest`."""
    return [_parse(name) if name else 0 for name in names]


def _parse(name: str) -> int:
    found = _LEASE_NAME.fullmatch(name)
    number = int(found[1], 16) if found is not None else 0
    if not number:
        raise InvalidRequest(
            f"{name[:40]!r} is not a lease id; send the lease_id of the claim, or an empty text for any lease"
        )
    return number


TombstoneReason: TypeAlias = Literal[
    "cap", "ttl", "mixed", "source_trim", "lost", "recreated", "from_seq_too_old"
]
"""Why records are missing. The last reason is only for watches: their start position was already lost."""


class BareRecord(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """One record of a write with only data, the common case."""

    data: msgspec.Raw


class NewRecord(BareRecord, gc=False, forbid_unknown_fields=False):
    """One record of a write. `data` and `meta` are JSON text, which is checked and compacted."""

    tag: FreeText | None = None
    node: FreeText | None = None
    meta: msgspec.Raw | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicate:
    """A tag filter: one tag, or every tag that starts with `value`."""

    value: str
    is_prefix: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tombstone:
    """A gap in a topic: records `gap_from` to `gap_to` were lost without a deletion."""

    gap_from: int
    gap_to: int
    reason: TombstoneReason
    missed_estimate: int
    earliest_seq: int
    head_seq: int


class Record(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One stored record in a response to a diff. `data` and `meta` are JSON text."""

    seq: int = msgspec.field(name="$seq")
    ts_ms: int = msgspec.field(name="$ts")
    data: msgspec.Raw
    tag: str | None = msgspec.field(name="$tag", default=None)
    node: str | None = msgspec.field(name="$node", default=None)
    meta_text: msgspec.Raw = msgspec.field(name="meta", default=_ABSENT)

    @property
    def meta(self) -> msgspec.Raw | None:
        """Return the meta, or None if the record has none or the caller did not ask for it."""
        return None if self.meta_text is _ABSENT else self.meta_text


_RECORD = msgspec.json.Decoder(Record)
_RECORDS = msgspec.json.Decoder(list[Record])


def records_of(fragments: Sequence[bytes]) -> list[Record]:
    """Decode records from their JSON objects, including records nested deeper than the decoder allows."""
    try:
        return _RECORDS.decode(b"[" + b",".join(fragments) + b"]")
    except RecursionError:
        return [record_of(fragment) for fragment in fragments]


def record_of(fragment: bytes) -> Record:
    """Decode one record from its JSON object, of any depth."""
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
    """The result of deleting a topic. `routers_removed` is sorted."""

    topic: str
    deleted: bool
    routers_removed: tuple[str, ...] = ()


class WriteResult(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The result of a write: its records are `first_seq` to `last_seq`, without a gap."""

    topic: str
    first_seq: int
    last_seq: int
    head_seq: int
    created: bool
    deduped: bool
    wal_append_ms: float = 0.0
    fsync_ms: float = 0.0
    throttle_wait_ms: float = 0.0
    """How long the commit was delayed under overload to include more writes."""

    @property
    def count(self) -> int:
        return self.last_seq - self.first_seq + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicState:
    """One topic at one moment. `count` and `bytes` are exact and exclude deleted and expired records."""

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
    """The result of deleting records. `deleted` counts those that were live."""

    topic: str
    deleted: int
    earliest_seq: int
    head_seq: int
    count: int
    bytes: int


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """A response to a diff. `fragments` are the records as JSON objects, ready to be joined by commas."""

    topic: str
    fragments: Sequence[bytes]
    next_from_seq: int
    head_seq: int
    earliest_seq: int
    tombstone: Tombstone | None
    records_scanned: int
    cold_segments_read: int = 0

    def records(self) -> list[Record]:
        """Return the records as objects, for callers in the same process."""
        return records_of(self.fragments)

    @property
    def caught_up(self) -> bool:
        return self.next_from_seq == self.head_seq

    @property
    def lag(self) -> int:
        return self.head_seq - self.next_from_seq


class UnreadableRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The position of a stored record that decoders may reject. An earlier version accepted it."""

    seq: int
    ts_ms: int
    reason: str


class _Place(msgspec.Struct):
    seq: int = msgspec.field(name="$seq")
    ts_ms: int = msgspec.field(name="$ts")


_PLACE = msgspec.json.Decoder(_Place)


def unreadable(fragment: bytes) -> UnreadableRecord | None:
    """Return which record breaks the limits of JSON, and why, or None for one that decodes."""
    problem = stored_problem(fragment)
    if problem is None:
        return None
    place = _PLACE.decode(shallow(fragment, 1).text)
    return UnreadableRecord(seq=place.seq, ts_ms=place.ts_ms, reason=problem)


_FORMS = '["tag","Eq",value], ["tag","Glob","prefix*"] or a bare string'


def parse_match(value: object) -> Predicate:
    """Parse the predicate in a decoded JSON value. Raise `InvalidRequest` if it is not a predicate."""
    if isinstance(value, str):
        return Predicate(value=value[:-1], is_prefix=True) if value.endswith("*") else Predicate(value=value)
    if not isinstance(value, (list, tuple)) or len(value) != 3 or not isinstance(value[2], str):
        raise InvalidRequest(f"a predicate is {_FORMS}")
    field, operator, text = value
    if field != "tag":
        raise InvalidRequest(f"only the tag can be matched; a predicate is {_FORMS}")
    if operator == "Eq":
        return Predicate(value=text)
    if operator != "Glob":
        raise InvalidRequest(f"the operator is neither Eq nor Glob; a predicate is {_FORMS}")
    if not text.endswith("*"):
        raise InvalidRequest("a Glob ends in '*'; what stands before it is taken literally")
    return Predicate(value=text[:-1], is_prefix=True)


def canonical(predicate: Predicate) -> tuple[str, str, str]:
    """Return the predicate as clients see it."""
    if predicate.is_prefix:
        return ("tag", "Glob", predicate.value + "*")
    return ("tag", "Eq", predicate.value)


def matches(predicate: Predicate, tag: str | None) -> bool:
    """Return whether a record with this tag matches. A record without a tag never does."""
    if tag is None:
        return False
    return tag.startswith(predicate.value) if predicate.is_prefix else tag == predicate.value
