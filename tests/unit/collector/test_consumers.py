"""The consumers between a receiver and the store or an exporter."""

from __future__ import annotations

import pytest
from tests.collector_doubles import MemoryStore

from penstock.collector.consumers import (
    TAKEN,
    DirectConsumer,
    FanOutConsumer,
    RawConsumer,
    Reply,
    RoundRobinConsumer,
)
from penstock.collector.outcome import Outcome, Verdict, delivered, refused
from penstock.collector.payload import Payload
from penstock.errors import InvalidInput, StorageFull, Unavailable
from penstock.otlp.schema import Signal
from penstock.testing.otlp_kit import telemetry

DATA = telemetry(Signal.LOGS, items=2)


class Fixed:
    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self.sent = 0

    async def start(self) -> None: ...

    async def send(self, payload: Payload) -> Outcome:
        self.sent += 1
        return self._outcome

    async def close(self) -> None: ...


async def test_round_robin_alternates() -> None:
    stores = [MemoryStore(), MemoryStore()]
    intake = RoundRobinConsumer([RawConsumer(store) for store in stores])
    for _ in range(4):
        await intake.take(DATA, Signal.LOGS)
    assert [len(store.stored) for store in stores] == [2, 2]


async def test_fan_out_accepts_when_all_accept_and_returns_the_worst_reply() -> None:
    exporters = [Fixed(delivered()), Fixed(delivered(rejected_items=2, message="old"))]
    intake = FanOutConsumer([DirectConsumer(exporter) for exporter in exporters])
    assert await intake.take(DATA, Signal.LOGS) == Reply(2, "old")
    assert [exporter.sent for exporter in exporters] == [1, 1]


async def test_fan_out_refuses_when_one_refuses() -> None:
    full = MemoryStore()
    full.fail = StorageFull("full")
    intake = FanOutConsumer([RawConsumer(MemoryStore()), RawConsumer(full)])
    with pytest.raises(StorageFull):
        await intake.take(DATA, Signal.LOGS)


async def test_the_outcome_of_a_direct_exporter_is_the_reply() -> None:
    assert await DirectConsumer(Fixed(delivered())).take(DATA, Signal.LOGS) is TAKEN
    with pytest.raises(InvalidInput, match="no"):
        await DirectConsumer(Fixed(refused("no"))).take(DATA, Signal.LOGS)
    busy = Outcome(verdict=Verdict.RETRY, reason="busy", retry_after_s=7)
    with pytest.raises(Unavailable) as caught:
        await DirectConsumer(Fixed(busy)).take(DATA, Signal.LOGS)
    assert getattr(caught.value, "retry_after_s", None) == 7


async def test_nothing_is_sent_for_an_empty_request() -> None:
    exporter = Fixed(delivered())
    assert await DirectConsumer(exporter).take(b"", Signal.LOGS) is TAKEN
    assert exporter.sent == 0


async def test_full_validation_refuses_what_framing_accepts() -> None:
    damaged = b"\x0a\x01\xff"
    store = MemoryStore()
    await RawConsumer(store).take(damaged, Signal.LOGS)
    with pytest.raises(InvalidInput):
        await RawConsumer(store, full=True).take(damaged, Signal.LOGS)
    assert len(store.stored) == 1
