"""Supervises a pipeline: starts it, monitors it, restarts it after transient errors, stops it on request.

A restart is always safe: an unfinished micro-batch is repeated, which has no effect on sinks that already
have it. Therefore only the kind of error decides about a restart.
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
    """Return whether a restart may help."""
    return isinstance(error, Unavailable | Conflict | OutcomeUnknown)


def backoff_s(failure: int) -> float:
    """Return the delay after the n-th consecutive failure."""
    return min(BACKOFF_MAX_S, float(2 ** (failure - 1)))


class Sessions(Protocol):
    """The provider of Spark sessions."""

    def open(self) -> SparkSession:
        """Return the session; start a new one if the last one has died. Raise `PenstockError` on failure."""
        ...

    def is_lost(self) -> bool:
        """Whether the session has died."""
        ...

    def java_ending(self) -> Ending | None:
        """Return how the Java of a lost session ended; None if it runs or another process started it."""
        ...

    def close(self) -> None:
        """End the session if it was started here."""
        ...


class Supervisor:
    """One run of `penstock run`. All but the micro-batches and the polling happens in one thread."""

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
        """Run until the pipeline ends, is stopped, or fails. Raise `PenstockError` or `LeaveNow`."""
        failures = 0
        while True:
            done_before = self._totals.batches
            try:
                return self._attempt_explained()
            except PenstockError as error:
                self._drain()
                if self._signals.asked:
                    return self._interrupted(error)
                # Progress resets the count of consecutive failures.
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
        """Make one attempt; convert every failure to a `PenstockError`."""
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
        """Return the cause of an error. If Java has ended, that is the cause of any other failure."""
        ending = self._sessions.java_ending()
        if ending is not None:
            has_words = ending.signal is None and known is not None and is_passing(known)
            return known if has_words else lost(ending)
        if known is None and self._sessions.is_lost():
            return Unavailable("the Spark session ended unexpectedly; see its log")
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
        return self._stopped("done: everything in the queue is delivered", ExitCode.OK)

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
        late = f"{running_now} was not finished in time and is repeated at the next start"
        self._stopped(late, self._signals.exit_code)
        raise LeaveNow(late)

    def _current(self, status: PipelineStatus | None) -> str:
        """Return the name of the running micro-batch."""
        done = self._totals.last.batch if self._totals.last else status.batch if status else None
        return "the running micro-batch" if done is None else f"micro-batch {done + 1}"

    def _interrupted(self, error: PenstockError) -> ExitCode:
        """Handle a failure during a stop. Usually, Java received the same signal."""
        _log.info("the query ended with an error while stopping: %s", cause_of(error))
        return self._stopped(
            f"stopped by {self._signals.name}; unfinished work is repeated at the next start",
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
    """Return the traceback of an error without the query plan, which contains the options of sources."""
    shown = error if error.__cause__ is None else error.__cause__
    return "".join(traceback.format_exception(shown)).partition("=== Streaming Query ===")[0]


def _unknown(error: Exception) -> PenstockError:
    """Return an unknown error as a single line."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason was given")
    return PenstockError(f"Spark failed: {text[:300]} ({type(error).__name__}); --verbose shows where")


def _phase(status: PipelineStatus | None) -> str:
    if status is None or status.busy:
        return "running"
    return "waiting for records"


class _Watch:
    """Polls the query and its queue in a thread, so that a slow store does not delay the display."""

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
            # The query itself reports errors. They must not end the display.
            with contextlib.suppress(Exception):
                self.latest = self._running.status()
