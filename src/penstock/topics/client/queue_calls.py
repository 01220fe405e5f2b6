"""The calls of a worker: take jobs, finish them, give them back, keep them longer."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Final, TypeAlias

import httpx
import msgspec

from penstock.topics.client import queue_answers
from penstock.topics.client.connection import Repeat
from penstock.topics.errors import InvalidRequest
from penstock.topics.jobs import AckResult, ClaimedJob, ClaimResult, ExtendResult, NackResult

__all__ = ["JobRef", "QueueCalls"]

JobRef: TypeAlias = ClaimedJob | tuple[int, str] | int
"""A job as it was claimed, or its sequence and lease id: that delivery. A bare sequence: whatever is held."""

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
    """What a client can do with a queue.

    `jobs` are what a claim handed out, or pairs of a sequence and a lease id; those are fenced: a worker that
    was too slow changes nothing. Bare sequences are taken for whatever lease the node holds.
    """

    async def claim(self, topic: str, node: str, *, max: int = 1, lease_ms: int | None = None) -> ClaimResult:
        """Take up to `max` jobs for as long as the lease; nobody else gets them until then.

        Sent again when the answer was lost: jobs of that answer come back when their leases are over. Raises
        `TopicNotFound` and `NotAQueue`.
        """
        body = _encoded(_Claim(node, max, lease_ms))
        answer = await self._send("POST", topic, Repeat.ALWAYS, "/claim", body=body)
        return queue_answers.claim_result(answer.content)

    async def ack(self, topic: str, node: str, jobs: Sequence[JobRef]) -> AckResult:
        """These jobs are done: delete them. `skipped` are those that the node does not hold any more.

        After `Unanswered` they may be done: ack them again, and those that were are skipped.
        """
        answer = await self._send("POST", topic, Repeat.UNAPPLIED, "/ack", body=_jobs_body(node, jobs))
        return queue_answers.ack_result(answer.content)

    async def nack(self, topic: str, node: str, jobs: Sequence[JobRef], *, delay_ms: int = 0) -> NackResult:
        """Give these jobs back, to be claimed again at once or after `delay_ms`."""
        body = _jobs_body(node, jobs, delay_ms=delay_ms)
        answer = await self._send("POST", topic, Repeat.UNAPPLIED, "/nack", body=body)
        return queue_answers.nack_result(answer.content)

    async def extend(self, topic: str, node: str, jobs: Sequence[JobRef], *, lease_ms: int) -> ExtendResult:
        """Keep these jobs until `lease_ms` from now. One that is skipped is lost: stop working on it."""
        body = _jobs_body(node, jobs, lease_ms=lease_ms)
        answer = await self._send("POST", topic, Repeat.ALWAYS, "/extend", body=body)
        return queue_answers.extend_result(answer.content)

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
