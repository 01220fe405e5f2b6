"""The window in which a repeated write is recognised."""

from __future__ import annotations

from penstock.topics.topic.idempotency import Outcome, WriteWindow

FIRST = Outcome(1, 3, 3, 1000)


def test_a_key_is_valid_until_the_end_of_the_window_and_no_longer() -> None:
    window = WriteWindow()
    window.add("k", FIRST)
    assert window.find("k", now_ms=1100, window_ms=100) == FIRST
    assert window.find("k", now_ms=1101, window_ms=100) is None
    assert len(window) == 0


def test_an_unknown_key_is_new() -> None:
    window = WriteWindow()
    window.add("k", FIRST)
    assert window.find("other", now_ms=1000, window_ms=100) is None


def test_keys_expire_in_the_order_of_their_writes() -> None:
    window = WriteWindow()
    for place in range(10):
        window.add(f"k{place}", Outcome(place, place, place, 1000 + place))
    assert window.find("k9", now_ms=1105, window_ms=100) is not None
    assert len(window) == 5


def test_a_window_of_zero_still_covers_the_same_moment() -> None:
    window = WriteWindow()
    window.add("k", FIRST)
    assert window.find("k", now_ms=1000, window_ms=0) == FIRST
    assert window.find("k", now_ms=1001, window_ms=0) is None


def test_a_clock_that_is_set_back_does_not_keep_a_key_indefinitely() -> None:
    window = WriteWindow()
    window.add("ahead", Outcome(1, 1, 1, 9000))
    window.add("behind", Outcome(2, 2, 2, 1000))
    assert window.find("behind", now_ms=2000, window_ms=100) is None
    assert window.find("ahead", now_ms=9200, window_ms=100) is None
    assert len(window) == 0


def test_memory_is_bounded_whatever_the_window() -> None:
    window = WriteWindow(keys_max=3)
    for place in range(10):
        window.add(f"k{place}", FIRST)
    assert len(window) == 3
    assert window.find("k9", now_ms=1000, window_ms=100) == FIRST
    assert window.find("k0", now_ms=1000, window_ms=100) is None


def test_long_keys_are_distinguished() -> None:
    window = WriteWindow()
    window.add("x" * 256, FIRST)
    assert window.find("x" * 255, now_ms=1000, window_ms=100) is None
    assert window.find("x" * 256, now_ms=1000, window_ms=100) == FIRST


def test_an_expired_key_can_be_used_again() -> None:
    window = WriteWindow()
    window.add("k", FIRST)
    again = Outcome(4, 4, 4, 2000)
    assert window.find("k", now_ms=2000, window_ms=100) is None
    window.add("k", again)
    assert window.find("k", now_ms=2050, window_ms=100) == again
    window.clear()
    assert window.find("k", now_ms=2050, window_ms=100) is None
