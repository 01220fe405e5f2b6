"""The output of parts, as lines of one log."""

from __future__ import annotations

import random

import pytest

from penstock.child_process import Splitter
from penstock.testing import ManualClock
from penstock.up.log import (
    HELD_MAX_S,
    Levels,
    LogBuffer,
    LogFilter,
    OutputLine,
    Throttle,
    event_of,
    shown,
)
from penstock.up.status import FleetEvent, Level, LogLine


def test_lines_are_complete_for_any_split_of_the_input() -> None:
    splitter = Splitter()
    assert list(splitter.feed(b"one\ntw")) == ["one"]
    assert list(splitter.feed(b"o\r\n\nthree")) == ["two", ""]
    assert splitter.rest() == "three"
    assert splitter.rest() is None


def test_a_line_that_is_too_long_is_cut_and_says_so() -> None:
    splitter = Splitter(line_max=10)
    assert list(splitter.feed(b"0123456789abcde")) == []
    assert list(splitter.feed(b"fgh\nnext\n")) == ["0123456789 … (8 more bytes)", "next"]


def test_bytes_that_are_not_text_stay_a_line() -> None:
    assert list(Splitter().feed(b"a\xff\xfeb\n")) == ["a\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}b"]


def test_a_part_cannot_control_the_terminal() -> None:
    assert "\x1b" not in shown("\x1b[2Jgone\x07\x9b1m")
    assert shown("a\tb é") == "a\tb é"


def test_levels_come_from_the_line_itself() -> None:
    levels = Levels()
    assert levels.of("2026-01-02 03:04:05,678 WARNING it is late") == OutputLine(Level.WARNING, "it is late")
    assert levels.of("  more of it").level is Level.WARNING
    assert levels.of("2026-01-02 03:04:05,678 CRITICAL down").level is Level.ERROR
    assert levels.of("error: no such file") == OutputLine(Level.ERROR, "no such file", is_verdict=True)
    assert levels.of("hint: look there") == OutputLine(Level.INFO, "hint: look there")
    assert levels.of("anything").level is Level.INFO


def test_a_traceback_is_an_error_up_to_its_last_line() -> None:
    levels = Levels()
    trace = ["Traceback (most recent call last):", '  File "x.py", line 1, in f', "ValueError: no"]
    assert [levels.of(line).level for line in trace] == [Level.ERROR] * 3
    assert levels.of("and now something else").level is Level.INFO


def test_events_are_objects_with_a_name_and_nothing_else_is() -> None:
    assert event_of('{"event":"ready","port":1}') == {"event": "ready", "port": 1}
    for line in ("ready", '{"port":1}', '{"event":1}', '{"event":', "[1]", "{}"):
        assert event_of(line) is None


def test_a_flood_is_limited_and_counted() -> None:
    throttle = Throttle(per_s=10, burst=5)
    assert [throttle.admits(0.0) for _ in range(8)] == [True] * 5 + [False] * 3
    assert throttle.admits(0.1)
    assert throttle.take_omitted() == 3
    assert throttle.take_omitted() == 0


def test_the_log_reports_how_many_lines_of_a_part_were_omitted() -> None:
    log_buffer = LogBuffer(clock=ManualClock())
    heard: list[FleetEvent] = []
    end = log_buffer.subscribe(heard.append)
    for number in range(600):
        log_buffer.hear("noisy", OutputLine(Level.INFO, str(number)))
    log_buffer.hear("quiet", OutputLine(Level.INFO, "here"))
    log_buffer.report_omitted()
    lines = [line for line in heard if isinstance(line, LogLine)]
    assert [line.text for line in lines][-2:] == [
        "here",
        "100 lines were omitted: the part prints too many",
    ]
    assert [line.number for line in lines] == list(range(1, 503))
    end()
    log_buffer.say("up", Level.INFO, "nobody hears this")
    assert len(heard) == 502


def test_a_failed_listener_is_removed_and_the_others_continue(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log_buffer = LogBuffer(clock=ManualClock())
    heard: list[FleetEvent] = []

    def fail(event: FleetEvent) -> None:
        raise ValueError("no")

    log_buffer.subscribe(fail)
    log_buffer.subscribe(heard.append)
    log_buffer.say("up", Level.INFO, "one")
    log_buffer.say("up", Level.INFO, "two")
    assert len(heard) == 2
    assert len(caplog.records) == 1


def test_the_log_keeps_the_last_lines_and_numbers_them() -> None:
    log_buffer = LogBuffer(clock=ManualClock(), kept=5)
    for number in range(8):
        log_buffer.say("up", Level.INFO, str(number))
    assert [line.number for line in log_buffer.lines()] == [4, 5, 6, 7, 8]
    assert [line.text for line in log_buffer.lines(after=6)] == ["6", "7"]
    assert [line.text for line in log_buffer.lines(limit=1)] == ["7"]
    assert log_buffer.lines(limit=0) == []


SPARK_NOISE = [
    "Traceback (most recent call last):",
    '  File "/x/pyspark/python/lib/pyspark.zip/pyspark/daemon.py", line 264, in manager',
    "    code = worker(sock, authenticated)",
    "           ^^^^^^^^^^^^^^^^^^^^^^^^^^^",
    '  File "/x/pyspark/python/lib/pyspark.zip/pyspark/daemon.py", line 95, in worker',
    "    outfile.flush()",
    "BrokenPipeError: [Errno 32] Broken pipe",
]


def levels(lines: list[str]) -> list[tuple[str, Level]]:
    """Return every line with its level, in order of output."""
    listener = LogFilter()
    heard = [said for line in lines for said in listener.hear(line, 0.0)] + listener.release()
    return [(said.text, said.level) for said in heard]


@pytest.mark.parametrize("kept", [SPARK_NOISE, [line for line in SPARK_NOISE if line[:4] != "    "]])
def test_a_harmless_traceback_of_sparks_daemon_is_debug_as_one_block(kept: list[str]) -> None:
    assert levels([*kept, "next"]) == [*((line, Level.DEBUG) for line in kept), ("next", Level.INFO)]


JAVA_LOG = "12:00:01 WARN TaskSetManager: Stage 1 contains a task of very large size"
OTHER_TRACE = [
    "Traceback (most recent call last):",
    '  File "/x/mine.py", line 1, in f',
    "    f()",
    "ValueError: no",
]


@pytest.mark.parametrize("seed", range(40))
def test_interleaved_harmless_tracebacks_of_several_workers_are_debug(seed: int) -> None:
    rng = random.Random(seed)
    streams = [list(SPARK_NOISE) for _ in range(rng.randint(2, 4))] + [[JAVA_LOG]]
    mixed: list[str] = []
    while any(streams):
        mixed.append(rng.choice([stream for stream in streams if stream]).pop(0))
    told = levels(mixed)
    assert sorted(text for text, _ in told) == sorted(mixed)
    assert {level for text, level in told if text != JAVA_LOG} == {Level.DEBUG}


def test_an_error_between_harmless_lines_is_an_error() -> None:
    told = levels([*SPARK_NOISE[:5], *OTHER_TRACE, *SPARK_NOISE[5:]])
    assert [text for text, level in told if level is Level.ERROR] == OTHER_TRACE
    told = levels([*OTHER_TRACE[:2], *SPARK_NOISE[:3], *OTHER_TRACE[2:], *SPARK_NOISE[3:]])
    assert [text for text, level in told if level is Level.ERROR] == OTHER_TRACE


@pytest.mark.parametrize(
    "lines",
    [
        # The query itself has lost its connection.
        [*SPARK_NOISE[:5], '  File "/x/pyspark/worker.py", line 9, in main', SPARK_NOISE[-1]],
        # Another error of the daemon.
        [*SPARK_NOISE[:-1], "MemoryError"],
        # A pipe of another process.
        [SPARK_NOISE[0], '  File "/x/mine.py", line 1, in f', SPARK_NOISE[-1]],
        [SPARK_NOISE[0], SPARK_NOISE[-1]],
        # A new traceback begins within one.
        [*SPARK_NOISE[:2], SPARK_NOISE[0], '  File "a.py", line 1, in f', "ValueError: no"],
    ],
)
def test_no_other_traceback_is_harmless(lines: list[str]) -> None:
    told = levels(lines)
    assert sorted(text for text, _ in told) == sorted(lines)
    assert {level for _, level in told} == {Level.ERROR}


def test_a_worker_that_pauses_within_its_traceback_is_still_harmless() -> None:
    listener = LogFilter()
    assert [listener.hear(line, 10.0) for line in SPARK_NOISE[:3]] == [[], [], []]
    assert listener.overdue(12.0) == []
    heard = [said for line in SPARK_NOISE[3:] for said in listener.hear(line, 14.0)]
    assert {said.level for said in heard} == {Level.DEBUG}
    assert len(heard) == len(SPARK_NOISE)


def test_held_lines_are_released_when_no_more_follow() -> None:
    listener = LogFilter()
    assert [listener.hear(line, 10.0) for line in SPARK_NOISE[:2]] == [[], []]
    assert [said.level for said in listener.overdue(10.0 + HELD_MAX_S)] == [Level.ERROR] * 2
    assert listener.release() == []


def test_a_reason_is_distinguished_from_a_traceback() -> None:
    listener = LogFilter()
    (said,) = listener.hear("error: Spark's Java was killed by signal 9", 0.0)
    assert (said.text, said.is_verdict) == ("Spark's Java was killed by signal 9", True)
    traced = [said for line in OTHER_TRACE for said in listener.hear(line, 0.0)]
    assert not any(said.is_verdict for said in traced)


def test_text_changes_no_direction_and_fits_every_encoding() -> None:
    assert shown("a\u202eb\u2028c\ud800d\u2066").replace("\N{REPLACEMENT CHARACTER}", "") == "abcd"


def test_an_event_nested_too_deep_is_an_ordinary_line() -> None:
    assert event_of('{"event":' + "[" * 4000) is None
    assert event_of('{"event":' + '{"a":' * 4000) is None


def test_a_secret_is_masked_in_every_line() -> None:
    log_buffer = LogBuffer(clock=ManualClock(), secrets=["own-key-1234", "own-key-1234-longer", "key"])
    log_buffer.hear(
        "careless", OutputLine(Level.INFO, "sent own-key-1234, then own-key-1234-longer as the key")
    )
    log_buffer.say("up", Level.INFO, "own-key-1234")
    assert [line.text for line in log_buffer.lines()] == ["sent ***, then *** as the key", "***"]
