"""Effective priority."""

from __future__ import annotations

import pytest

from penstock.topics.schedule.ready_set import effective_priority

NOW = 1_700_000_000_000


@pytest.mark.parametrize(
    ("idle_ms", "expected"),
    [(0, 500), (-5, 500), (30_000, 250), (60_000, 125), (299_999, 0), (300_000, 0), (90_000, 63)],
)
def test_a_read_raises_the_priority_and_decays_with_time(idle_ms: int, expected: int) -> None:
    found = effective_priority(None, auto_priority=True, now_ms=NOW, last_consumed_ms=NOW - idle_ms)
    assert found == expected


def test_a_configured_priority_replaces_the_automatic_one() -> None:
    for own, expected in ((0, 0), (7, 7), (-5, -5), (5000, 1000), (-5000, -1000)):
        assert effective_priority(own, auto_priority=True, now_ms=NOW, last_consumed_ms=NOW) == expected


def test_a_topic_without_reads_or_auto_priority_has_no_bonus() -> None:
    assert effective_priority(None, auto_priority=True, now_ms=NOW, last_consumed_ms=None) == 0
    assert effective_priority(None, auto_priority=False, now_ms=NOW, last_consumed_ms=NOW) == 0


@pytest.mark.parametrize(
    ("waited_ms", "expected"), [(-1, -3), (0, -3), (5, -3), (25, -1), (26, 0), (1000, 97), (99_999, 997)]
)
def test_a_waiting_topic_rises_and_halves_round_away_from_zero(waited_ms: int, expected: int) -> None:
    found = effective_priority(
        -3, auto_priority=True, now_ms=NOW, last_consumed_ms=None, enqueued_ms=NOW - waited_ms
    )
    assert found == expected
