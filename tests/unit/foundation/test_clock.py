"""The time used to measure ages, independent of steps of the wall clock."""

from __future__ import annotations

import random

import pytest

from penstock.clock import SteadyClock
from penstock.testing import ManualClock

DAY_MS, HOUR_MS = 86_400_000, 3_600_000


async def test_a_clock_that_was_wrong_at_the_start_delays_nothing_for_longer_than_its_age() -> None:
    """A machine without a real-time clock starts in the past, and is set forward by years."""
    clock = ManualClock()
    steady = SteadyClock(clock)
    clock.jump_wall(20 * 365 * DAY_MS)
    assert steady.cautious_ms(HOUR_MS) < clock.now_ms() - 19 * 365 * DAY_MS
    await clock.advance(3599)
    assert steady.cautious_ms(HOUR_MS) < clock.now_ms() - 19 * 365 * DAY_MS
    await clock.advance(2)
    assert steady.cautious_ms(HOUR_MS) == clock.now_ms()
    assert steady.cautious_ms(2 * HOUR_MS) == steady.cautious_ms() < clock.now_ms()


async def test_a_slewed_clock_is_followed_and_few_steps_are_kept() -> None:
    clock = ManualClock()
    steady = SteadyClock(clock)
    for _ in range(5000):
        clock.jump_wall(1)
        await clock.advance(1)
        assert 0 <= clock.now_ms() - steady.cautious_ms(60_000) <= 1_100
    for _ in range(500):
        clock.jump_wall(HOUR_MS)
        steady.cautious_ms(DAY_MS)
    assert len(steady._leads) <= 64


@pytest.mark.parametrize("seed", range(20))
async def test_no_age_is_overestimated_and_every_age_is_reached(seed: int) -> None:
    rng = random.Random(seed)
    clock = ManualClock()
    steady = SteadyClock(clock)
    age_ms, now_s, stamps, back_s = 600_000, 0.0, [], 0.0
    for _ in range(400):
        step_ms = rng.choice([0] * 20 + [HOUR_MS, DAY_MS, -HOUR_MS])
        clock.jump_wall(step_ms)
        back_s += -step_ms / 1000 if step_ms < 0 else 0
        stamps.append((now_s, clock.now_ms()))
        passed_s = rng.uniform(1, 120)
        await clock.advance(passed_s)
        now_s += passed_s
        by_ms = steady.cautious_ms(age_ms)
        for made_s, stamp_ms in stamps:
            is_old = by_ms - stamp_ms >= age_ms
            assert not is_old or now_s - made_s >= age_ms / 1000 - 1.2
            assert is_old or now_s - made_s < age_ms / 1000 + back_s + 125
