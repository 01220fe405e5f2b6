"""The figures of the flow, known and unknown, from real files and a real `/metrics`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.unit.console.hosts import FixedFleet, nothing, part

from penstock.buffer import Producer, ProducerConfig
from penstock.collector.settings import Address
from penstock.collector.telemetry import AdminServer
from penstock.console.overview import lines_rate, overview, records_behind
from penstock.console.sources import Sources
from penstock.metrics import Registry
from penstock.quiver import Quiver
from penstock.testing import ManualClock
from penstock.up import DatabasePlace, FleetMap, PartKind, QueuePlace, QuiverPlace


class Machine:
    """A collector's directory, metrics and queue, and a database that reads the queue."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.registry = Registry()
        self.taken = self.registry.counter("collector.receiver.bytes", "", ("receiver",))
        self.through = self.registry.gauge("feed.sequence", "")
        self.fed = self.registry.counter("feed.records", "")
        self.admin = AdminServer(self.registry, lambda: True)
        self.host = FixedFleet()
        self.clock = ManualClock()
        self.sources = Sources(self.host, self.clock)

    async def start(self) -> None:
        address = str(await self.admin.bind(Address("127.0.0.1", 0)))
        self.host.running = [part(name, address=address) for name in ("collector", "timeseries")]
        await asyncio.to_thread(self._fill)
        self.host.map = FleetMap(
            data_dir=str(self.root),
            queues=(
                QueuePlace(
                    name="metrics",
                    store=str(self.root / "queue"),
                    manifest_path="ingest/manifest",
                    data_path_prefix="ingest",
                    producers=("collector",),
                ),
            ),
            quivers=(QuiverPlace(name="keep", part="collector", path=str(self.root / "quiver")),),
            databases=(
                DatabasePlace(
                    name="series",
                    kind=PartKind.TIMESERIES,
                    part="timeseries",
                    store="",
                    queue="metrics",
                ),
            ),
        )

    def _fill(self) -> None:
        with Quiver.open(str(self.root / "quiver"), maintenance=False) as quiver:
            quiver.register("exporter")
            quiver.ingest(pa.record_batch({"n": [1, 2]}))
            quiver.flush()

    async def produce(self, *records: bytes) -> None:
        async with Producer(ProducerConfig(store=str(self.root / "queue"))) as producer:
            await producer.produce(list(records), b"")

    async def look(self) -> dict[tuple[str, str], dict[str, Any]]:
        """Return the edges after another poll of every source."""
        await self.clock.advance(5)
        self.sources.refresh()
        await asyncio.gather(*(poller.renew(10) for poller in self.sources.pollers()))
        found: Any = overview(self.sources)["flow"]
        return {(edge["from"], edge["to"]): edge for edge in found["edges"]}

    async def close(self) -> None:
        await self.sources.close()
        await self.admin.close()


@pytest.fixture
async def machine(tmp_path: Path) -> AsyncIterator[Machine]:
    made = Machine(tmp_path)
    await made.start()
    try:
        yield made
    finally:
        await made.close()


async def test_rates_backlog_and_lag_are_computed_from_two_polls(machine: Machine) -> None:
    machine.taken.inc(100, receiver="otlp")
    machine.through.set(-1)
    await machine.look()
    machine.taken.inc(50, receiver="otlp")
    await machine.produce(b"a", b"b", b"c")
    edges = await machine.look()
    assert edges["otlp", "collector"]["rate_bytes_s"] == 10
    exported = edges["quiver:keep", "queue:metrics"]
    assert (exported["known"], exported["rate_records_s"]) == (True, 0.6)
    assert (exported["backlog"], exported["backlog_unit"]) == (1, "segments")
    fed = edges["queue:metrics", "database:series"]
    assert (fed["known"], fed["backlog"]) == (True, 1)
    assert fed["lag_s"] >= 0
    machine.through.set(0)
    machine.fed.inc(3)
    caught_up = (await machine.look())["queue:metrics", "database:series"]
    assert (caught_up["backlog"], caught_up["lag_s"]) == (0, 0)
    assert caught_up["rate_records_s"] > 0


async def test_without_its_metrics_a_part_is_unknown(machine: Machine) -> None:
    await machine.look()
    await machine.admin.close()
    edges = await machine.look()
    for edge in edges.values():
        assert (edge["known"], edge["rate_records_s"], edge["rate_bytes_s"]) == (False, None, None)
        assert "cannot be reached" in edge["last_error"]
    nodes: Any = overview(machine.sources)["flow"]
    states = {node.id: node.state for node in nodes["nodes"]}
    assert (states["queue:metrics"], states["quiver:keep"]) == ("ready", "ready")


async def test_a_place_that_leaves_the_fleet_is_no_longer_polled(machine: Machine) -> None:
    await machine.look()
    machine.host.map, machine.host.running = nothing(), []
    assert await machine.look() == {}
    assert list(machine.sources.pollers()) == []


def test_the_rate_of_a_pipeline_is_that_of_the_last_minute_of_its_ledger() -> None:
    assert lines_rate([], 100_000) is None
    assert lines_rate([(1_000, 500), (50_000, 60), (99_000, 60)], 100_000) == 2
    assert lines_rate([(1_000, 500)], 100_000) == 0
    fast = [(90_000 + 50 * number, 5) for number in range(200)]
    assert lines_rate(fast, 100_000) == pytest.approx(99.5)


def test_records_that_a_topic_lost_do_not_wait_for_its_relay() -> None:
    assert records_behind(head=60, earliest=1, position=None) == 60
    assert records_behind(head=60, earliest=50, position=10) == 11
    assert records_behind(head=60, earliest=50, position=55) == 5
    assert records_behind(head=60, earliest=61, position=None) == 0
    assert records_behind(head=5, earliest=1, position=60) == 0
