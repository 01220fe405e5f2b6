"""The way into one receiver: who may come in, how many at a time, and what was seen."""

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
"""Bodies that are unpacked at the same time: each may become as large as a request may be."""


class ReceiverLimiter:
    """Admits requests to a consumer. Not thread-safe: one loop owns it."""

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
        """Requests under way."""
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
        """Take nothing more."""
        self._draining = True

    def check_token(self, authorization: str | None) -> None:
        """Raises `Unauthorized` unless one of the tokens is given, or none is asked for."""
        if not self._tokens:
            return
        given = authorization or ""
        if not given.lower().startswith(_BEARER):
            raise Unauthorized("a token is missing: send Authorization: Bearer …")
        token = given[len(_BEARER) :].strip().encode()
        # Every token is compared, so that the time tells nothing about which came close.
        if not sum([hmac.compare_digest(token, known) for known in self._tokens]):
            raise Unauthorized("the token is not known here")

    def check_open(self, size: int) -> None:
        """Raises `Unavailable` while there is no room for a request of this size."""
        if self._draining:
            raise Draining("the collector is stopping")
        if self.requests >= self._requests_max or (self.requests and self.bytes + size > self._bytes_max):
            raise Unavailable("the collector has as many requests under way as it may")

    async def take(self, data: bytes, signal: Signal) -> Reply:
        """Hand a request on; returns when it is safe. Raises whatever keeps it from being so."""
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
        """Work on a request of `size` bytes on a thread, before it is taken; counted, and few at a time."""
        return await asyncio.shield(self._work_to_the_end(size, work, *arguments))

    # What was begun goes on when the client leaves: its memory is in use, and counts, until it is done.

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
        """What to answer, counted and, if it is our fault, logged."""
        refusal = refusal_of(error)
        self._requests_seen.inc(
            receiver=self._name, signal=signal.value if signal else "", result=refusal.code.lower()
        )
        if not isinstance(error, PenstockError):
            _LOG.error("%s: a request failed", self._name, exc_info=error)
        elif refusal.message != str(error):
            # The client does not read the paths of this machine; whoever runs it does.
            _LOG.warning("%s: %s: %s", self._name, type(error).__name__, error)
        return refusal
