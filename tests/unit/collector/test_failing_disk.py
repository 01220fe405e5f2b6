"""A collector whose disk fails a write is not ready for a while."""

from __future__ import annotations

import pytest
from tests.collector_doubles import MemoryStore

from penstock.collector.consumers import ArrowConsumer, RawConsumer, WriteHealth
from penstock.errors import InvalidInput, PenstockError, Unavailable
from penstock.otlp import Signal
from penstock.quiver import AtCapacity
from penstock.testing.clock import ManualClock
from penstock.testing.otlp_kit import telemetry


def write(health: WriteHealth, error: PenstockError | None = None) -> None:
    with health.watching():
        if error is not None:
            raise error


async def test_after_a_failed_write_it_is_not_ready_until_one_succeeds_or_time_has_passed() -> None:
    clock = ManualClock()
    health = WriteHealth(clock)
    assert health.takes_writes
    with pytest.raises(Unavailable):
        write(health, Unavailable("the disk is full"))
    assert not health.takes_writes
    await clock.advance(29)
    assert not health.takes_writes
    await clock.advance(1)
    assert health.takes_writes, "a collector that is not ready receives no write that could succeed"
    with pytest.raises(Unavailable):
        write(health, Unavailable("the disk is full"))
    assert not health.takes_writes
    write(health)
    assert health.takes_writes


@pytest.mark.parametrize("error", [AtCapacity("full"), InvalidInput("no request")])
def test_a_refused_write_says_nothing_about_the_disk(error: PenstockError) -> None:
    health = WriteHealth(ManualClock())
    with pytest.raises(PenstockError):
        write(health, error)
    assert health.takes_writes


@pytest.mark.parametrize("kind", [RawConsumer, ArrowConsumer])
async def test_consumers_report_a_failed_write(kind: type[RawConsumer | ArrowConsumer]) -> None:
    store, health = MemoryStore(), WriteHealth(ManualClock())
    store.fail = Unavailable("the disk is full")
    with pytest.raises(Unavailable):
        await kind(store, health=health).take(telemetry(Signal.LOGS, items=1), Signal.LOGS)  # type: ignore[arg-type]
    assert not health.takes_writes
