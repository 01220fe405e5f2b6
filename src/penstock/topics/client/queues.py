"""The calls of a worker: claim, ack, nack and extend jobs, or receive them from a work stream."""

from __future__ import annotations

import abc
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final, TypeAlias
from urllib.parse import quote

import httpx
import msgspec

from penstock.clock import Clock
from penstock.errors import PenstockError
from penstock.jsontext import shallow
from penstock.retry import Backoff
from penstock.topics.client.connection import Connection, Repeat
from penstock.topics.client.errors import (
    Effect,
    Failure,
    UnexpectedAnswer,
    Unreachable,
    failure_of_answer,
    failure_of_transport,
)
from penstock.topics.client.models import read_answer, read_list
from penstock.topics.client.watch import Frame, FrameReader, problem_of
from penstock.topics.errors import InvalidRequest, ShuttingDown, TopicNotFound
from penstock.topics.model import AckResult, ClaimedJob, ClaimResult, ExtendResult, NackResult, job_of
from penstock.topics.names import check_topic_name


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
    decoded, jobs = read_list("a claim", _CLAIMED, body, lambda decoded: decoded.claimed)
    return ClaimResult(
        topic=decoded.topic,
        fragments=jobs,
        seqs=[_seq(job) for job in jobs],
        ready=decoded.ready,
    )


def _seq(job: bytes) -> int:
    try:
        return _JOB.decode(job).seq
    except (msgspec.MsgspecError, RecursionError):
        return read_answer("a claim", _JOB, shallow(job, 1).text).seq


def ack_result(body: bytes) -> AckResult:
    decoded = read_answer("an ack", _RETURNED, body)
    return AckResult(
        topic=decoded.topic,
        acked=decoded.acked,
        skipped=decoded.skipped,
        ready=decoded.ready,
        in_flight=decoded.in_flight,
        fsync_ms=decoded.performance.fsync_ms,
    )


def nack_result(body: bytes) -> NackResult:
    decoded = read_answer("a nack", _RETURNED, body)
    return NackResult(
        topic=decoded.topic,
        nacked=decoded.nacked,
        skipped=decoded.skipped,
        ready=decoded.ready,
        in_flight=decoded.in_flight,
    )


def extend_result(body: bytes) -> ExtendResult:
    decoded = read_answer("an extension", _EXTENDED, body)
    return ExtendResult(topic=decoded.topic, deadlines_ms=decoded.deadlines, skipped=decoded.skipped)


JobRef: TypeAlias = ClaimedJob | tuple[int, str] | int
"""A claimed job, or its sequence number and lease id, for that delivery only.

A bare number means any lease.
"""

_ENCODER: Final = msgspec.json.Encoder()


class _Claim(msgspec.Struct, omit_defaults=True):
    node: str
    max: int
    lease_ms: int | None = None


class _Jobs(msgspec.Struct, omit_defaults=True):
    node: str
    seqs: Sequence[int]
    lease_ids: Sequence[str] = ()
    delay_ms: int = 0
    lease_ms: int | None = None


class QueueCalls(abc.ABC):
    """The calls of a client for queues.

    `jobs` are claimed jobs, or pairs of a sequence number and a lease id. These are fenced: a worker whose
    lease has ended changes nothing. A bare sequence number stands for whatever lease the node holds.
    """

    async def claim(self, topic: str, node: str, *, max: int = 1, lease_ms: int | None = None) -> ClaimResult:
        """Lease up to `max` jobs. No other worker gets them until the lease ends.

        The call is repeated if the response is lost. Jobs of the lost response return when their leases end.
        Raises `TopicNotFound` and `NotAQueue`.
        """
        body = _encoded(_Claim(node, max, lease_ms))
        answer = await self._send("POST", topic, Repeat.ALWAYS, "/claim", body=body)
        return claim_result(answer.content)

    async def ack(self, topic: str, node: str, jobs: Sequence[JobRef]) -> AckResult:
        """Delete jobs that are done. `skipped` lists those that the node no longer holds.

        After `Unanswered` they may be deleted. Ack them again; deleted ones are then skipped.
        """
        answer = await self._send("POST", topic, Repeat.UNAPPLIED, "/ack", body=_jobs_body(node, jobs))
        return ack_result(answer.content)

    async def nack(self, topic: str, node: str, jobs: Sequence[JobRef], *, delay_ms: int = 0) -> NackResult:
        """Return these jobs to the queue, to be claimed again immediately or after `delay_ms`."""
        body = _jobs_body(node, jobs, delay_ms=delay_ms)
        answer = await self._send("POST", topic, Repeat.UNAPPLIED, "/nack", body=body)
        return nack_result(answer.content)

    async def extend(self, topic: str, node: str, jobs: Sequence[JobRef], *, lease_ms: int) -> ExtendResult:
        """Keep these jobs until `lease_ms` from now. A skipped job is lost: stop working on it."""
        body = _jobs_body(node, jobs, lease_ms=lease_ms)
        answer = await self._send("POST", topic, Repeat.ALWAYS, "/extend", body=body)
        return extend_result(answer.content)

    @abc.abstractmethod
    async def _send(
        self,
        method: str,
        topic: str,
        repeat: Repeat,
        verb: str = "",
        *,
        body: bytes | None = None,
        query: dict[str, str] | None = None,
        wait_s: float = 0.0,
    ) -> httpx.Response: ...


def _jobs_body(
    node: str,
    jobs: Sequence[JobRef],
    *,
    delay_ms: int = 0,
    lease_ms: int | None = None,
) -> bytes:
    pairs = [_seq_and_lease(job) for job in jobs]
    seqs, ids = [seq for seq, _ in pairs], [lease_id for _, lease_id in pairs]
    return _encoded(_Jobs(node, seqs, ids if any(ids) else (), delay_ms, lease_ms))


def _seq_and_lease(job: JobRef) -> tuple[int, str]:
    if isinstance(job, ClaimedJob):
        return job.seq, job.lease_id
    return (job, "") if isinstance(job, int) else job


def _encoded(body: msgspec.Struct) -> bytes:
    try:
        return _ENCODER.encode(body)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"the request cannot be written as JSON: {error}") from error


_HEARTBEAT_S: Final = 15.0
_OK: Final = 200
_GONE: Final = 409
_ENDED: Final = Failure(error=Unreachable("the server ended the stream without a reason"), effect=Effect.NONE)


class WorkCalls:
    """The work stream of a client, which receives jobs as they arrive."""

    _connection: Connection
    _clock: Clock
    _rng: random.Random

    async def work(
        self, topic: str, node: str, *, max: int = 1, lease_ms: int | None = None
    ) -> AsyncGenerator[ClaimedJob, None]:
        """Yield jobs of a queue as they arrive, with at most `max` that are neither acked nor nacked.

        Ack each job through another call of the client. When the generator ends or the connection breaks,
        unacked jobs return to the queue immediately. A broken connection is opened again. Raises
        `Unavailable` if the server is away longer than `retry_deadline`, `TopicNotFound` if the queue is
        deleted, and `NotAQueue`.
        """
        query = {"node": node, "max": str(max)} | ({} if lease_ms is None else {"lease_ms": str(lease_ms)})
        stream = _Stream(self._connection, topic, query)
        backoff = Backoff(self._connection.policy, clock=self._clock, rng=self._rng)
        async with self._connection.streaming() as http:
            while True:
                try:
                    async with aclosing(stream.jobs(http)) as jobs:
                        async for job in jobs:
                            backoff = Backoff(self._connection.policy, clock=self._clock, rng=self._rng)
                            yield job
                    failure = _ENDED
                except httpx.HTTPError as error:
                    failure = failure_of_transport(error, self._connection.url, changes=False)
                except _Ended as ended:
                    failure = ended.failure
                if failure.effect is Effect.REFUSED:
                    raise failure.error
                if failure.retry_after_s:
                    await self._clock.sleep(failure.retry_after_s)
                if not await backoff.pause():
                    raise failure.error


class _Ended(Exception):
    """The end of the stream, with its reason."""

    def __init__(self, error: PenstockError | Failure, effect: Effect = Effect.REFUSED) -> None:
        self.failure = error if isinstance(error, Failure) else Failure(error=error, effect=effect)
        super().__init__(str(self.failure.error))


class _Stream:
    """The work stream of one queue, across all its connections."""

    def __init__(self, connection: Connection, topic: str, query: dict[str, str]) -> None:
        self._topic = topic
        self._path = f"/v0/topics/{quote(check_topic_name(topic), safe='')}/work"
        self._query = query
        self._timeout = httpx.Timeout(connection.timeout_s, read=_HEARTBEAT_S + connection.timeout_s)

    async def jobs(self, http: httpx.AsyncClient) -> AsyncGenerator[ClaimedJob, None]:
        """Yield the jobs of one connection. Raise `_Ended` if the server gave a reason for ending it."""
        headers = {"Accept": "text/event-stream"}
        async with http.stream(
            "GET", self._path, params=self._query, headers=headers, timeout=self._timeout
        ) as response:
            if response.status_code != _OK:
                await response.aread()
                raise _Ended(failure_of_answer(response, self._topic, changes=False))
            frames = FrameReader()
            async for piece in response.aiter_bytes():
                for frame in frames.feed(piece):
                    job = self._job(frame)
                    if job is not None:
                        yield job

    def _job(self, frame: Frame) -> ClaimedJob | None:
        try:
            if frame.name == "error":
                problem = problem_of(frame)
                if problem.code == _GONE:
                    raise _Ended(TopicNotFound(self._topic))
                raise _Ended(ShuttingDown(problem.text), Effect.NONE)
            return job_of(frame.data) if frame.name == "job" else None
        except msgspec.MsgspecError as error:
            raise _Ended(UnexpectedAnswer(f"the server sent an invalid event: {error}")) from error
