"""What a worker of a queue gets and is told, as plain values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from penstock.jsontext import members
from penstock.topics.errors import InvalidRequest

__all__ = [
    "AckResult",
    "ClaimResult",
    "ClaimedJob",
    "ExtendResult",
    "NackResult",
    "QueueCounts",
    "job_of",
    "lease_name",
    "parse_lease_ids",
]

_ABSENT = msgspec.Raw()
_LEASE_NAME: Final = re.compile(r"lease_([0-9a-f]{1,16})")


class ClaimedJob(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One job and the lease it is held under; `data` and `meta` are JSON text."""

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
        """None if the job has none."""
        return None if self.meta_text is _ABSENT else self.meta_text


_JOB = msgspec.json.Decoder(ClaimedJob)
_TEXTS = ("data", "meta")


def job_of(fragment: bytes) -> ClaimedJob:
    """A job from its JSON object, of any depth."""
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
    """One answer to a claim. `fragments` are the jobs as JSON objects, ready to be joined by commas."""

    topic: str
    fragments: Sequence[bytes]
    seqs: Sequence[int]
    ready: int
    """Jobs that are left for others."""

    def jobs(self) -> list[ClaimedJob]:
        """The jobs as objects, for callers that live in the same process."""
        return [job_of(fragment) for fragment in self.fragments]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueCounts:
    """`ready` can be claimed now, `in_flight` are held; `dead_lettered` counts from the queue's creation."""

    ready: int
    in_flight: int
    dead_lettered: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AckResult:
    """Jobs that are done and deleted, and those that the caller did not hold."""

    topic: str
    acked: int
    skipped: Sequence[int]
    ready: int
    in_flight: int
    fsync_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NackResult:
    """Jobs that were given back, and those that the caller did not hold."""

    topic: str
    nacked: int
    skipped: Sequence[int]
    ready: int
    in_flight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendResult:
    """New ends of leases by sequence number, and the jobs that the caller did not hold."""

    topic: str
    deadlines_ms: dict[int, int]
    skipped: Sequence[int]


def lease_name(lease_id: int) -> str:
    """The fencing token of a lease."""
    return f"lease_{lease_id:x}"


def parse_lease_ids(names: Sequence[str]) -> list[int]:
    """The numbers of fencing tokens, 0 for an empty one. Raises `InvalidRequest`."""
    return [_parse(name) if name else 0 for name in names]


def _parse(name: str) -> int:
    found = _LEASE_NAME.fullmatch(name)
    number = int(found[1], 16) if found is not None else 0
    if not number:
        raise InvalidRequest(
            f"{name[:40]!r} is no lease id; send what the claim gave out, or an empty text to go without"
        )
    return number
