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
"""The size above which a request may still be running on a thread when its client leaves."""
_UNPACKING_MAX: Final = 2
"""The maximum number of bodies decompressed concurrently. Each may reach the size limit of a request."""


class ReceiverLimiter:
    """Authorizes, counts and limits the requests of a receiver. Not thread-safe: use it on one event loop."""

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
        self._unpacking = asyncio.Semaphore(_UNPACKING_MAX)
        self.requests = 0
        """The number of requests in progress."""
        self.bytes = 0
        requests = registry.counter(
            "collector.receiver.requests", "Requests by result.", ("receiver", "signal", "result")
        )
        taken = registry.counter(
            "collector.receiver.bytes", "Bytes of accepted requests.", ("receiver", "signal")
        )
        refused = registry.counter(
            "collector.receiver.refused_items", "Refused items of accepted requests.", ("receiver",)
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
        """Stop accepting requests."""
        self._draining = True

    def check_token(self, authorization: str | None) -> None:
        """Raise `Unauthorized` unless the token is configured or no tokens are configured."""
        if not self._tokens:
            return
        header = authorization or ""
        if not header.lower().startswith(_BEARER):
            raise Unauthorized("a token is missing: send Authorization: Bearer …")
        token = header[len(_BEARER) :].strip().encode()
        # Compare with every token, so that the time does not reveal which one was close.
        if not sum([hmac.compare_digest(token, known) for known in self._tokens]):
            raise Unauthorized("the token is not valid")

    def check_open(self, size: int) -> None:
        """Raise `Unavailable` if a request of this size exceeds a limit."""
        if self._draining:
            raise Draining("the collector is stopping")
        if self.requests >= self._requests_max or (self.requests and self.bytes + size > self._bytes_max):
            raise Unavailable("the collector has reached its limit of requests in progress")

    async def take(self, data: bytes, signal: Signal) -> Reply:
        """Pass a request to the consumer and return its reply. Raise errors of the consumer."""
        size = len(data)
        if size <= _SHIELDED_BYTES:
            with self._counted(size):
                reply = await self._consumer.take(data, signal)
        else:
            reply = await asyncio.shield(self._take_counted(data, signal))
        seen, taken = self._taken[signal]
        seen.inc()
        taken.inc(size)
        if reply.rejected:
            self._refused_items.inc(reply.rejected)
        return reply

    async def run_on_thread(self, size: int, work: Callable[..., bytes], *arguments: object) -> bytes:
        """Process a request of `size` bytes on a thread. It counts towards the limits, and few run
        concurrently.
        """
        return await asyncio.shield(self._work_counted(size, work, *arguments))

    # Work continues after its client has left. Its memory stays counted until the work ends.

    async def _take_counted(self, data: bytes, signal: Signal) -> Reply:
        with self._counted(len(data)):
            return await self._consumer.take(data, signal)

    async def _work_counted(self, size: int, work: Callable[..., bytes], *arguments: object) -> bytes:
        with self._counted(size):
            async with self._unpacking:
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
        """Return the response to an error. Count it, and log it if the fault is ours."""
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
