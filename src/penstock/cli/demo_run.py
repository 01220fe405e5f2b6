"""The demo itself: starts the processes, kills two of them, and watches until everything is delivered."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from penstock.cli.demo_journal import Journal, JournalReader
from penstock.cli.demo_plan import ROWS, Plan, pipeline_text
from penstock.cli.demo_processes import Crew, DemoFailed, crew_of
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
from penstock.storage import OsFileSystem

__all__ = ["Live", "Outcome", "Stage", "run_demo"]

LOOK_EVERY_S: Final = 0.2
STANDSTILL_S: Final = 600.0
"""Longer than Spark needs to start on a slow machine."""
KILL_PRODUCER_AT: Final = 0.2
KILL_DRIVER_PATIENCE_S: Final = 15.0
"""How long to wait, from the first micro-batch on, for the worst moment to kill the driver."""
VICTIM: Final = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """What the display shows."""

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
        """What changes as long as anything moves."""
        return (self.produced, self.acknowledged, self.delivered, self.dead, self.driver_kills)


class Stage(Protocol):
    """Where people watch."""

    def show(self, live: Live) -> None:
        """The state now. Cheap to call often."""
        ...

    def say(self, live: Live, sentence: str) -> None:
        """Something that stays to be read."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a finished run went."""

    last: Live
    interrupted: tuple[int, ...]
    """Micro-batches that were under way when the driver was killed."""
    half_stored: bool
    """Whether one of them had its rows stored already, but not its totals or its books."""


def run_demo(plan: Plan, stage: Stage) -> Outcome:
    """From the first event to a stopped pipeline that has nothing left to do. Raises `DemoFailed`."""
    OsFileSystem().make_dirs(os.path.abspath(plan.folder))
    plan.pipeline_file.write_text(pipeline_text(plan), encoding="utf-8")
    with crew_of(plan) as crew:
        return _Story(plan, crew, stage).tell()


class _Story:
    def __init__(self, plan: Plan, crew: Crew, stage: Stage) -> None:
        self._plan = plan
        self._crew = crew
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
            self._crew.start_driver()
            for number in range(self._plan.producers):
                self._crew.start_producer(number)
            self._wait(self._all_produced, self._phase)
            self._say("every producer has ended; the pipeline delivers the rest")
            self._wait(self._all_delivered, self._phase)
            self._say("everything is delivered; stopping the pipeline with SIGTERM")
            self._crew.stop_driver()
            self._wait(lambda: self._crew.driver_stopped, lambda: "stopping", check=False)
            return Outcome(
                last=self._look("checking"), interrupted=self._interrupted, half_stored=self._half_stored
            )
        finally:
            self._watch.close()
            self._ledger.close()

    def _phase(self) -> str:
        if len(self._lines) <= self._lines_before:
            if self._crew.driver_kills:
                return "starting Spark again"
            return "first micro-batch" if self._checkpoint.planned() else "starting Spark"
        return "running" if self._crew.producing else "draining"

    def _all_produced(self) -> bool:
        if not self._crew.producer_kills:
            self._try_to_kill_producer()
        if not self._crew.driver_kills:
            self._try_to_kill_driver()
        return bool(self._crew.driver_kills) and not self._crew.producing

    def _try_to_kill_producer(self) -> None:
        """In the middle of its work: with records that are offered and not yet acknowledged."""
        if not self._journals:
            return
        journal = self._journals[VICTIM]
        waiting = journal.offered_end - journal.acked.records
        if journal.acked.records < KILL_PRODUCER_AT * self._plan.records or not waiting:
            return
        if self._crew.kill_producer(VICTIM):
            self._say(f"killed producer {VICTIM} (SIGKILL) in the middle of its work; started it again")
            self._crew.start_producer(VICTIM)

    def _try_to_kill_driver(self) -> None:
        """At the worst moment: a micro-batch has stored its rows, and neither its totals nor its books."""
        if not self._lines:
            return
        query = self._checkpoint.query_id or ""
        self._first_line = self._first_line or time.monotonic()
        stored = self._rows.last_version(query)
        half_stored = stored is not None and stored > self._lines[-1].batch
        waited_s = time.monotonic() - self._first_line
        if not half_stored and self._crew.producing and waited_s < KILL_DRIVER_PATIENCE_S:
            return
        self._crew.kill_driver()
        # Looked at again: until the kill it may have gone on.
        under_way = set(self._checkpoint.planned()) - set(self._checkpoint.done())
        lines = {line.batch for line in self._ledger.lines(query)}
        self._interrupted = tuple(sorted(under_way))
        self._half_stored = self._rows.last_version(query) in under_way - lines
        self._lines_before = len(lines)
        self._crew.start_driver()
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
                self._crew.check()
            if live.progress != progress:
                moved, progress = time.monotonic(), live.progress
            if time.monotonic() - moved > STANDSTILL_S:
                raise DemoFailed(f"{live.phase}: nothing has moved for {STANDSTILL_S:.0f} s")
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
            producer_kills=self._crew.producer_kills,
            driver_kills=self._crew.driver_kills,
        )
