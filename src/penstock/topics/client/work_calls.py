"""Jobs that come by themselves: a work stream, opened again when it is cut off."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final
from urllib.parse import quote

import httpx
import msgspec

from penstock.clock import Clock
from penstock.errors import PenstockError
from penstock.retry import Backoff
from penstock.topics.client.connection import Connection
from penstock.topics.client.errors import UnexpectedAnswer, Unreachable
from penstock.topics.client.events import Frame, FrameReader, problem_of
from penstock.topics.client.failure import Effect, Failure, failure_of_answer, failure_of_transport
from penstock.topics.errors import ShuttingDown, TopicNotFound
from penstock.topics.jobs import ClaimedJob, job_of
from penstock.topics.names import check_topic_name

__all__ = ["WorkCalls"]

_HEARTBEAT_S: Final = 15.0
_OK: Final = 200
_GONE: Final = 409
_ENDED: Final = Failure(error=Unreachable("the server ended the stream without a reason"), effect=Effect.NONE)


class WorkCalls:
    """What a worker can do beside claiming: be told."""

    _connection: Connection
    _clock: Clock
    _rng: random.Random

    async def work(
        self, topic: str, node: str, *, max: int = 1, lease_ms: int | None = None
    ) -> AsyncGenerator[ClaimedJob, None]:
        """Jobs of a queue as they come, never more than `max` that are neither acked nor nacked.

        Ack each through another call of the client. When this ends or the connection breaks, what is not
        acked goes back into the queue at once. A connection that breaks is opened again; a server that is
        away longer than `retry_deadline` ends it with `Unavailable`. Raises `TopicNotFound` when the queue is
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
    """The stream is over, and why."""

    def __init__(self, error: PenstockError | Failure, effect: Effect = Effect.REFUSED) -> None:
        self.failure = error if isinstance(error, Failure) else Failure(error=error, effect=effect)
        super().__init__(str(self.failure.error))


class _Stream:
    """One queue, over as many connections as it takes."""

    def __init__(self, connection: Connection, topic: str, query: dict[str, str]) -> None:
        self._topic = topic
        self._path = f"/v0/topics/{quote(check_topic_name(topic), safe='')}/work"
        self._query = query
        self._timeout = httpx.Timeout(connection.timeout_s, read=_HEARTBEAT_S + connection.timeout_s)

    async def jobs(self, http: httpx.AsyncClient) -> AsyncGenerator[ClaimedJob, None]:
        """What comes over one connection. Raises `_Ended` where there is a reason for its end."""
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
            raise _Ended(
                UnexpectedAnswer(f"an event of the server is not what it should be: {error}")
            ) from error
