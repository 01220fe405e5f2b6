"""Keeps a pipeline running: starts it, watches it, starts it again after what may pass, stops it when asked.

Starting again is always safe: a micro-batch that was under way is run again and is a no-op wherever it has
arrived. So only the kind of the error decides.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
import traceback
from typing import TYPE_CHECKING, Final, Protocol

from penstock.cli.failure import ExitCode
from penstock.cli.run.display import Display, Rate, Totals, View
from penstock.cli.signals import LeaveNow, StopSignals
from penstock.errors import Conflict, OutcomeUnknown, PenstockError, Unavailable
from penstock.spark import Ending, explain_pipeline, lost
from penstock.units import format_duration

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.spark import BatchLine, Pipeline, PipelineStatus, RunningPipeline


_log = logging.getLogger(__name__)

TICK_S: Final = 0.5
STATUS_EVERY_S: Final = 1.0
BACKOFF_MAX_S: Final = 60.0


def is_passing(error: PenstockError) -> bool:
    """Whether starting again may help."""
    return isinstance(error, Unavailable | Conflict | OutcomeUnknown)


def backoff_s(failure: int) -> float:
    """How long to wait after the first, second, ... failure in a row."""
    return min(BACKOFF_MAX_S, float(2 ** (failure - 1)))


class Sessions(Protocol):
    """Where Spark sessions come from."""

    def open(self) -> SparkSession:
        """The session; a new one if the last has died. Raises `PenstockError`."""
        ...

    def is_lost(self) -> bool:
        """Whether the session has died."""
        ...

    def java_ending(self) -> Ending | None:
        """How the Java of a lost session has ended. None if it runs, or another process started it."""
        ...

    def close(self) -> None:
        """End the session if it was started here."""
        ...


class Supervisor:
    """One run of `penstock run`. Everything but the micro-batches and the watching happens in one thread."""

    def __init__(
        self,
        pipeline: Pipeline,
        sessions: Sessions,
        display: Display,
        signals: StopSignals,
        *,
        once: bool,
        restarts: int,
        stop_timeout_s: float,
    ) -> None:
        self._pipeline = pipeline
        self._sessions = sessions
        self._display = display
        self._signals = signals
        self._once = once
        self._restarts_max = restarts
        self._stop_timeout_s = stop_timeout_s
        self._lines: queue.SimpleQueue[BatchLine] = queue.SimpleQueue()
        self._started = time.monotonic()
        self._rate = Rate()
        self._totals = Totals()
        self._restarted = 0
        self._last_error: str | None = None

    def run(self) -> ExitCode:
        """Until it ends, is stopped, or fails for good. Raises `PenstockError`, `LeaveNow`."""
        failures = 0
        while True:
            done_before = self._totals.batches
            try:
                return self._attempt_explained()
            except PenstockError as error:
                self._drain()
                if self._signals.asked:
                    return self._interrupted(error)
                # What made progress before it failed is not failing in a row.
                failures = 1 if self._totals.batches > done_before else failures + 1
                if not is_passing(error) or failures > self._restarts_max:
                    self._say("failed", str(error), "failed")
                    raise
                self._announce(error, failures)
            self._signals.patient = True
            if self._signals.wait(backoff_s(failures)):
                return self._stopped(f"stopped by {self._signals.name}", self._signals.exit_code)

    def _announce(self, error: PenstockError, failures: int) -> None:
        _log.info("the query failed: %s", cause_of(error))
        self._last_error = str(error)
        self._restarted += 1
        delay = format_duration(backoff_s(failures))
        again = f"starting again in {delay} ({failures} of {self._restarts_max})"
        self._say("restarting", f"{error}; {again}", again)

    def _attempt_explained(self) -> ExitCode:
        """One attempt, whose every failure is one of ours."""
        try:
            return self._attempt()
        except Exception as error:
            known = error if isinstance(error, PenstockError) else explain_pipeline(error)
            if not self._signals.asked:
                known = self._why_lost(known)
            if known is error:
                raise
            raise known or _unknown(error) from error

    def _why_lost(self, known: PenstockError | None) -> PenstockError | None:
        """What an error means that came with the end of Java: whatever was being asked fails then."""
        ending = self._sessions.java_ending()
        if ending is not None:
            has_words = ending.signal is None and known is not None and is_passing(known)
            return known if has_words else lost(ending)
        if known is None and self._sessions.is_lost():
            return Unavailable("the Spark session has ended in the middle of the work; its log may say why")
        return known

    def _attempt(self) -> ExitCode:
        self._signals.patient = False
        self._show("starting Spark")
        session = self._sessions.open()
        self._signals.install()
        self._show("starting the query")
        running = self._pipeline.start(session, once=self._once, on_line=self._lines.put)
        self._signals.patient = True
        self._say("started", f"{self._pipeline.spec.name} is running", "running")
        with _Watch(running) as watch:
            return self._follow(running, watch)

    def _follow(self, running: RunningPipeline, watch: _Watch) -> ExitCode:
        while not running.wait(TICK_S):
            self._show(_phase(watch.latest), watch.latest)
            if self._signals.asked:
                return self._finish(running, watch)
        self._drain()
        return self._stopped("done: everything that was there is delivered", ExitCode.OK)

    def _finish(self, running: RunningPipeline, watch: _Watch) -> ExitCode:
        running.request_stop()
        deadline = time.monotonic() + self._stop_timeout_s
        running_now = self._current(watch.latest)
        phase = f"finishing {running_now}, at most {format_duration(self._stop_timeout_s)}"
        self._say("stopping", phase, phase)
        while (left_s := deadline - time.monotonic()) > 0:
            if running.wait(min(TICK_S, left_s)):
                self._drain()
                return self._stopped(f"stopped by {self._signals.name}", self._signals.exit_code)
            self._show(phase, watch.latest)
        late = f"{running_now} was not finished in time, and is run again at the next start"
        self._stopped(late, self._signals.exit_code)
        raise LeaveNow(late)

    def _current(self, status: PipelineStatus | None) -> str:
        """The micro-batch that is running, for people."""
        done = self._totals.last.batch if self._totals.last else status.batch if status else None
        return "the micro-batch that is running" if done is None else f"micro-batch {done + 1}"

    def _interrupted(self, error: PenstockError) -> ExitCode:
        """The query failed while it was asked to stop: most often Java got the same signal."""
        _log.info("the query ended with an error while stopping: %s", cause_of(error))
        return self._stopped(
            f"stopped by {self._signals.name}; what was under way is run again at the next start",
            self._signals.exit_code,
        )

    def _stopped(self, sentence: str, code: ExitCode) -> ExitCode:
        self._say("stopped", sentence, "stopped")
        return code

    def _drain(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                line = self._lines.get_nowait()
                self._totals = self._totals.plus(line)
                self._display.batch(line)

    def _show(self, phase: str, status: PipelineStatus | None = None) -> None:
        self._drain()
        self._display.show(self._view(phase, status))

    def _say(self, event: str, sentence: str, phase: str) -> None:
        self._display.say(event, sentence, self._view(phase, None))

    def _view(self, phase: str, status: PipelineStatus | None) -> View:
        now = time.monotonic()
        return View(
            name=self._pipeline.spec.name,
            phase=phase,
            elapsed_s=now - self._started,
            totals=self._totals,
            rows_per_s=self._rate.at(now, self._totals.read),
            status=status,
            restarts=self._restarted,
            last_error=(status.last_error if status else None) or self._last_error,
        )


def cause_of(error: PenstockError) -> str:
    """Where an error comes from, without the query plan: that shows the options of every source."""
    shown = error if error.__cause__ is None else error.__cause__
    return "".join(traceback.format_exception(shown)).partition("=== Streaming Query ===")[0]


def _unknown(error: Exception) -> PenstockError:
    """One line of what nobody has a sentence for."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason was given")
    return PenstockError(f"Spark failed: {text[:300]} ({type(error).__name__}); --verbose shows where")


def _phase(status: PipelineStatus | None) -> str:
    if status is None or status.busy:
        return "running"
    return "waiting for records"


class _Watch:
    """Looks at the query and its queue now and then, so that a slow store delays nobody but itself."""

    def __init__(self, running: RunningPipeline) -> None:
        self.latest: PipelineStatus | None = None
        self._running = running
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, name="penstock-watch", daemon=True)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()

    def _look(self) -> None:
        while not self._end.wait(STATUS_EVERY_S):
            # What is wrong the query itself will tell: a display must not end it.
            with contextlib.suppress(Exception):
                self.latest = self._running.status()
