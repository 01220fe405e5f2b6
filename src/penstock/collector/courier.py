"""Brings the bundles of one subscriber to one exporter, several at a time; settles each by its outcome."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from typing import Final

from penstock.clock import Clock
from penstock.collector.circuit import Circuit, CircuitPolicy, CircuitState
from penstock.collector.dead_letters import DeadLetters
from penstock.collector.outcome import Outcome, Verdict
from penstock.collector.payload import JoinedPayload, Payload
from penstock.collector.seam import Delivery, Exporter
from penstock.collector.source import Source, payload_of
from penstock.collector.sparse_log import SparseLog
from penstock.errors import PenstockError
from penstock.metrics import Registry

__all__ = ["Courier", "CourierCounts"]

_LOG = logging.getLogger(__name__)
_POLL_S: Final = 0.25
"""How long a worker waits for a bundle before it looks whether it should stop."""
_JOINED_MAX: Final = 256
_GAUGE: Final = {CircuitState.CLOSED: 0, CircuitState.PROBING: 1, CircuitState.OPEN: 2}


class CourierCounts:
    """The metrics of one exporter, bound once."""

    def __init__(self, registry: Registry, exporter: str) -> None:
        bundles = registry.counter(
            "collector.exporter.bundles", "Attempts to deliver a bundle, by outcome.", ("exporter", "outcome")
        )
        self.outcomes = {
            verdict: bundles.labels(exporter=exporter, outcome=verdict.value) for verdict in Verdict
        }
        self.items = registry.counter(
            "collector.exporter.items", "Items of bundles that were delivered.", ("exporter",)
        ).labels(exporter=exporter)
        self.rejected_items = registry.counter(
            "collector.exporter.rejected_items", "Items refused in partial successes.", ("exporter",)
        ).labels(exporter=exporter)
        self.circuit = registry.gauge(
            "collector.exporter.circuit", "0 closed, 1 probing, 2 open.", ("exporter",)
        ).labels(exporter=exporter)
        self.seconds = registry.histogram(
            "collector.exporter.seconds", "How long an attempt took.", ("exporter",)
        ).labels(exporter=exporter)


class Courier:
    """`run` until `stop`; then what is there is still brought, as long as the destination takes it."""

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
        self._circuit = Circuit(policy)
        self._join_bytes = join_bytes
        self._concurrency = concurrency
        self._origin = origin
        self._clock = clock
        self._rng = rng
        self._counts = CourierCounts(registry, name)
        self._said = SparseLog(_LOG, clock)
        self._stopping = False

    def stop(self) -> None:
        """End as soon as nothing is left that can be delivered now."""
        self._stopping = True

    async def run(self) -> None:
        """Deliver. Cancelling it gives what is under way back to the store."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._concurrency):
                group.create_task(self._work())

    async def _work(self) -> None:
        while True:
            if not self._circuit.enter(self._clock.monotonic()):
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
                # Whoever found nothing, or ended by a fault of ours, leaves the place to another.
                self._circuit.left(was_probe=was_probe)
            if delivery is None and self._stopping:
                return

    async def _deliver(self, first: Delivery) -> None:
        """The bundle, and others that wait beside it: one request costs as much as a few hundred spans."""
        group = [first]
        try:
            await self._gather(group)
            by_signal: dict[str, list[Delivery]] = {}
            for delivery in group:
                by_signal.setdefault(str(delivery.signal), []).append(delivery)
            await self._deliver_each(list(by_signal.values()))
        except asyncio.CancelledError:
            _give_back(group)  # those that are settled stay so
            raise
        self._counts.circuit.set(_GAUGE[self._circuit.state])

    async def _gather(self, group: list[Delivery]) -> None:
        """More of what is there, unless the destination is only being probed."""
        size = group[0].batch.nbytes
        while size < self._join_bytes and len(group) < _JOINED_MAX:
            if self._circuit.state is not CircuitState.CLOSED:
                return
            more = await self._pull(0.0)
            if more is None:
                return
            group.append(more)
            size += more.batch.nbytes

    async def _pull(self, timeout_s: float) -> Delivery | None:
        try:
            return await self._source.next(timeout_s)
        except PenstockError as error:
            self._said.warning(self.name, f"the next bundle cannot be read: {error}")
            await self._clock.sleep(_POLL_S)
            return None

    def _wait_s(self) -> float:
        return min(max(self._circuit.due_s - self._clock.monotonic(), 0.01), _POLL_S)

    async def _deliver_each(self, groups: Sequence[list[Delivery]]) -> None:
        """One after the other; what is left when the destination goes down waits for a probe to arrive."""
        for place, group in enumerate(groups):
            if place and self._circuit.state is not CircuitState.CLOSED:
                _give_back(group)
            else:
                await self._deliver_together(group)

    async def _deliver_together(self, group: list[Delivery]) -> None:
        """One attempt for all. What is refused as a whole is tried one by one, to find the one to blame."""
        started_s = self._clock.monotonic()
        payloads = [payload_of(delivery, self._origin) for delivery in group]
        outcome = await self._attempt(payloads[0] if len(payloads) == 1 else JoinedPayload(payloads))
        self._counts.seconds.observe(self._clock.monotonic() - started_s)
        if outcome.verdict is Verdict.REJECT and len(group) > 1:
            await self._deliver_each([[delivery] for delivery in group])
            return
        self._note(outcome, len(group))
        for delivery, payload in zip(group, payloads, strict=True):
            if not await self._settle(delivery, payload, outcome):
                self._said.warning(self.name, "a bundle took longer than its lease, so it comes again")
        self._note_partial(outcome)

    async def _attempt(self, payload: Payload) -> Outcome:
        try:
            return await self._exporter.send(payload)
        except Exception as error:  # noqa: BLE001
            # Ours, not the destination's: the data is kept until a version without the fault sends it.
            _LOG.exception("%s: sending a bundle failed", self.name)
            return Outcome(verdict=Verdict.RETRY, reason=f"{type(error).__name__}: {error}")

    def _note(self, outcome: Outcome, bundles: int) -> None:
        self._counts.outcomes[outcome.verdict].inc(bundles)
        if outcome.is_down:
            was_closed = self._circuit.state is CircuitState.CLOSED
            self._circuit.failed(self._clock.monotonic(), self._rng.random(), outcome.retry_after_s)
            if was_closed:
                self._said.warning(self.name, f"out of reach, tried one at a time from now: {outcome.reason}")
        else:
            self._circuit.succeeded()

    async def _settle(self, delivery: Delivery, payload: Payload, outcome: Outcome) -> bool:
        if outcome.verdict is Verdict.ACK:
            self._counts.items.inc(delivery.items)
        if outcome.verdict is Verdict.REJECT and not await self._is_kept(delivery, payload, outcome):
            return True
        try:
            if outcome.verdict is Verdict.ACK:
                return delivery.ack()
            if outcome.verdict is Verdict.RETRY:
                return delivery.nack(outcome.reason, retry_after=outcome.retry_after_s)
            return delivery.reject(outcome.reason)
        except PenstockError as error:
            self._said.warning(
                self.name, f"an outcome cannot be written down, the bundle comes again: {error}"
            )
            return True

    def _note_partial(self, outcome: Outcome) -> None:
        if outcome.verdict is not Verdict.ACK or not (outcome.reason or outcome.rejected_items):
            return
        self._counts.rejected_items.inc(outcome.rejected_items)
        reason = outcome.reason or "it does not say why"
        self._said.warning(
            self.name, f"{outcome.rejected_items} items were refused by the destination: {reason}"
        )

    async def _is_kept(self, delivery: Delivery, payload: Payload, outcome: Outcome) -> bool:
        """Whether it is a dead letter; what cannot be one is not rejected, and comes again."""
        try:
            letter = await asyncio.to_thread(
                self._dead_letters.keep, self.name, payload, outcome.reason, delivery.attempt
            )
        except PenstockError as error:
            self._said.warning(self.name, f"a refused bundle cannot be kept, so it is tried again: {error}")
            delivery.nack(f"{outcome.reason}; not kept: {error}")
            return False
        self._said.warning(self.name, f"refused for good, kept in {letter.path}: {outcome.reason}")
        return True


def _give_back(group: Sequence[Delivery]) -> None:
    for delivery in group:
        delivery.defer(0.0)
