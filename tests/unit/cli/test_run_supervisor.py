"""What ends a run, what only interrupts it, and what the display shows."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, cast

import pytest

from penstock.cli.failure import ExitCode
from penstock.cli.run import display as run_display
from penstock.cli.run import supervisor as run_supervisor
from penstock.cli.run.display import View
from penstock.cli.run.supervisor import Supervisor, backoff_s, cause_of, is_passing
from penstock.cli.signals import LeaveNow, StopSignals
from penstock.errors import (
    ConfigError,
    Conflict,
    Corrupt,
    Fenced,
    InvalidInput,
    OutcomeUnknown,
    PenstockError,
    Unavailable,
)
from penstock.spark.pipeline.ledger import BatchLine
from penstock.spark.pipeline.spec import PipelineSpec, read_spec
from penstock.spark.session.java_process import Ending

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.spark.pipeline.pipeline import Pipeline

Step = BatchLine | Exception | signal.Signals | None
"""The outcome of waiting for a run: a micro-batch, an error, a signal, or the end."""


def line(batch: int) -> BatchLine:
    return BatchLine(batch=batch, start={0: batch}, end={0: batch + 1}, read=1, rows={"delta": 1}, at_ms=0)


class FakeRun:
    def __init__(self, steps: list[Step], on_line: Callable[[BatchLine], None]) -> None:
        self._steps = steps
        self._on_line = on_line
        self.asked = False
        self.idle = 0

    def wait(self, timeout_s: float) -> bool:
        if self.idle:
            self.idle -= 1
            return False
        if self.asked and not self._steps:
            return True
        step = self._steps.pop(0) if self._steps else None
        if isinstance(step, BatchLine):
            self._on_line(step)
        elif isinstance(step, signal.Signals):
            os.kill(os.getpid(), step)
        elif isinstance(step, Exception):
            raise step
        return step is None

    def request_stop(self) -> None:
        self.asked = True

    def status(self) -> None:
        return None


class FakePipeline:
    """Runs the next script at each start."""

    def __init__(self, *scripts: list[Step]) -> None:
        self.scripts = list(scripts)
        self.started = 0

    @property
    def spec(self) -> PipelineSpec:
        return read_spec(
            {"name": "clicks", "source": {"buffer": {"store": "q"}}, "sink": {"delta": {"path": "t"}}}
        )

    def start(self, session: object, *, once: bool, on_line: Callable[[BatchLine], None]) -> FakeRun:
        self.started += 1
        return FakeRun(self.scripts.pop(0), on_line)


class FakeSessions:
    lost = False
    ending: Ending | None = None

    def open(self) -> SparkSession:
        return cast("SparkSession", object())

    def is_lost(self) -> bool:
        return self.lost

    def java_ending(self) -> Ending | None:
        return self.ending

    def close(self) -> None:
        """Do nothing: nothing was started."""


class Told:
    """A display that records what it is given."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self.batches: list[int] = []
        self.last: View | None = None

    def __enter__(self) -> Told:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing: there is nothing to clean up."""

    def show(self, view: View) -> None:
        self.last = view

    def batch(self, done: BatchLine) -> None:
        self.batches.append(done.batch)

    def say(self, event: str, sentence: str, view: View) -> None:
        self.events.append((event, sentence))
        self.last = view

    @property
    def names(self) -> list[str]:
        return [event for event, _ in self.events]


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_supervisor, "backoff_s", lambda failure: 0.0)


def supervise(
    pipeline: FakePipeline,
    told: Told,
    *,
    restarts: int = 3,
    stop_timeout_s: float = 5.0,
    sessions: FakeSessions | None = None,
) -> ExitCode:
    with StopSignals() as signals:
        supervisor = Supervisor(
            cast("Pipeline", pipeline),
            sessions or FakeSessions(),
            told,
            signals,
            once=True,
            restarts=restarts,
            stop_timeout_s=stop_timeout_s,
        )
        return supervisor.run()


def test_a_run_that_ends_without_a_signal_is_done() -> None:
    told = Told()
    assert supervise(FakePipeline([line(0), line(1), None]), told) is ExitCode.OK
    assert told.names == ["started", "stopped"]
    assert told.batches == [0, 1]
    assert told.last is not None
    assert told.last.totals.to_json() == {
        "batches": 2,
        "read": 2,
        "rows": {"delta": 2},
        "dead": 0,
        "skipped": 0,
        "gaps": 0,
    }


def test_a_transient_failure_is_restarted() -> None:
    told = Told()
    pipeline = FakePipeline([Unavailable("no store")], [line(0), None])
    assert supervise(pipeline, told) is ExitCode.OK
    assert told.names == ["started", "restarting", "started", "stopped"]
    assert told.last is not None
    assert (told.last.restarts, told.last.last_error) == (1, "no store")


def test_a_dead_session_is_restarted_after_any_error() -> None:
    told, sessions = Told(), FakeSessions()
    sessions.lost = True
    pipeline = FakePipeline([RuntimeError("An error occurred while calling o93.isActive")], [None])
    assert supervise(pipeline, told, sessions=sessions) is ExitCode.OK
    assert "the Spark session ended" in told.events[1][1]


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("An error occurred while calling o93.isActive"),
        RuntimeError("BrokenPipeError: [Errno 32] Broken pipe"),
        RuntimeError("Py4JNetworkError: Answer from Java side is empty"),
        ConfigError("the checkpoint belongs to another query"),
        Unavailable("a Python worker died during a task"),
    ],
    ids=["unknown", "pipe", "network", "permanent", "passing"],
)
def test_the_end_of_java_is_the_cause_of_any_other_failure(error: Exception) -> None:
    told, sessions = Told(), FakeSessions()
    sessions.lost, sessions.ending = True, Ending(returncode=-9)
    assert supervise(FakePipeline([error], [None]), told, sessions=sessions) is ExitCode.OK
    assert told.names[:2] == ["started", "restarting"]
    assert "Spark's Java was killed by signal 9 while it was working" in told.events[1][1]
    assert told.last is not None
    assert "killed by signal 9" in str(told.last.last_error)


def test_a_java_that_exits_after_a_known_fault_has_that_fault_as_its_cause() -> None:
    told, sessions = Told(), FakeSessions()
    sessions.lost, sessions.ending = True, Ending(returncode=3)
    error = RuntimeError("java.lang.OutOfMemoryError: Java heap space")
    assert supervise(FakePipeline([error], [None]), told, sessions=sessions) is ExitCode.OK
    assert "ran out of memory" in told.events[1][1]
    told = Told()
    assert supervise(FakePipeline([RuntimeError("boom")], [None]), told, sessions=sessions) is ExitCode.OK
    assert "ended with exit code 3 while it was working" in told.events[1][1]


def test_it_gives_up_after_too_many_consecutive_failures() -> None:
    told = Told()
    pipeline = FakePipeline(*([Unavailable(f"fault {number}")] for number in range(3)))
    with pytest.raises(Unavailable, match="fault 2"):
        supervise(pipeline, told, restarts=2)
    assert pipeline.started == 3
    assert told.names[-1] == "failed"


def test_failures_between_finished_micro_batches_are_not_consecutive() -> None:
    scripts: list[list[Step]] = [[line(number), Unavailable("again")] for number in range(5)]
    assert supervise(FakePipeline(*scripts, [None]), Told(), restarts=1) is ExitCode.OK


@pytest.mark.parametrize("kind", [ConfigError, InvalidInput, Corrupt, Fenced, PenstockError])
def test_a_permanent_failure_ends_the_run(kind: type[PenstockError]) -> None:
    pipeline = FakePipeline([kind("wrong")])
    with pytest.raises(kind, match="wrong"):
        supervise(pipeline, Told())
    assert pipeline.started == 1


def test_transient_errors_are_recognised() -> None:
    assert all(is_passing(kind("")) for kind in (Unavailable, Conflict, OutcomeUnknown))
    assert [backoff_s(failure) for failure in (1, 2, 3, 20)] == [1, 2, 4, 60]


def test_an_error_of_spark_becomes_one_line() -> None:
    with pytest.raises(PenstockError, match=r"^Spark failed: boom \(RuntimeError\); --verbose shows where$"):
        supervise(FakePipeline([RuntimeError("\nboom\n\tat org.apache.spark.Foo(Foo.scala:1)")]), Told())


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, ExitCode.INTERRUPTED), (signal.SIGTERM, ExitCode.TERMINATED)],
    ids=["SIGINT", "SIGTERM"],
)
def test_a_signal_lets_the_micro_batch_finish(number: signal.Signals, code: ExitCode) -> None:
    told = Told()
    assert supervise(FakePipeline([line(0), number, line(1)]), told) is code
    assert told.events[1:] == [
        ("stopping", "finishing micro-batch 1, at most 5s"),
        ("stopped", f"stopped by {number.name}"),
    ]
    assert told.batches == [0, 1]


def test_a_second_signal_stops_immediately() -> None:
    with pytest.raises(LeaveNow, match="stopped immediately"):
        supervise(FakePipeline([signal.SIGTERM, line(0), signal.SIGTERM]), Told())


def test_a_micro_batch_that_takes_too_long_is_abandoned() -> None:
    endless: list[Step] = [line(3), signal.SIGTERM, *(line(4) for _ in range(100_000))]
    with pytest.raises(LeaveNow, match="micro-batch 4 was not finished in time"):
        supervise(FakePipeline(endless), Told(), stop_timeout_s=0.05)


def test_a_failure_while_stopping_is_a_stop() -> None:
    told = Told()
    code = supervise(FakePipeline([signal.SIGTERM, Unavailable("Java ended")]), told)
    assert code is ExitCode.TERMINATED
    assert told.events[-1] == (
        "stopped",
        "stopped by SIGTERM; unfinished work is repeated at the next start",
    )


def test_a_stop_before_the_first_micro_batch_invents_no_number() -> None:
    told = Told()
    supervise(FakePipeline([signal.SIGTERM]), told)
    assert told.events[1] == ("stopping", "finishing the running micro-batch, at most 5s")


def test_the_cause_of_an_error_comes_without_the_plan_and_its_options() -> None:
    error = Unavailable("no store")
    error.__cause__ = RuntimeError("what happened\n=== Streaming Query ===\nrelation [secret=hush]")
    assert "what happened" in cause_of(error)
    assert "hush" not in cause_of(error)
    assert "no store" in cause_of(Unavailable("no store"))


def test_the_signal_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    supervise(FakePipeline([None]), Told())
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_long_micro_batch_does_not_stop_the_heartbeat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`penstock up` kills a pipeline that sends no heartbeat for some minutes."""
    monkeypatch.setattr(run_display, "LINE_EVERY_S", 0.0)
    pipeline = FakePipeline([None])
    start = pipeline.start

    def at_it(session: object, *, once: bool, on_line: Callable[[BatchLine], None]) -> FakeRun:
        run = start(session, once=once, on_line=on_line)
        run.idle = 3
        return run

    monkeypatch.setattr(pipeline, "start", at_it)
    with run_display.JsonLines() as display:
        supervise(pipeline, cast("Told", display))
    events = [json.loads(text)["event"] for text in capsys.readouterr().out.splitlines()]
    assert events[events.index("started") :] == ["started", "progress", "progress", "progress", "stopped"]
