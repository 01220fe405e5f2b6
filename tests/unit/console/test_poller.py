"""A source is polled only while there are viewers, and one that hangs is unknown."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from penstock.console.poller import Poller
from penstock.errors import Unavailable
from penstock.testing import ManualClock


class Source:
    def __init__(self) -> None:
        self.looks = 0
        self.error: Exception | None = None
        self.hangs = False

    async def look(self) -> int:
        self.looks += 1
        if self.hangs:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        return self.looks


def poller(source: Source, clock: ManualClock, timeout_s: float = 5.0) -> Poller[int]:
    return Poller(source.look, clock, interval_s=1.0, timeout_s=timeout_s)


async def test_without_a_viewer_nothing_is_polled() -> None:
    source, clock = Source(), ManualClock()
    watching = poller(source, clock)
    await clock.advance(60)
    assert source.looks == 0
    with watching.watched(), watching.watched():
        await clock.advance(3)
        assert source.looks == 4
    await clock.advance(60)
    assert source.looks == 4
    await watching.close()


async def test_a_fresh_reading_is_taken_once_for_concurrent_requests() -> None:
    source, clock = Source(), ManualClock()
    watching = poller(source, clock)
    readings = await asyncio.gather(*(watching.fresh() for _ in range(5)))
    assert {reading.value for reading in readings} == {1}
    await clock.advance(2)
    assert (await watching.fresh()).value == 2


async def test_a_failure_has_its_reason_and_its_time() -> None:
    source, clock = Source(), ManualClock()
    watching = poller(source, clock)
    source.error = Unavailable("the store is away")
    first = await watching.fresh()
    assert (first.value, first.error) == (None, "the store is away")
    await clock.advance(10)
    again = await watching.fresh()
    assert again.failing_since_ms == first.failing_since_ms
    source.error = None
    await clock.advance(10)
    assert (await watching.fresh()).error is None


async def test_a_source_that_hangs_is_unknown_and_delays_no_other() -> None:
    source, clock = Source(), ManualClock()
    source.hangs = True
    watching = poller(source, clock, timeout_s=0.2)
    asked = await watching.fresh(wait_s=0.01)
    assert asked.value is None
    reading = await watching.fresh()
    assert reading.error == "it did not respond in time"
    await watching.close()


async def test_an_old_reading_is_ignored() -> None:
    source, clock = Source(), ManualClock()
    watching = poller(source, clock)
    assert (await watching.fresh()).value == 1
    await clock.advance(60)
    assert watching.reading.value is None
    assert watching.reading.error


async def test_a_bug_in_a_poll_is_a_reading_without_a_value(caplog: pytest.LogCaptureFixture) -> None:
    source, clock = Source(), ManualClock()
    source.error = ZeroDivisionError("oops")
    reading = await poller(source, clock).fresh()
    assert reading.value is None
    assert "see the console's log" in str(reading.error)
    assert "oops" in caplog.text


async def test_a_slow_source_is_polled_less_often() -> None:
    clock = ManualClock()
    began: list[float] = []
    takes_s = iter([0.02, *[0.4] * 4, *[0.02] * 50])

    async def look() -> int:
        began.append(clock.monotonic())
        await clock.sleep(next(takes_s))
        return len(began)

    watching = Poller(look, clock, interval_s=2.0, timeout_s=60.0, interval_max_s=5.0)
    with watching.watched():
        for _ in range(600):
            await clock.advance(0.1)
    await watching.close()
    gaps = [round(after - before) for before, after in itertools.pairwise(began)]
    assert gaps[0] == 4, "a look of 20 ms takes a two-hundredth of four seconds"
    assert set(gaps[1:4]) == {4}, "one quick answer says that the slow ones only waited"
    assert set(gaps[6:]) == {4}


async def test_no_source_is_polled_less_often_than_its_longest_interval() -> None:
    clock = ManualClock()
    looks = 0

    async def look() -> int:
        nonlocal looks
        looks += 1
        await clock.sleep(1.0)
        return looks

    watching = Poller(look, clock, interval_s=2.0, timeout_s=60.0, interval_max_s=5.0)
    with watching.watched():
        for _ in range(595):
            await clock.advance(0.1)
    assert looks == 10, "five seconds after each answer, which takes one"
    assert watching.reading.value == looks, "and what it said is believed in between"
    await watching.close()
