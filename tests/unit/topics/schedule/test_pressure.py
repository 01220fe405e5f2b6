"""The pressure on the server, and its measures."""

from __future__ import annotations

import pytest

from penstock.topics.schedule.pressure import CALM, Governor, Ladder, Signals


def signals(*, depth: int = 0, wait_ms: float = 0.0, busy: float = 0.0) -> Signals:
    return Signals(depth=depth, wait_ms=wait_ms, busy=busy)


def pressed(governor: Governor, of: Signals, samples: int) -> Ladder:
    for _ in range(samples):
        governor.sample(of)
    return governor.ladder


def test_without_load_nothing_is_deferred() -> None:
    assert pressed(Governor(), signals(depth=1, wait_ms=0.005), 100) == CALM


@pytest.mark.parametrize("of", [signals(depth=256), signals(wait_ms=5.0), signals(busy=1.0)])
def test_each_signal_alone_can_reach_full_pressure(of: Signals) -> None:
    assert pressed(Governor(), of, 40).pressure == pytest.approx(1.0, abs=0.01)


def test_pressure_never_leaves_its_range() -> None:
    assert pressed(Governor(), signals(depth=10**6, wait_ms=10**6, busy=10.0), 100).pressure <= 1.0


def test_a_single_spike_is_smoothed_away() -> None:
    governor = Governor()
    spike = governor.sample(signals(wait_ms=1000.0))
    assert spike.pressure == pytest.approx(0.3)
    assert not spike.defers
    assert not spike.refuses
    assert pressed(governor, signals(), 40) == CALM


def test_the_ladder_is_climbed_step_by_step() -> None:
    light = pressed(Governor(), signals(busy=0.3), 60)
    assert light.coalesce_ms == pytest.approx(2.5, abs=0.1)
    assert light.commit_window_ms == 0.0
    middle = pressed(Governor(), signals(busy=0.5), 60)
    assert middle.commit_window_ms == pytest.approx(5.25, abs=0.1)
    assert not middle.defers
    full = pressed(Governor(), signals(busy=1.0), 60)
    assert full.coalesce_ms == pytest.approx(20.0, abs=0.1)
    assert full.commit_window_ms == pytest.approx(10.0, abs=0.1)
    assert full.defers
    assert full.refuses


def test_work_is_deferred_only_when_pressure_lasts_and_until_it_has_fallen() -> None:
    governor = Governor()
    ladders = [governor.sample(signals(busy=1.0)) for _ in range(12)]
    above = next(n for n, ladder in enumerate(ladders) if ladder.pressure > 0.8)
    assert [ladder.defers for ladder in ladders[above : above + 6]] == [False] * 4 + [True] * 2
    falling = [governor.sample(signals(busy=0.7)) for _ in range(60)]
    assert falling[-1].pressure == pytest.approx(0.7, abs=0.01)
    assert all(ladder.defers for ladder in falling), "between the two marks nothing changes"
    assert not pressed(governor, signals(busy=0.5), 60).defers
