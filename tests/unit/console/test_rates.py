"""Rates are computed from readings: never from one, over a restart, or over a failure."""

from __future__ import annotations

import pytest

from penstock.console.poller import Meter, Trail, rate_between


def test_one_reading_has_no_rate() -> None:
    meter = Meter()
    meter.read(1.0, 10)
    assert meter.rate is None


def test_growth_by_time_is_the_rate() -> None:
    meter = Meter()
    for second in range(5):
        meter.read(float(second), 100 * second)
    assert meter.rate == pytest.approx(100)


def test_a_counter_that_decreases_was_reset() -> None:
    meter = Meter()
    meter.read(1.0, 1000)
    meter.read(2.0, 5)
    assert meter.rate is None
    meter.read(3.0, 15)
    assert meter.rate == pytest.approx(10)


def test_after_a_failed_reading_the_rate_is_unknown() -> None:
    meter = Meter()
    meter.read(1.0, 10)
    meter.read(2.0, 20)
    meter.read(3.0, None)
    assert meter.rate is None


def test_old_readings_are_dropped() -> None:
    meter = Meter()
    meter.read(0.0, 0)
    for second in range(1, 40):
        meter.read(float(second), 1000)
    assert meter.rate == 0


def test_without_elapsed_time_there_is_no_rate() -> None:
    assert rate_between(0, 1.0, 10, 1.0) is None


def test_a_trail_keeps_the_last_points() -> None:
    trail = Trail(2)
    for point in range(4):
        trail.add(point, point * 10, None)
    assert trail.points() == [(2, 20, None), (3, 30, None)]
