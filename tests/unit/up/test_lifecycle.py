"""The lifecycle of a part: its events and the resulting actions."""

from __future__ import annotations

import random

import pytest

from penstock.child_process import Exit
from penstock.up import lifecycle
from penstock.up.lifecycle import Action, ProbeResult, ProcessState
from penstock.up.status import PartState


def rng() -> random.Random:
    return random.Random(7)


def running(now_s: float = 0.0) -> ProcessState:
    return lifecycle.on_start(lifecycle.initial_state(now_s), now_s)


def ready(now_s: float = 0.0) -> ProcessState:
    return lifecycle.on_ready(running(now_s), now_s)


def test_a_new_part_starts_immediately_and_a_disabled_one_never() -> None:
    assert lifecycle.next_action(lifecycle.initial_state(5.0), 5.0) is Action.START
    off = lifecycle.initial_state(5.0, enabled=False)
    assert off.state is PartState.DISABLED
    assert lifecycle.next_action(off, 1e9) is Action.NOTHING
    assert off.is_over


def test_it_is_starting_until_its_probe_answers() -> None:
    process = running()
    assert lifecycle.next_action(process, 0.0) is Action.NOTHING
    for answer in (ProbeResult.SILENT, ProbeResult.NOT_READY, ProbeResult.SILENT):
        process = lifecycle.on_probe(process, answer, 1000.0)
    assert process.state is PartState.STARTING
    assert lifecycle.on_probe(process, ProbeResult.READY, 1001.0).state is PartState.READY


def test_a_start_may_take_long_and_a_part_that_hangs_in_it_is_killed() -> None:
    process = lifecycle.on_probe(running(), ProbeResult.SILENT, 1.0)
    assert lifecycle.next_action(process, lifecycle.STARTING_MAX_S - 1) is Action.NOTHING
    assert lifecycle.next_action(process, lifecycle.STARTING_MAX_S) is Action.KILL
    assert lifecycle.hang_reason(process, lifecycle.STARTING_MAX_S) == "is not ready after 30m and is killed"
    # A part that reports that it is still starting does not hang.
    for told in (
        lifecycle.on_probe(process, ProbeResult.NOT_READY, 1000.0),
        lifecycle.on_trouble(process, 1000.0),
        lifecycle.on_heartbeat(process, 1000.0),
    ):
        assert told.state is PartState.STARTING
        assert lifecycle.next_action(told, lifecycle.STARTING_MAX_S + 999) is Action.NOTHING
        assert lifecycle.next_action(told, lifecycle.STARTING_MAX_S + 1000) is Action.KILL
    assert lifecycle.next_action(ready(), 1e9) is Action.NOTHING, (
        "it never said that it would tell that it lives"
    )


def test_a_part_whose_heartbeat_stops_is_killed() -> None:
    process = ready()
    for second in range(0, 10_000, 10):
        assert lifecycle.next_action(process, float(second)) is Action.NOTHING
        process = lifecycle.on_heartbeat(process, float(second))
    assert lifecycle.next_action(process, 9990 + lifecycle.MUTE_MAX_S - 1) is Action.NOTHING
    assert lifecycle.next_action(process, 9990 + lifecycle.MUTE_MAX_S) is Action.KILL
    assert (
        lifecycle.hang_reason(process, 9990 + lifecycle.MUTE_MAX_S) == "has been silent for 5m and is killed"
    )
    # Time during which the fleet itself was suspended does not count as silence.
    late = lifecycle.excuse_silence(process, 50_000.0)
    assert lifecycle.next_action(late, 50_000.0) is Action.NOTHING
    assert lifecycle.next_action(late, 50_000 + lifecycle.MUTE_MAX_S) is Action.KILL
    # Another process has not reported anything yet.
    again = lifecycle.on_start(lifecycle.on_exit(process, Exit(signal=9), 10_000.0, rng()), 10_001.0)
    assert lifecycle.next_action(again, 10_001 + lifecycle.MUTE_MAX_S) is Action.NOTHING


def test_a_heartbeat_during_the_start_does_not_count_later() -> None:
    process = lifecycle.on_heartbeat(running(), 10.0)
    process = lifecycle.on_ready(process, 10 + lifecycle.MUTE_MAX_S)
    assert lifecycle.next_action(process, 10 + lifecycle.MUTE_MAX_S) is Action.NOTHING
    assert lifecycle.next_action(process, 10 + 2 * lifecycle.MUTE_MAX_S) is Action.KILL


def test_a_part_that_restarts_its_work_gets_the_start_timeout() -> None:
    process = lifecycle.on_trouble(lifecycle.on_heartbeat(ready(), 10.0), 20.0)
    assert process.state is PartState.NOT_READY
    assert lifecycle.next_action(process, 20 + lifecycle.STARTING_MAX_S - 1) is Action.NOTHING
    assert lifecycle.next_action(process, 20 + lifecycle.STARTING_MAX_S) is Action.KILL
    assert lifecycle.next_action(lifecycle.on_ready(process, 30.0), 1e9) is Action.NOTHING


def test_one_failed_probe_is_ignored_and_two_mean_not_ready() -> None:
    process = lifecycle.on_probe(ready(), ProbeResult.NOT_READY, 1.0)
    assert process.state is PartState.READY
    process = lifecycle.on_probe(process, ProbeResult.NOT_READY, 2.0)
    assert (process.state, process.since_s) == (PartState.NOT_READY, 2.0)
    assert lifecycle.on_probe(process, ProbeResult.READY, 3.0).state is PartState.READY


def test_a_part_that_hangs_is_killed_and_one_that_responds_is_not() -> None:
    process = ready()
    for second in range(1, 200):
        process = lifecycle.on_probe(process, ProbeResult.NOT_READY, float(second))
    assert lifecycle.next_action(process, 200.0) is Action.NOTHING
    process = lifecycle.on_probe(process, ProbeResult.SILENT, 200.0)
    assert lifecycle.next_action(process, 200.0 + lifecycle.SILENT_MAX_S - 1) is Action.NOTHING
    assert lifecycle.next_action(process, 200.0 + lifecycle.SILENT_MAX_S) is Action.KILL


def test_restart_delays_grow_with_every_failure_up_to_a_minute() -> None:
    process, dice = running(), rng()
    spans = []
    for failure in range(12):
        process = lifecycle.on_exit(process, Exit(code=1), 0.0, dice)
        assert process.state is PartState.RESTARTING
        assert process.next_start_s is not None
        assert 0 <= process.next_start_s <= min(60.0, 0.5 * 2**failure)
        assert lifecycle.next_action(process, process.next_start_s) is Action.START
        spans.append(process.next_start_s)
        process = lifecycle.on_start(process, 0.0)
    assert process.restarts == 12
    assert max(spans[6:]) > max(spans[:3])


def test_a_healthy_minute_resets_the_failure_count_and_less_does_not() -> None:
    tried = lifecycle.on_exit(lifecycle.on_ready(running(), 0.0), Exit(signal=9), 59.0, rng())
    again = lifecycle.on_ready(lifecycle.on_start(tried, 60.0), 60.0)
    assert lifecycle.on_exit(again, Exit(signal=9), 60.0 + lifecycle.HEALTHY_S - 1, rng()).failures == 2
    assert lifecycle.on_exit(again, Exit(signal=9), 60.0 + lifecycle.HEALTHY_S, rng()).failures == 1


def test_wrong_settings_are_retried_slowly() -> None:
    process = lifecycle.on_exit(running(), Exit(code=2), 10.0, rng())
    assert process.state is PartState.FAILED
    assert process.next_start_s == 10.0 + lifecycle.WRONG_AGAIN_S


@pytest.mark.parametrize("code", [4, 5])
def test_a_part_that_was_fenced_or_found_damage_is_restarted_only_on_request(code: int) -> None:
    process = lifecycle.on_exit(ready(), Exit(code=code), 10.0, rng())
    assert (process.state, process.next_start_s) == (PartState.FAILED, None)
    assert lifecycle.next_action(process, 1e9) is Action.NOTHING
    assert lifecycle.failure_reason(Exit(code=code))
    assert lifecycle.next_action(lifecycle.try_again(process, 20.0), 20.0) is Action.START


@pytest.mark.parametrize("how", [Exit(code=0), Exit(code=1), Exit(code=3), Exit(code=6), Exit(signal=9)])
def test_every_other_exit_is_followed_by_a_restart(how: Exit) -> None:
    assert lifecycle.on_exit(ready(), how, 1.0, rng()).state is PartState.RESTARTING
    assert lifecycle.failure_reason(how) == ""


def test_a_stop_is_final_for_any_exit_code() -> None:
    process = lifecycle.on_stop_request(ready(), 1.0)
    assert process.state is PartState.STOPPING
    assert lifecycle.on_probe(process, ProbeResult.READY, 1.5).state is PartState.STOPPING
    process = lifecycle.on_exit(process, Exit(signal=9), 2.0, rng())
    assert (process.state, process.is_over) == (PartState.STOPPED, True)
    assert lifecycle.next_action(process, 1e9) is Action.NOTHING


@pytest.mark.parametrize("code", [1, 2, 4])
def test_a_stop_immediately_ends_a_part_that_waits_for_its_start(code: int) -> None:
    waiting = lifecycle.on_exit(ready(), Exit(code=code), 1.0, rng())
    assert lifecycle.on_stop_request(waiting, 1.0).state is PartState.STOPPED
    assert lifecycle.on_stop_request(lifecycle.initial_state(0.0), 0.0).state is PartState.STOPPED


def test_a_reported_error_makes_a_part_not_ready() -> None:
    assert lifecycle.on_trouble(ready(), 1.0).state is PartState.NOT_READY
    assert lifecycle.on_trouble(running(), 1.0).state is PartState.STARTING
    stopped = lifecycle.on_stop_request(ready(), 1.0)
    assert lifecycle.on_trouble(stopped, 2.0) == stopped


def test_an_exit_is_described_in_words() -> None:
    assert str(Exit.of(-9)) == "killed by signal 9 (SIGKILL)"
    assert str(Exit.of(3)) == "exit code 3"
