"""Metrics, under the names that dashboards use."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.unit.coordinator.doubles import SIZE, World, turns

from penstock.coordinator import Backpressure
from penstock.coordinator.watermarks import Instruments
from penstock.metrics import Registry

NAMES = {
    "send_duration_seconds",
    "queue_backpressure_total",
    "queue_depth",
    "delta_apply_duration_seconds",
    "delta_estimated_bytes",
    "delta_freeze_duration_seconds",
    "flush_event_send_duration_seconds",
    "flush_event_queue_depth",
    "flush_total",
    "flush_delta_duration_seconds",
    "flush_storage_duration_seconds",
    "watermark",
}


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with World() as made:
        yield made


def test_every_metric_of_the_contract_exists_below_its_product() -> None:
    for product, prefix in (("", ""), ("timeseries", "timeseries_")):
        registry = Registry()
        Instruments(registry, product)
        text = registry.prometheus_text()
        assert all(f"# TYPE {prefix}write_coordinator_{name} " in text for name in NAMES)
        assert len(registry.snapshot()) == len(NAMES)


async def test_metrics_report_what_happens(world: World) -> None:
    coordinator = await world.open(queue_capacity=3)

    def value(name: str, **labels: str) -> float:
        return world.registry.value(f"write_coordinator.{name}", **labels)

    for word in ("a", "b", "c"):
        coordinator.try_write(word)
    with pytest.raises(Backpressure):
        coordinator.try_write("d")
    await turns()
    assert value("send_duration_seconds", command="write", status="ok") == 3
    assert value("send_duration_seconds", command="write", status="backpressure") == 1
    assert value("queue_backpressure_total", command="write", reason="queue_full") == 1
    assert value("queue_depth", channel="default") == 0
    assert value("delta_estimated_bytes") == 3 * SIZE
    held = world.storage.gate("apply")
    flush = await coordinator.flush(durable=True)
    await turns()
    await coordinator.write("e")
    await coordinator.flush()
    await turns()
    assert value("flush_event_queue_depth") == 1
    held.set()
    await coordinator.close()
    await flush.wait()
    assert value("flush_total", reason="explicit") == 2
    assert value("delta_freeze_duration_seconds") == 2
    assert value("flush_delta_duration_seconds") == 2
    assert value("flush_event_send_duration_seconds") == 2
    assert value("flush_storage_duration_seconds") == 2
    assert value("send_duration_seconds", command="flush", status="ok") == 2
    assert value("delta_apply_duration_seconds") == 2
    assert value("flush_event_queue_depth") == 0
    marks = [value("watermark", level=level) for level in ("applied", "flushed", "durable")]
    assert marks == [4, 4, 4]


async def test_the_depth_of_a_queue_is_shown_while_it_is_held(world: World) -> None:
    coordinator = await world.build(batch_writes_max=2)
    for number in range(5):
        coordinator.try_write(str(number))
    coordinator.channel("default").take(2)
    assert world.registry.value("write_coordinator.queue_depth", channel="default") == 3
