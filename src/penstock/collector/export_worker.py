"""Delivery of the bundles of one subscriber to one exporter, and the sources that supply a worker.

A worker either has its own subscriber or shares one with other workers.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

from penstock.clock import Clock
from penstock.collector.breaker import CircuitBreaker, CircuitPolicy, CircuitState
from penstock.collector.dead_letters import DeadLetters
from penstock.collector.outcome import Outcome, Verdict
from penstock.collector.payload import ArrowPayload, Exporter, JoinedPayload, Payload, Place, RawPayload
from penstock.errors import PenstockError
from penstock.metrics import Registry
from penstock.otlp import Signal

if TYPE_CHECKING:
    from penstock.quiver import AsyncQuiver, Bundle

_RAW_SLOTS: Final = frozenset({60, 61, 62})
_PULL_S: Final = 0.5
_HAND_OVER_S: Final = 0.1
"""The minimum wait for a bundle, because the task that pulls for all needs a moment to pass it on."""
_LOG = logging.getLogger(__name__)
_POLL_S: Final = 0.25
"""How long a worker waits for a bundle before it checks whether to stop."""
_JOINED_MAX: Final = 256
_GAUGE: Final = {CircuitState.CLOSED: 0, CircuitState.PROBING: 1, CircuitState.OPEN: 2}
_INTERVAL_S: Final = 10.0


class SparseLog:
    """Logs at most one line every ten seconds for each key. Not thread-safe: use it on one event loop."""

    def __init__(self, log: logging.Logger, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self._written: dict[str, tuple[float, int]] = {}

    def warning(self, key: str, sentence: str) -> None:
        now_s = self._clock.monotonic()
        last_s, suppressed = self._written.get(key, (now_s - _INTERVAL_S, 0))
        if now_s - last_s < _INTERVAL_S:
            self._written[key] = (last_s, suppressed + 1)
            return
        self._written[key] = (now_s, 0)
        more = f" (and {suppressed} more like it)" if suppressed else ""
        self._log.warning("%s: %s%s", key, sentence, more)


class Source(Protocol):
    """A source of bundles for a worker."""

    async def next(self, timeout_s: float) -> Bundle | None: ...

    def unacked_unleased(self) -> int:
        """Return the number of bundles that were handed out and are now neither resolved nor leased."""
        ...


def unacked_unleased(quiver: AsyncQuiver, subscriber: str) -> int:
    """Return the number of bundles that were handed out and are now neither resolved nor leased."""
    return sum(found.deferred for found in quiver.subscribers() if found.name == subscriber)


class OwnSource:
    """The source of a worker with its own subscriber, which receives every bundle."""

    def __init__(self, quiver: AsyncQuiver, subscriber: str) -> None:
        self._quiver = quiver
        self._subscriber = subscriber

    async def next(self, timeout_s: float) -> Bundle | None:
        return await self._quiver.next_bundle(self._subscriber, timeout=timeout_s)

    def unacked_unleased(self) -> int:
        return unacked_unleased(self._quiver, self._subscriber)


class RoundRobin:
    """Picks the next of several names among those that are ready. It does no I/O."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)
        self._last = len(self._names) - 1

    def pick(self, ready: Sequence[str]) -> str | None:
        """Return the first of `ready` after the name that was picked last."""
        for step in range(1, len(self._names) + 1):
            place = (self._last + step) % len(self._names)
            if self._names[place] in ready:
                self._last = place
                return self._names[place]
        return None


class SharedSource:
    """One subscriber for several destinations. Each bundle goes to one of them in turn."""

    def __init__(self, quiver: AsyncQuiver, subscriber: str, destinations: Sequence[str]) -> None:
        self._quiver = quiver
        self._subscriber = subscriber
        self._order = RoundRobin(destinations)
        self._waiting: dict[str, deque[asyncio.Future[Bundle]]] = {name: deque() for name in destinations}
        self._pulling: asyncio.Task[None] | None = None

    def of(self, destination: str) -> Source:
        return _Share(self, destination)

    def unacked_unleased(self) -> int:
        return unacked_unleased(self._quiver, self._subscriber)

    async def next_for(self, destination: str, timeout_s: float) -> Bundle | None:
        future: asyncio.Future[Bundle] = asyncio.get_running_loop().create_future()
        self._waiting[destination].append(future)
        if self._pulling is None or self._pulling.done():
            self._pulling = asyncio.ensure_future(self._pull())
        try:
            done, _ = await asyncio.wait([future], timeout=max(timeout_s, _HAND_OVER_S))
        except asyncio.CancelledError:
            if not future.cancel() and future.exception() is None:
                future.result().defer(0.0)
            raise
        if not done:
            future.cancel()
            return None
        return future.result()

    async def _pull(self) -> None:
        while self._ready():
            try:
                delivery = await self._quiver.next_bundle(self._subscriber, timeout=_PULL_S)
            except PenstockError as error:
                for waiter in self._ready():
                    self._waiting[waiter].popleft().set_exception(error)
                return
            if delivery is None:
                continue
            name = self._order.pick(self._ready())
            if name is None:
                delivery.defer(0.0)
                return
            self._waiting[name].popleft().set_result(delivery)

    def _ready(self) -> list[str]:
        for queue in self._waiting.values():
            while queue and queue[0].done():
                queue.popleft()
        return [name for name, queue in self._waiting.items() if queue]


class _Share:
    def __init__(self, shared: SharedSource, destination: str) -> None:
        self._shared = shared
        self._destination = destination

    async def next(self, timeout_s: float) -> Bundle | None:
        return await self._shared.next_for(self._destination, timeout_s)

    def unacked_unleased(self) -> int:
        return self._shared.unacked_unleased()


def payload_of(delivery: Bundle, origin: str) -> Payload:
    """Return the contents of a bundle: a request as it was received, or columns."""
    ref = delivery.ref
    place = Place(origin, ref.segment_seq, ref.bundle)
    signal = Signal(str(delivery.signal))
    if delivery.slot in _RAW_SLOTS:
        return RawPayload(delivery.batch.column(0)[0].as_py(), signal, place)
    return ArrowPayload(delivery.batch, signal, place)


class ExportCounts:
    """The metrics of one exporter with their labels bound once."""

    def __init__(self, registry: Registry, exporter: str) -> None:
        bundles = registry.counter(
            "collector.exporter.bundles", "Attempts to deliver a bundle, by outcome.", ("exporter", "outcome")
        )
        self.outcomes = {
            verdict: bundles.labels(exporter=exporter, outcome=verdict.value) for verdict in Verdict
        }
        self.items = registry.counter(
            "collector.exporter.items", "Items of delivered bundles.", ("exporter",)
        ).labels(exporter=exporter)
        self.rejected_items = registry.counter(
            "collector.exporter.rejected_items", "Items refused in partial successes.", ("exporter",)
        ).labels(exporter=exporter)
        self.circuit = registry.gauge(
            "collector.exporter.circuit", "0 closed, 1 probing, 2 open.", ("exporter",)
        ).labels(exporter=exporter)
        self.seconds = registry.histogram(
            "collector.exporter.seconds", "Duration of an attempt.", ("exporter",)
        ).labels(exporter=exporter)


class ExportWorker:
    """Delivers bundles until `stop`, and then those that the destination still accepts."""

    def __init__(
        self,
        name: str,
        source: Source,
        exporter: Exporter,
        *,
        dead_letters: DeadLetters,
        policy: CircuitPolicy,
        join_bytes: int = 0,
        concurrency: int,
        origin: str,
        clock: Clock,
        rng: random.Random,
        registry: Registry,
    ) -> None:
        self.name = name
        self._source = source
        self._exporter = exporter
        self._dead_letters = dead_letters
        self._circuit = CircuitBreaker(policy)
        self._join_bytes = join_bytes
        self._concurrency = concurrency
        self._origin = origin
        self._clock = clock
        self._rng = rng
        self._counts = ExportCounts(registry, name)
        self._log = SparseLog(_LOG, clock)
        self._stopping = False

    def stop(self) -> None:
        """Stop as soon as no bundle is left that can be delivered now."""
        self._stopping = True

    async def run(self) -> None:
        """Deliver until stopped. Cancelling it returns active bundles to the source."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._concurrency):
                group.create_task(self._work())

    async def _work(self) -> None:
        while True:
            if not self._circuit.try_acquire(self._clock.monotonic()):
                if self._stopping:
                    return
                await self._clock.sleep(self._wait_s())
                continue
            was_probe = self._circuit.is_probing
            try:
                delivery = await self._pull(0.0 if self._stopping else _POLL_S)
                if delivery is not None:
                    await self._deliver(delivery)
            finally:
                # If there was no bundle, or after a bug, another task may probe.
                self._circuit.release(was_probe=was_probe)
            if delivery is None and self._stopping:
                return

    async def _deliver(self, first: Bundle) -> None:
        """Deliver a bundle together with waiting ones: one request costs as much as a few hundred spans."""
        group = [first]
        try:
            await self._gather(group)
            by_signal: dict[str, list[Bundle]] = {}
            for delivery in group:
                by_signal.setdefault(str(delivery.signal), []).append(delivery)
            await self._deliver_each(list(by_signal.values()))
        except asyncio.CancelledError:
            _give_back(group)  # has no effect on settled ones
            raise
        self._counts.circuit.set(_GAUGE[self._circuit.state])

    async def _gather(self, group: list[Bundle]) -> None:
        """Add waiting bundles, unless the destination is only being probed."""
        size = group[0].batch.nbytes
        while size < self._join_bytes and len(group) < _JOINED_MAX:
            if self._circuit.state is not CircuitState.CLOSED:
                return
            more = await self._pull(0.0)
            if more is None:
                return
            group.append(more)
            size += more.batch.nbytes

    async def _pull(self, timeout_s: float) -> Bundle | None:
        try:
            return await self._source.next(timeout_s)
        except PenstockError as error:
            self._log.warning(self.name, f"cannot read the next bundle: {error}")
            await self._clock.sleep(_POLL_S)
            return None

    def _wait_s(self) -> float:
        return min(max(self._circuit.due_s - self._clock.monotonic(), 0.01), _POLL_S)

    async def _deliver_each(self, groups: Sequence[list[Bundle]]) -> None:
        """Deliver the groups in order. If the destination goes down, return the remaining bundles."""
        for place, group in enumerate(groups):
            if place and self._circuit.state is not CircuitState.CLOSED:
                _give_back(group)
            else:
                await self._deliver_together(group)

    async def _deliver_together(self, group: list[Bundle]) -> None:
        """Send a group in one request. If it is rejected, send its bundles one by one to find the culprit."""
        started_s = self._clock.monotonic()
        payloads = [payload_of(delivery, self._origin) for delivery in group]
        outcome = await self._attempt(payloads[0] if len(payloads) == 1 else JoinedPayload(payloads))
        self._counts.seconds.observe(self._clock.monotonic() - started_s)
        if outcome.verdict is Verdict.REJECT and len(group) > 1:
            await self._deliver_each([[delivery] for delivery in group])
            return
        self._record(outcome, len(group))
        for delivery, payload in zip(group, payloads, strict=True):
            if not await self._settle(delivery, payload, outcome):
                self._log.warning(self.name, "a bundle took longer than its lease, so it is delivered again")
        self._log_partial(outcome)

    async def _attempt(self, payload: Payload) -> Outcome:
        try:
            return await self._exporter.send(payload)
        except Exception as error:  # noqa: BLE001
            # A bug of ours: the data is kept until a version without it sends the bundle.
            _LOG.exception("%s: sending a bundle failed", self.name)
            return Outcome(verdict=Verdict.RETRY, reason=f"{type(error).__name__}: {error}")

    def _record(self, outcome: Outcome, bundles: int) -> None:
        self._counts.outcomes[outcome.verdict].inc(bundles)
        if outcome.is_down:
            was_closed = self._circuit.state is CircuitState.CLOSED
            self._circuit.failed(self._clock.monotonic(), self._rng.random(), outcome.retry_after_s)
            if was_closed:
                self._log.warning(
                    self.name, f"unreachable, probed with one bundle at a time: {outcome.reason}"
                )
        else:
            self._circuit.succeeded()

    async def _settle(self, delivery: Bundle, payload: Payload, outcome: Outcome) -> bool:
        if outcome.verdict is Verdict.ACK:
            self._counts.items.inc(delivery.items)
        if outcome.verdict is Verdict.REJECT and not await self._is_stored(delivery, payload, outcome):
            return True
        try:
            if outcome.verdict is Verdict.ACK:
                return delivery.ack()
            if outcome.verdict is Verdict.RETRY:
                return delivery.nack(outcome.reason, retry_after=outcome.retry_after_s)
            return delivery.reject(outcome.reason)
        except PenstockError as error:
            self._log.warning(
                self.name, f"cannot record an outcome, so the bundle is delivered again: {error}"
            )
            return True

    def _log_partial(self, outcome: Outcome) -> None:
        if outcome.verdict is not Verdict.ACK or not (outcome.reason or outcome.rejected_items):
            return
        self._counts.rejected_items.inc(outcome.rejected_items)
        reason = outcome.reason or "no reason given"
        self._log.warning(self.name, f"the destination refused {outcome.rejected_items} items: {reason}")

    async def _is_stored(self, delivery: Bundle, payload: Payload, outcome: Outcome) -> bool:
        """Store a rejected bundle as a dead letter. If that fails, nack it and return False."""
        try:
            letter = await asyncio.to_thread(
                self._dead_letters.keep, self.name, payload, outcome.reason, delivery.attempt
            )
        except PenstockError as error:
            self._log.warning(self.name, f"cannot store a rejected bundle, so it is retried: {error}")
            delivery.nack(f"{outcome.reason}; not stored: {error}")
            return False
        self._log.warning(self.name, f"rejected, stored in {letter.path}: {outcome.reason}")
        return True


def _give_back(group: Sequence[Bundle]) -> None:
    for delivery in group:
        delivery.defer(0.0)
