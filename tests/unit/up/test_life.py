"""The life of a part: what happens to it, and what is done about it."""

from __future__ import annotations

import random

import pytest

from penstock.up import life as lives
from penstock.up.life import Act, Answer, Exit, Life
from penstock.up.status import PartState


def rng() -> random.Random:
    return random.Random(7)


def running(now_s: float = 0.0) -> Life:
    return lives.started(lives.new_life(now_s), now_s)


def ready(now_s: float = 0.0) -> Life:
    return lives.told_ready(running(now_s), now_s)


def test_a_new_part_is_started_at_once_and_a_disabled_one_never() -> None:
    assert lives.next_act(lives.new_life(5.0), 5.0) is Act.START
    off = lives.new_life(5.0, enabled=False)
    assert off.state is PartState.DISABLED
    assert lives.next_act(off, 1e9) is Act.NOTHING
    assert off.is_over


def test_it_is_starting_until_its_probe_answers() -> None:
    life = running()
    assert lives.next_act(life, 0.0) is Act.NOTHING
    for answer in (Answer.SILENT, Answer.NOT_READY, Answer.SILENT):
        life = lives.answered(life, answer, 1000.0)
    assert life.state is PartState.STARTING
    assert lives.answered(life, Answer.READY, 1001.0).state is PartState.READY


def test_a_start_may_take_long_and_a_part_that_hangs_in_it_is_killed() -> None:
    life = lives.answered(running(), Answer.SILENT, 1.0)
    assert lives.next_act(life, lives.STARTING_MAX_S - 1) is Act.NOTHING
    assert lives.next_act(life, lives.STARTING_MAX_S) is Act.KILL
    assert lives.why_killed(life, lives.STARTING_MAX_S) == "is not ready after 30m, and is killed"
    # One that says that it is still at it does not hang.
    for told in (
        lives.answered(life, Answer.NOT_READY, 1000.0),
        lives.told_trouble(life, 1000.0),
        lives.told_alive(life, 1000.0),
    ):
        assert told.state is PartState.STARTING
        assert lives.next_act(told, lives.STARTING_MAX_S + 999) is Act.NOTHING
        assert lives.next_act(told, lives.STARTING_MAX_S + 1000) is Act.KILL
    assert lives.next_act(ready(), 1e9) is Act.NOTHING, "it never said that it would tell that it lives"


def test_a_part_that_tells_that_it_lives_and_then_does_not_is_killed() -> None:
    life = ready()
    for second in range(0, 10_000, 10):
        assert lives.next_act(life, float(second)) is Act.NOTHING
        life = lives.told_alive(life, float(second))
    assert lives.next_act(life, 9990 + lives.MUTE_MAX_S - 1) is Act.NOTHING
    assert lives.next_act(life, 9990 + lives.MUTE_MAX_S) is Act.KILL
    assert lives.why_killed(life, 9990 + lives.MUTE_MAX_S) == "has told nothing for 5m, and is killed"
    # What the fleet itself slept through is not held against it.
    late = lives.excused(life, 50_000.0)
    assert lives.next_act(late, 50_000.0) is Act.NOTHING
    assert lives.next_act(late, 50_000 + lives.MUTE_MAX_S) is Act.KILL
    # Another process has told nothing yet.
    again = lives.started(lives.ended(life, Exit(signal=9), 10_000.0, rng()), 10_001.0)
    assert lives.next_act(again, 10_001 + lives.MUTE_MAX_S) is Act.NOTHING


def test_what_it_told_while_it_started_is_not_counted_from_then() -> None:
    life = lives.told_alive(running(), 10.0)
    life = lives.told_ready(life, 10 + lives.MUTE_MAX_S)
    assert lives.next_act(life, 10 + lives.MUTE_MAX_S) is Act.NOTHING
    assert lives.next_act(life, 10 + 2 * lives.MUTE_MAX_S) is Act.KILL


def test_a_part_that_starts_again_by_itself_has_the_time_of_a_start() -> None:
    life = lives.told_trouble(lives.told_alive(ready(), 10.0), 20.0)
    assert life.state is PartState.NOT_READY
    assert lives.next_act(life, 20 + lives.STARTING_MAX_S - 1) is Act.NOTHING
    assert lives.next_act(life, 20 + lives.STARTING_MAX_S) is Act.KILL
    assert lives.next_act(lives.told_ready(life, 30.0), 1e9) is Act.NOTHING


def test_one_lost_probe_says_nothing_and_two_say_not_ready() -> None:
    life = lives.answered(ready(), Answer.NOT_READY, 1.0)
    assert life.state is PartState.READY
    life = lives.answered(life, Answer.NOT_READY, 2.0)
    assert (life.state, life.since_s) == (PartState.NOT_READY, 2.0)
    assert lives.answered(life, Answer.READY, 3.0).state is PartState.READY


def test_a_part_that_hangs_is_killed_and_one_that_answers_is_not() -> None:
    life = ready()
    for second in range(1, 200):
        life = lives.answered(life, Answer.NOT_READY, float(second))
    assert lives.next_act(life, 200.0) is Act.NOTHING
    life = lives.answered(life, Answer.SILENT, 200.0)
    assert lives.next_act(life, 200.0 + lives.SILENT_MAX_S - 1) is Act.NOTHING
    assert lives.next_act(life, 200.0 + lives.SILENT_MAX_S) is Act.KILL


def test_waits_between_starts_grow_with_every_failure_up_to_a_minute() -> None:
    life, dice = running(), rng()
    spans = []
    for failure in range(12):
        life = lives.ended(life, Exit(code=1), 0.0, dice)
        assert life.state is PartState.RESTARTING
        assert life.next_start_s is not None
        assert 0 <= life.next_start_s <= min(60.0, 0.5 * 2**failure)
        assert lives.next_act(life, life.next_start_s) is Act.START
        spans.append(life.next_start_s)
        life = lives.started(life, 0.0)
    assert life.restarts == 12
    assert max(spans[6:]) > max(spans[:3])


def test_a_healthy_minute_begins_a_new_count_and_less_does_not() -> None:
    tried = lives.ended(lives.told_ready(running(), 0.0), Exit(signal=9), 59.0, rng())
    again = lives.told_ready(lives.started(tried, 60.0), 60.0)
    assert lives.ended(again, Exit(signal=9), 60.0 + lives.HEALTHY_S - 1, rng()).failures == 2
    assert lives.ended(again, Exit(signal=9), 60.0 + lives.HEALTHY_S, rng()).failures == 1


def test_wrong_settings_are_tried_again_at_a_slow_pace() -> None:
    life = lives.ended(running(), Exit(code=2), 10.0, rng())
    assert life.state is PartState.FAILED
    assert life.next_start_s == 10.0 + lives.WRONG_AGAIN_S


@pytest.mark.parametrize("code", [4, 5])
def test_a_part_that_was_fenced_or_found_damage_is_left_alone_until_somebody_asks(code: int) -> None:
    life = lives.ended(ready(), Exit(code=code), 10.0, rng())
    assert (life.state, life.next_start_s) == (PartState.FAILED, None)
    assert lives.next_act(life, 1e9) is Act.NOTHING
    assert lives.why_failed(Exit(code=code))
    assert lives.next_act(lives.try_again(life, 20.0), 20.0) is Act.START


@pytest.mark.parametrize("how", [Exit(code=0), Exit(code=1), Exit(code=3), Exit(code=6), Exit(signal=9)])
def test_every_other_end_is_followed_by_another_start(how: Exit) -> None:
    assert lives.ended(ready(), how, 1.0, rng()).state is PartState.RESTARTING
    assert lives.why_failed(how) == ""


def test_a_stop_ends_it_for_good_whatever_the_exit_code() -> None:
    life = lives.ask_to_stop(ready(), 1.0)
    assert life.state is PartState.STOPPING
    assert lives.answered(life, Answer.READY, 1.5).state is PartState.STOPPING
    life = lives.ended(life, Exit(signal=9), 2.0, rng())
    assert (life.state, life.is_over) == (PartState.STOPPED, True)
    assert lives.next_act(life, 1e9) is Act.NOTHING


@pytest.mark.parametrize("code", [1, 2, 4])
def test_a_stop_ends_a_part_that_waits_to_be_started_at_once(code: int) -> None:
    waiting = lives.ended(ready(), Exit(code=code), 1.0, rng())
    assert lives.ask_to_stop(waiting, 1.0).state is PartState.STOPPED
    assert lives.ask_to_stop(lives.new_life(0.0), 0.0).state is PartState.STOPPED


def test_trouble_that_a_part_tells_itself_makes_it_not_ready() -> None:
    assert lives.told_trouble(ready(), 1.0).state is PartState.NOT_READY
    assert lives.told_trouble(running(), 1.0).state is PartState.STARTING
    stopped = lives.ask_to_stop(ready(), 1.0)
    assert lives.told_trouble(stopped, 2.0) == stopped


def test_an_exit_is_told_in_words() -> None:
    assert str(Exit.of(-9)) == "killed by signal 9"
    assert str(Exit.of(3)) == "exit code 3"
