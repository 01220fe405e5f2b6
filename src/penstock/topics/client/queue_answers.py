"""What a server answers to the calls of a worker, as values."""

from __future__ import annotations

from typing import Final

import msgspec

from penstock.jsontext import shallow
from penstock.topics.client.answers import read_answer, read_list
from penstock.topics.jobs import AckResult, ClaimResult, ExtendResult, NackResult

__all__ = ["ack_result", "claim_result", "extend_result", "nack_result"]


class _Performance(msgspec.Struct):
    fsync_ms: float = 0.0


class _Claimed(msgspec.Struct):
    topic: str
    claimed: list[msgspec.Raw]
    ready: int


class _Job(msgspec.Struct):
    seq: int = msgspec.field(name="$seq")


class _Returned(msgspec.Struct):
    topic: str
    skipped: list[int]
    ready: int
    in_flight: int
    acked: int = 0
    nacked: int = 0
    performance: _Performance = msgspec.field(default_factory=_Performance)


class _Extended(msgspec.Struct):
    topic: str
    skipped: list[int]
    deadlines: dict[int, int]


_CLAIMED: Final = msgspec.json.Decoder(_Claimed)
_JOB: Final = msgspec.json.Decoder(_Job)
_RETURNED: Final = msgspec.json.Decoder(_Returned)
_EXTENDED: Final = msgspec.json.Decoder(_Extended)


def claim_result(body: bytes) -> ClaimResult:
    got, jobs = read_list("a claim", _CLAIMED, body, lambda got: got.claimed)
    return ClaimResult(
        topic=got.topic,
        fragments=jobs,
        seqs=[_seq(job) for job in jobs],
        ready=got.ready,
    )


def _seq(job: bytes) -> int:
    try:
        return _JOB.decode(job).seq
    except (msgspec.MsgspecError, RecursionError):
        return read_answer("a claim", _JOB, shallow(job, 1).text).seq


def ack_result(body: bytes) -> AckResult:
    got = read_answer("an ack", _RETURNED, body)
    return AckResult(
        topic=got.topic,
        acked=got.acked,
        skipped=got.skipped,
        ready=got.ready,
        in_flight=got.in_flight,
        fsync_ms=got.performance.fsync_ms,
    )


def nack_result(body: bytes) -> NackResult:
    got = read_answer("a nack", _RETURNED, body)
    return NackResult(
        topic=got.topic,
        nacked=got.nacked,
        skipped=got.skipped,
        ready=got.ready,
        in_flight=got.in_flight,
    )


def extend_result(body: bytes) -> ExtendResult:
    got = read_answer("an extension", _EXTENDED, body)
    return ExtendResult(topic=got.topic, deadlines_ms=got.deadlines, skipped=got.skipped)
