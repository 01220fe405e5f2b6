"""Admission of requests to one receiver: tokens, limits and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from penstock.collector.batcher import Reply
from penstock.collector.consumers import ConsumerNode
from penstock.collector.status import Draining, Refusal, Unauthorized, refusal_of
from penstock.config import Secret
from penstock.errors import PenstockError, Unavailable
from penstock.metrics import Registry
from penstock.otlp import Signal

_LOG = logging.getLogger(__name__)
_BEARER: Final = "bearer "
_SHIELDED_BYTES: Final = 64 * 1024
"""A larger request may be on a thread when its client leaves."""
_ASIDE_MAX: Final = 2
"""Bodies that are unpacked concurrently: each may become as large as a request may be."""


class ReceiverLimiter:
    """Authorizes, counts and limits the requests of a receiver. Not thread-safe: one loop owns it."""

    def __init__(
        self,
        name: str,
        consumer: ConsumerNode,
        *,
        tokens: Sequence[Secret] = (),
        requests_max: int = 1024,
        bytes_max: int = 256 * 1024**2,
        registry: Registry,
    ) -> None:
        self._consumer = consumer
        self._tokens = [token.reveal().encode() for token in tokens]
        self._requests_max = requests_max
        self._bytes_max = bytes_max
        self._draining = False
        self._aside = asyncio.Semaphore(_ASIDE_MAX)
        self.requests = 0
        """The number of requests under way."""
        self.bytes = 0
        requests = registry.counter(
            "collector.receiver.requests", "Requests, by how they ended.", ("receiver", "signal", "result")
        )
        taken = registry.counter(
            "collector.receiver.bytes", "Bytes of requests that were taken.", ("receiver", "signal")
        )
        refused = registry.counter(
            "collector.receiver.refused_items", "Items refused of requests that were taken.", ("receiver",)
        )
        self._taken = {
            signal: (
                requests.labels(receiver=name, signal=signal.value, result="taken"),
                taken.labels(receiver=name, signal=signal.value),
            )
            for signal in Signal
        }
        self._requests_seen = requests
        self._refused_items = refused.labels(receiver=name)
        self._name = name

    def drain(self) -> None:
        """Accept nothing more."""
        self._draining = True

    def check_token(self, authorization: str | None) -> None:
        """Raise `Unauthorized` unless the token is one of those configured, or none is."""
        if not self._tokens:
            return
        given = authorization or ""
        if not given.lower().startswith(_BEARER):
            raise Unauthorized("a token is missing: send Authorization: Bearer …")
        token = given[len(_BEARER) :].strip().encode()
        # Every token is compared, so that the time does not reveal which was close.
        if not sum([hmac.compare_digest(token, known) for known in self._tokens]):
            raise Unauthorized("the token is not known here")

    def check_open(self, size: int) -> None:
        """Raise `Unavailable` while there is no room for a request of this size."""
        if self._draining:
            raise Draining("the collector is stopping")
        if self.requests >= self._requests_max or (self.requests and self.bytes + size > self._bytes_max):
            raise Unavailable("the collector has as many requests under way as it may")

    async def take(self, data: bytes, signal: Signal) -> Reply:
        """Pass a request to the consumer; return when it is safe. Raises what prevents that."""
        size = len(data)
        if size <= _SHIELDED_BYTES:
            with self._counted(size):
                reply = await self._consumer.take(data, signal)
        else:
            reply = await asyncio.shield(self._take_to_the_end(data, signal))
        seen, taken = self._taken[signal]
        seen.inc()
        taken.inc(size)
        if reply.rejected:
            self._refused_items.inc(reply.rejected)
        return reply

    async def aside(self, size: int, work: Callable[..., bytes], *arguments: object) -> bytes:
        """Process a request of `size` bytes on a thread; it is counted, and few run at the same time."""
        return await asyncio.shield(self._work_to_the_end(size, work, *arguments))

    # Work continues after its client has left: its memory is in use, and counted, until it ends.

    async def _take_to_the_end(self, data: bytes, signal: Signal) -> Reply:
        with self._counted(len(data)):
            return await self._consumer.take(data, signal)

    async def _work_to_the_end(self, size: int, work: Callable[..., bytes], *arguments: object) -> bytes:
        with self._counted(size):
            async with self._aside:
                return await asyncio.to_thread(work, *arguments)

    @contextlib.contextmanager
    def _counted(self, size: int) -> Iterator[None]:
        self.check_open(size)
        self.requests += 1
        self.bytes += size
        try:
            yield
        finally:
            self.requests -= 1
            self.bytes -= size

    def refusal(self, error: BaseException, signal: Signal | None) -> Refusal:
        """Return the response to an error, after counting it and, if it is our fault, logging it."""
        refusal = refusal_of(error)
        self._requests_seen.inc(
            receiver=self._name, signal=signal.value if signal else "", result=refusal.code.lower()
        )
        if not isinstance(error, PenstockError):
            _LOG.error("%s: a request failed", self._name, exc_info=error)
        elif refusal.message != str(error):
            # The operator needs the paths of this machine; the client must not see them.
            _LOG.warning("%s: %s: %s", self._name, type(error).__name__, error)
        return refusal
