"""Runs the demo: starts the processes, kills two of them, and waits until everything is delivered."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Final, Protocol

from penstock.child_process import ChildProcess, Exit
from penstock.cli.demo.producer import Journal, JournalReader, read_journal
from penstock.errors import PenstockError
from penstock.spark import (
    Backlog,
    BatchLine,
    Checkpoint,
    Pipeline,
    QueueWatch,
    load_spec,
    open_table,
    table_of,
)
from penstock.storage import OsFileSystem, data_modes

ROWS: Final = "clicks"
TOTALS: Final = "clicks_per_page"
_LEAVING_S: Final = 10.0
_QUICK_JAVA: Final = "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Options for a short-lived Java: a fast start matters more than throughput."""
_STOPPED: Final = (Exit(code=0), Exit(code=128 + signal.SIGTERM))
LOOK_EVERY_S: Final = 0.2
STANDSTILL_S: Final = 600.0
"""Longer than Spark takes to start on a slow machine."""
KILL_PRODUCER_AT: Final = 0.2
KILL_DRIVER_PATIENCE_S: Final = 15.0
"""How long to wait, after the first micro-batch, for the worst moment to kill the driver."""
VICTIM: Final = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The settings of one run of the demo."""

    folder: Path
    """The directory of journals, logs, pipeline file, checkpoint and ledger; without `store`, of all data."""
    store: str | None
    """The address of an unused folder for the queue and the tables."""
    producers: int
    records: int
    """Events per producer."""
    seconds: float
    """The time over which the events are spread."""
    since_ms: int
    """The time of the first event."""

    @property
    def pipeline_file(self) -> Path:
        return self.folder / "clicks.yaml"

    @property
    def queue(self) -> str:
        return str(self.folder / "queue") if self.store is None else f"{self.store}/queue"

    def table(self, name: str) -> str:
        return str(self.folder / "tables" / name) if self.store is None else f"{self.store}/tables/{name}"

    @property
    def rate(self) -> float:
        """Events per second of each producer."""
        return max(1.0, self.records / self.seconds)

    @property
    def release(self) -> Path:
        """Until this file exists, producers hold back events, so that they are active during the kills."""
        return self.folder / "release"

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def journal(self, producer: int) -> Path:
        return self.folder / f"producer-{producer}.journal"

    def journals(self) -> dict[int, Journal]:
        """Read every producer's journal."""
        return {producer: read_journal(self.journal(producer)) for producer in range(self.producers)}


_PIPELINE: Final = """\
# Clicks from a queue into Delta tables, each once. Checked by: penstock audit clicks.yaml --deep
name: clicks

source:
  buffer: {store: $queue}

decode:
  format: json
  schema: >-
    producer INT NOT NULL, number BIGINT NOT NULL,
    user STRING NOT NULL, url STRING NOT NULL, at TIMESTAMP NOT NULL

# The place of each record in the queue (_shard, _sequence, _index) lets the audit compare them one by one.
transform: |
  SELECT date(at) AS day, user, url, at, producer, number, _shard, _sequence, _index
  FROM input

sinks:
  $rows_name:
    delta: {path: $rows, partition_by: [day]}
  $totals_name:
    transform: SELECT day, url, count(*) AS clicks FROM transformed GROUP BY day, url
    delta: {path: $totals, merge: {keys: [day, url], add: [clicks]}}

# What does not decode is kept here, with the reason.
on_error: dead_letter
dead_letter:
  delta: {path: $letters}

trigger: {interval: 1s, max_batches: 100}
checkpoint: checkpoint
spark: {spark.master: "local[2]"}
"""


def pipeline_text(plan: Plan) -> str:
    """Return the pipeline as YAML. Without a store, paths are relative, so that the folder can be moved."""
    queue, tables = ("queue", "tables") if plan.store is None else (plan.queue, f"{plan.store}/tables")
    return Template(_PIPELINE).substitute(
        queue=json.dumps(queue),
        rows_name=ROWS,
        rows=json.dumps(f"{tables}/{ROWS}"),
        totals_name=TOTALS,
        totals=json.dumps(f"{tables}/{TOTALS}"),
        letters=json.dumps(f"{tables}/dead_letters"),
    )


class DemoFailed(PenstockError):
    """A process of the demo ended unexpectedly, or the demo makes no progress."""


class Processes:
    """The producers and the pipeline's driver, with the number of kills."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._producers: dict[int, ChildProcess] = {}
        self._driver: ChildProcess | None = None
        self._sessions: list[int] = []
        self.producer_kills = 0
        self.driver_kills = 0

    def start_producer(self, number: int) -> None:
        """Start a producer. A restarted one continues at the end of its journal."""
        plan = self._plan
        arguments = ["penstock.cli.demo.producer", "--store", plan.queue, "--producer", str(number)]
        arguments += ["--journal", str(plan.journal(number)), "--release", str(plan.release)]
        arguments += ["--records", str(plan.records), "--rate", str(plan.rate)]
        arguments += ["--since-ms", str(plan.since_ms)]
        self._producers[number] = self._start(f"producer-{number}", arguments)

    def start_driver(self) -> None:
        """Start `penstock run`, as users do."""
        arguments = ["penstock.cli", "run", str(self._plan.pipeline_file), "--conf", _QUICK_JAVA]
        self._driver = self._start("run", arguments)

    def _start(self, name: str, arguments: list[str]) -> ChildProcess:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        with open(data_modes().new_file(str(self._plan.log(name)), flags), "ab") as log:
            started = ChildProcess.start(
                [sys.executable, "-m", *arguments],
                environment={**os.environ, "SPARK_LOCAL_DIRS": str(self._plan.folder / "spark")},
                stdout=log,
                stderr=log,
            )
        self._sessions.append(started.pid)
        return started

    def kill_producer(self, number: int) -> bool:
        """Kill a producer. Return False if it has already ended."""
        if self._producers[number].poll() is not None:
            return False
        self._producers[number].kill()
        self._producers[number].wait()
        self.producer_kills += 1
        return True

    def kill_driver(self) -> None:
        """Kill the driver and its process group, including the Java process that it started."""
        assert self._driver is not None
        self._driver.kill()
        self._driver.wait()
        self.driver_kills += 1

    def stop_driver(self) -> None:
        """Request a stop of the driver, as a service manager does."""
        assert self._driver is not None
        self._driver.terminate()

    @property
    def driver_stopped(self) -> bool:
        """Whether the driver has stopped as requested. Raise `DemoFailed` if it ended in another way."""
        assert self._driver is not None
        ended = self._driver.poll()
        if ended is not None and ended not in _STOPPED:
            raise failure_of("the pipeline", ended, self._plan.log("run"))
        return ended is not None

    @property
    def producing(self) -> bool:
        return any(process.poll() is None for process in self._producers.values())

    def check(self) -> None:
        """Raise `DemoFailed` if a process has ended unexpectedly."""
        for number, process in self._producers.items():
            ended = process.poll()
            if ended is not None and ended.code != 0:
                raise failure_of(f"producer {number}", ended, self._plan.log(f"producer-{number}"))
        if self._driver is not None and (ended := self._driver.poll()) is not None:
            raise failure_of("the pipeline", ended, self._plan.log("run"))

    def end(self) -> None:
        """Kill every remaining process, including Spark's Python workers, which have their own group."""
        for process in [*self._producers.values(), *([self._driver] if self._driver else [])]:
            process.kill()
            process.wait()
        deadline = time.monotonic() + _LEAVING_S
        while (left := session_members(self._sessions)) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


def failure_of(name: str, ended: Exit, log: Path) -> DemoFailed:
    """Return the error for a process that ended, with the last error in its log unless it was killed."""
    reason = ""
    if ended.signal is None:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error:")]
        reason = f": {errors[-1]}" if errors else ""
    return DemoFailed(f"{name} {ended.reason}{reason}; its log is {log}")


def session_members(sessions: list[int]) -> list[int]:
    """Return the running processes of these sessions; none on systems without /proc."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # the process has just ended
        if int(fields[3]) in sessions and fields[0] != "Z":
            found.append(int(entry.parent.name))
    return found


@contextmanager
def started_processes(plan: Plan) -> Iterator[Processes]:
    """Yield the processes of a run; none of them outlives the block."""
    processes = Processes(plan)
    try:
        yield processes
    finally:
        processes.end()


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """The state that the display shows."""

    phase: str
    elapsed_s: float
    produced: int = 0
    acknowledged: int = 0
    delivered: int = 0
    dead: int = 0
    backlog: int = 0
    lag_s: float = 0.0
    producer_kills: int = 0
    driver_kills: int = 0

    @property
    def progress(self) -> tuple[int, ...]:
        """Figures that change while the demo makes progress."""
        return (self.produced, self.acknowledged, self.delivered, self.dead, self.driver_kills)


class Stage(Protocol):
    """The display of the demo."""

    def show(self, live: Live) -> None:
        """Show the state. Cheap to call often."""
        ...

    def say(self, live: Live, sentence: str) -> None:
        """Print a message that stays visible."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a finished run."""

    last: Live
    interrupted: tuple[int, ...]
    """Micro-batches that were running when the driver was killed."""
    half_stored: bool
    """Whether one of them had stored its rows, but not its totals or its ledger line."""


def run_demo(plan: Plan, stage: Stage) -> Outcome:
    """Run the demo until everything is delivered and the pipeline has stopped, or raise `DemoFailed`."""
    OsFileSystem().make_dirs(os.path.abspath(plan.folder))
    plan.pipeline_file.write_text(pipeline_text(plan), encoding="utf-8")
    with started_processes(plan) as processes:
        return _Story(plan, processes, stage).tell()


class _Story:
    def __init__(self, plan: Plan, processes: Processes, stage: Stage) -> None:
        self._plan = plan
        self._processes = processes
        self._stage = stage
        self._started = time.monotonic()
        pipeline = Pipeline(load_spec(plan.pipeline_file))
        self._ledger = pipeline.ledger
        self._checkpoint = Checkpoint(pipeline.spec.checkpoint_path)
        self._watch = QueueWatch.open(pipeline.source_options())
        self._readers = [JournalReader(plan.journal(number)) for number in range(plan.producers)]
        self._journals: list[Journal] = []
        self._lines: list[BatchLine] = []
        self._backlog: Backlog | None = None
        self._interrupted: tuple[int, ...] = ()
        self._half_stored = False
        self._lines_before = 0
        self._first_line: float | None = None
        table = table_of(pipeline.spec.outputs[ROWS])
        assert table is not None
        self._rows = open_table(table)

    def tell(self) -> Outcome:
        try:
            self._processes.start_driver()
            for number in range(self._plan.producers):
                self._processes.start_producer(number)
            self._wait(self._all_produced, self._phase)
            self._say("every producer has ended; the pipeline delivers the rest")
            self._wait(self._all_delivered, self._phase)
            self._say("everything is delivered; stopping the pipeline with SIGTERM")
            self._processes.stop_driver()
            self._wait(lambda: self._processes.driver_stopped, lambda: "stopping", check=False)
            return Outcome(
                last=self._look("checking"), interrupted=self._interrupted, half_stored=self._half_stored
            )
        finally:
            self._watch.close()
            self._ledger.close()

    def _phase(self) -> str:
        if len(self._lines) <= self._lines_before:
            if self._processes.driver_kills:
                return "starting Spark again"
            return "first micro-batch" if self._checkpoint.planned() else "starting Spark"
        return "running" if self._processes.producing else "draining"

    def _all_produced(self) -> bool:
        if not self._processes.producer_kills:
            self._try_to_kill_producer()
        if not self._processes.driver_kills:
            self._try_to_kill_driver()
        return bool(self._processes.driver_kills) and not self._processes.producing

    def _try_to_kill_producer(self) -> None:
        """Kill the producer while it has offered records that are not acknowledged."""
        if not self._journals:
            return
        journal = self._journals[VICTIM]
        waiting = journal.offered_end - journal.acked.records
        if journal.acked.records < KILL_PRODUCER_AT * self._plan.records or not waiting:
            return
        if self._processes.kill_producer(VICTIM):
            self._say(f"killed producer {VICTIM} (SIGKILL) in the middle of its work; started it again")
            self._processes.start_producer(VICTIM)

    def _try_to_kill_driver(self) -> None:
        """Kill the driver at the worst moment: a micro-batch has stored its rows, but not its totals."""
        if not self._lines:
            return
        query = self._checkpoint.query_id or ""
        self._first_line = self._first_line or time.monotonic()
        stored = self._rows.last_version(query)
        half_stored = stored is not None and stored > self._lines[-1].batch
        waited_s = time.monotonic() - self._first_line
        if not half_stored and self._processes.producing and waited_s < KILL_DRIVER_PATIENCE_S:
            return
        self._processes.kill_driver()
        # Read again: it may have made progress before the kill.
        in_progress = set(self._checkpoint.planned()) - set(self._checkpoint.done())
        lines = {line.batch for line in self._ledger.lines(query)}
        self._interrupted = tuple(sorted(in_progress))
        self._half_stored = self._rows.last_version(query) in in_progress - lines
        self._lines_before = len(lines)
        self._processes.start_driver()
        self._plan.release.touch()
        where = f" in the middle of micro-batch {self._interrupted[0]}" if self._interrupted else ""
        self._say(f"killed the Spark driver (SIGKILL to its process group){where}; started it again")

    def _all_delivered(self) -> bool:
        return self._backlog is not None and self._backlog.batches == 0

    def _wait(self, finished: Callable[[], bool], phase: Callable[[], str], *, check: bool = True) -> None:
        moved = time.monotonic()
        progress: tuple[int, ...] = ()
        while True:
            live = self._look(phase())
            self._stage.show(live)
            if finished():
                return
            if check:
                self._processes.check()
            if live.progress != progress:
                moved, progress = time.monotonic(), live.progress
            if time.monotonic() - moved > STANDSTILL_S:
                raise DemoFailed(f"{live.phase}: no progress for {STANDSTILL_S:.0f} s")
            time.sleep(LOOK_EVERY_S)

    def _say(self, sentence: str) -> None:
        self._stage.say(self._look(self._phase()), sentence)

    def _look(self, phase: str) -> Live:
        self._journals = [reader.read() for reader in self._readers]
        query = self._checkpoint.query_id
        self._lines = self._ledger.lines(query) if query is not None else []
        self._backlog = self._watch.look(self._lines[-1].end if self._lines else {})
        oldest_ms = self._backlog.oldest_ms
        return Live(
            phase=phase,
            elapsed_s=time.monotonic() - self._started,
            produced=sum(journal.offered_end for journal in self._journals),
            acknowledged=sum(journal.acked.records for journal in self._journals),
            delivered=sum(line.rows[ROWS] for line in self._lines),
            dead=sum(line.dead for line in self._lines),
            backlog=self._backlog.batches,
            lag_s=0.0 if oldest_ms is None else max(0.0, time.time() - oldest_ms / 1000),
            producer_kills=self._processes.producer_kills,
            driver_kills=self._processes.driver_kills,
        )
