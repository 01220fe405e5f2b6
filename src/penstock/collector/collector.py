"""The collector: opens the stores, starts the workers, then the receivers, and stops in reverse order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Final, TypeAlias

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.collector.config import PersistenceSettings, Plan
from penstock.collector.consumers import (
    ConsumerNode,
    DirectConsumer,
    FanOutConsumer,
    RoundRobinConsumer,
)
from penstock.collector.dead_letters import DeadLetters
from penstock.collector.exporters import concurrency_of, make_exporter, make_otlp_exporter
from penstock.collector.graph import DispatchStrategy, Kind, Node
from penstock.collector.limiter import ReceiverLimiter
from penstock.collector.payload import Exporter
from penstock.collector.pipeline import PersistentPipeline, open_quiver
from penstock.collector.receiver_grpc import GrpcReceiver
from penstock.collector.receiver_http import HttpReceiver
from penstock.collector.settings import Address, OtlpReceiverSettings
from penstock.collector.telemetry import AdminServer, SelfMetrics
from penstock.errors import PenstockError
from penstock.http import Sites
from penstock.ids import SYSTEM_RNG
from penstock.metrics import DEFAULT_REGISTRY, Registry

if TYPE_CHECKING:
    from penstock.quiver import AsyncQuiver

_LOG = logging.getLogger(__name__)
_RECEIVER_GRACE_S: Final = 10.0
OpenQuiver: TypeAlias = Callable[..., Awaitable["AsyncQuiver"]]


class Collector:
    """One core of a collector.

    async with Collector(plan) as collector:
        collector.addresses["otlp_receiver"]      # where it listens
    """

    def __init__(
        self,
        plan: Plan,
        *,
        core_id: int = 0,
        clock: Clock = SYSTEM_CLOCK,
        rng: random.Random = SYSTEM_RNG,
        registry: Registry = DEFAULT_REGISTRY,
        open_store: OpenQuiver = open_quiver,
    ) -> None:
        self._plan = plan
        self._core_id = core_id
        self._clock = clock
        self._rng = rng
        self._registry = registry
        self._open_quiver = open_store
        self._dead_letters = DeadLetters(plan.dead_letters, clock=clock)
        self._pipelines: dict[str, PersistentPipeline] = {}
        self._exporters: dict[str, Exporter] = {}
        self._receivers: list[GrpcReceiver | HttpReceiver] = []
        self._limiters: list[ReceiverLimiter] = []
        self._admin: AdminServer | None = None
        self._self_metrics: SelfMetrics | None = None
        self.addresses: dict[str, list[Address]] = {}
        """The addresses of each receiver, and of `telemetry` if it listens."""
        self.is_ready = False

    async def __aenter__(self) -> Collector:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start all components. Raise `PenstockError`; then `stop` closes the started ones."""
        await self._start_admin()
        graph = self._plan.graph
        for node in graph.of_kind(Kind.EXPORTER):
            exporter = make_exporter(node.name, self._plan.settings[node.name])
            self._exporters[node.name] = exporter
            await exporter.start()
        for node in graph.of_kind(Kind.PROCESSOR):
            await self._start_pipeline(node)
        for node in graph.of_kind(Kind.RECEIVER):
            await self._start_receiver(node)
        await self._start_self_metrics()
        self.is_ready = True

    async def stop(self) -> None:
        """Stop accepting requests, make all data durable, deliver as much as possible in time, and close."""
        self.is_ready = False
        for limiter in self._limiters:
            limiter.drain()
        async with contextlib.AsyncExitStack() as stack:
            # Every step runs, even if an earlier one fails. The first error is raised at the end.
            if self._admin is not None:
                stack.push_async_callback(self._admin.close)
            if self._self_metrics is not None:
                stack.push_async_callback(self._self_metrics.stop)
            for exporter in self._exporters.values():
                stack.push_async_callback(exporter.close)
            for pipeline in self._pipelines.values():
                stack.push_async_callback(pipeline.quiver.close)
            await asyncio.gather(*(receiver.drain(_RECEIVER_GRACE_S) for receiver in self._receivers))
            await asyncio.gather(*(self._drain(pipeline) for pipeline in self._pipelines.values()))
            self._receivers, self._pipelines, self._exporters = [], {}, {}
            self._admin = self._self_metrics = None

    def hurry(self) -> None:
        """Shorten a stop: deliver no more bundles, but still close all components in order."""
        for pipeline in self._pipelines.values():
            pipeline.hurry()

    async def _start_admin(self) -> None:
        address = self._plan.telemetry.address
        if address is None:
            return
        if address.port:
            # Each core has its own port: the configured one plus the core number.
            address = Address(address.host, address.port + self._core_id)
        sites = Sites(address.host, self._plan.telemetry.allowed_hosts)
        admin = AdminServer(self._registry, self._takes_requests, sites)
        self.addresses["telemetry"] = [await admin.bind(address)]
        self._admin = admin

    def _takes_requests(self) -> bool:
        return self.is_ready and all(pipeline.health.takes_writes for pipeline in self._pipelines.values())

    async def _start_self_metrics(self) -> None:
        settings = self._plan.telemetry
        if settings.otlp is None:
            return
        exporter = make_otlp_exporter(settings.otlp)
        self._self_metrics = SelfMetrics(
            self._registry,
            exporter,
            interval_s=settings.interval_s,
            core_id=self._core_id,
            clock=self._clock,
        )
        await self._self_metrics.start()

    async def _start_pipeline(self, node: Node) -> None:
        settings = self._plan.persistence(node)
        quiver = await self._open_quiver(
            settings.quiver,
            subscribers=_subscribers(node, settings),
            core_id=self._core_id,
            cores=self._plan.cores,
            registry=self._registry,
        )
        pipeline = PersistentPipeline(
            node,
            settings,
            quiver,
            core_id=self._core_id,
            directory=os.path.join(settings.quiver.path, f"core_{self._core_id}"),
            dead_letters=self._dead_letters,
            clock=self._clock,
            rng=self._rng,
            registry=self._registry,
        )
        self._pipelines[node.name] = pipeline
        pipeline.start(
            [
                (
                    name,
                    self._plan.settings[name],
                    self._exporters[name],
                    concurrency_of(self._plan.settings[name]),
                )
                for name in node.destinations
            ]
        )

    async def _drain(self, pipeline: PersistentPipeline) -> None:
        try:
            await pipeline.quiver.flush()
        except PenstockError as error:
            # The data is in the log, and is written to segments after the next start.
            _LOG.warning("%s: cannot prepare all data for delivery: %s", pipeline.node.name, error)
        if not await pipeline.drain(self._plan.drain_timeout_s):
            _LOG.warning("%s: not all data was delivered in time; the rest is kept", pipeline.node.name)
        for name, segments in pipeline.waiting().items():
            _LOG.warning("%s: segments kept until the next start: %d", name, segments)

    async def _start_receiver(self, node: Node) -> None:
        settings = self._plan.settings[node.name]
        assert isinstance(settings, OtlpReceiverSettings)
        limiter = ReceiverLimiter(
            node.name,
            self._consumer(node),
            tokens=settings.tokens,
            requests_max=settings.max_in_flight,
            bytes_max=settings.in_flight_bytes,
            registry=self._registry,
        )
        self._limiters.append(limiter)
        bound = self.addresses.setdefault(node.name, [])
        reuse_port = self._plan.cores > 1
        if settings.grpc_address is not None:
            grpc = GrpcReceiver(
                limiter,
                request_bytes_max=settings.max_bytes,
                calls_max=settings.max_in_flight,
                tls=settings.tls,
                reuse_port=reuse_port,
            )
            self._receivers.append(grpc)
            bound.append(await grpc.bind(settings.grpc_address))
        if settings.http_address is not None:
            http = HttpReceiver(
                limiter,
                request_bytes_max=settings.max_bytes,
                sites=settings.sites,
                reuse_port=reuse_port,
            )
            self._receivers.append(http)
            bound.append(await http.bind(settings.http_address))

    def _consumer(self, node: Node) -> ConsumerNode:
        targets = [self._target(name) for name in node.destinations]
        if len(targets) == 1:
            return targets[0]
        is_broadcast = node.dispatch_strategy is DispatchStrategy.BROADCAST
        return FanOutConsumer(targets) if is_broadcast else RoundRobinConsumer(targets)

    def _target(self, name: str) -> ConsumerNode:
        pipelines: Mapping[str, PersistentPipeline] = self._pipelines
        return pipelines[name].consumer() if name in pipelines else DirectConsumer(self._exporters[name])


def _subscribers(node: Node, settings: PersistenceSettings) -> list[str]:
    """Return the subscribers of a persistence node."""
    return [node.name] if settings.is_shared else list(node.destinations)
