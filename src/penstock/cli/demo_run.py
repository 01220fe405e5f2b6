"""The demo itself: starts the processes, kills some of them, and watches until the queue is empty."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from penstock.buffer.manifest import read_footer
from penstock.cli.demo_journal import Journal, JournalReader, read_journal
from penstock.cli.demo_table import rows_stored
from penstock.errors import PenstockError

__all__ = ["DemoFailed", "Live", "Plan", "run_demo"]

LOOK_EVERY_S = 0.1
STARTING_S = 60.0
DRAINING_S = 120.0
KILL_CONSUMER_AT = (0.25, 0.65)
KILL_PRODUCER_AT = 0.45


class DemoFailed(PenstockError):
    """A process of the demo ended by itself, or nothing moved any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How large the demo is and where it keeps its files."""

    folder: Path
    seconds: float
    producers: int
    rate: float
    """Records per second and producer."""
    records: int | None
    """Records per producer; None: as many as fit into the time."""

    @property
    def store(self) -> Path:
        return self.folder / "store"

    @property
    def database(self) -> Path:
        return self.folder / "rows.sqlite"

    @property
    def stop_file(self) -> Path:
        return self.folder / "stop"

    def journal(self, producer: int) -> Path:
        return self.folder / f"producer-{producer}.journal"

    def journals(self) -> dict[int, Journal]:
        """Every producer's journal, read in full."""
        return {producer: read_journal(self.journal(producer)) for producer in range(self.producers)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """What the display shows."""

    phase: str
    elapsed_s: float
    produced: int
    durable: int
    consumed: int
    queue_length: int
    consumer_kills: int
    producer_kills: int


@dataclass(slots=True)
class _Crew:
    """The processes, and what was done to them."""

    plan: Plan
    producers: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    consumer: subprocess.Popen[bytes] | None = None
    consumer_kills: int = 0
    producer_kills: int = 0
    rows_when_started: int = 0
    journals: list[JournalReader] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.journals = [JournalReader(self.plan.journal(n)) for n in range(self.plan.producers)]

    def start_producer(self, producer: int, seconds: float) -> None:
        plan = self.plan
        arguments = ["produce", "--store", str(plan.store), "--journal", str(plan.journal(producer))]
        arguments += ["--producer", str(producer), "--rate", str(plan.rate), "--seconds", f"{seconds:.3f}"]
        if plan.records is not None:
            arguments += ["--end", str(plan.records)]
        self.producers[producer] = self._start(f"producer-{producer}", arguments)

    def start_consumer(self) -> None:
        plan = self.plan
        self.rows_when_started = rows_stored(plan.database)
        arguments = ["consume", "--store", str(plan.store), "--database", str(plan.database)]
        self.consumer = self._start("consumer", [*arguments, "--stop-file", str(plan.stop_file)])

    def _start(self, name: str, arguments: list[str]) -> subprocess.Popen[bytes]:
        with (self.plan.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "penstock.cli.demo_worker", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C is for the demo, which then ends them
            )

    def kill_consumer(self) -> bool:
        """Kill it in the middle of its work: not before it has stored something since it was started."""
        if self.consumer is None or rows_stored(self.plan.database) <= self.rows_when_started:
            return False
        _kill(self.consumer)
        self.consumer_kills += 1
        self.start_consumer()
        return True

    def kill_producer(self, seconds_left: float) -> bool:
        if self.producers[0].poll() is None:
            _kill(self.producers[0])
            self.producer_kills += 1
            self.start_producer(0, max(0.5, seconds_left))
        return True

    def check(self) -> None:
        """Raises `DemoFailed` if a process ended with an error."""
        named = {f"producer-{number}": process for number, process in self.producers.items()}
        if self.consumer is not None:
            named["consumer"] = self.consumer
        for name, process in named.items():
            if process.poll() not in (None, 0):
                log = (self.plan.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")
                last = log.strip().splitlines()[-1:] or ["no message"]
                raise DemoFailed(f"{name} ended with code {process.returncode}: {last[0]}")

    @property
    def producing(self) -> bool:
        return any(process.poll() is None for process in self.producers.values())

    def end(self) -> None:
        for process in [*self.producers.values(), *([self.consumer] if self.consumer else [])]:
            if process.poll() is None:
                _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


@contextmanager
def _crew(plan: Plan) -> Iterator[_Crew]:
    crew = _Crew(plan)
    try:
        yield crew
    finally:
        crew.end()


def run_demo(plan: Plan, show: Callable[[Live], None]) -> Live:
    """Everything from the first record to the empty queue. Raises `DemoFailed`."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    with _crew(plan) as crew:
        started = time.monotonic()
        crew.start_consumer()
        for producer in range(plan.producers):
            crew.start_producer(producer, plan.seconds)
        _wait(crew, show, "starting", started, STARTING_S, lambda: rows_stored(plan.database) > 0)
        begun = time.monotonic()
        kills: list[tuple[float, Callable[[], bool]]] = [
            (KILL_CONSUMER_AT[0], crew.kill_consumer),
            (KILL_PRODUCER_AT, lambda: crew.kill_producer(plan.seconds - (time.monotonic() - begun))),
            (KILL_CONSUMER_AT[1], crew.kill_consumer),
        ]

        def act() -> bool:
            if kills and time.monotonic() - begun >= kills[0][0] * plan.seconds and kills[0][1]():
                kills.pop(0)
            return not kills and not crew.producing

        _wait(crew, show, "producing", started, plan.seconds + DRAINING_S, act)
        plan.stop_file.touch()
        consumer = crew.consumer
        _wait(crew, show, "draining", started, DRAINING_S, lambda: consumer is None or consumer.poll() == 0)
        return _look(crew, "done", started)


def _wait(
    crew: _Crew,
    show: Callable[[Live], None],
    phase: str,
    started: float,
    limit_s: float,
    finished: Callable[[], bool],
) -> None:
    begun = time.monotonic()
    while not finished():
        crew.check()
        if time.monotonic() - begun > limit_s:
            raise DemoFailed(f"{phase} did not end within {limit_s:.0f} s")
        show(_look(crew, phase, started))
        time.sleep(LOOK_EVERY_S)


def _look(crew: _Crew, phase: str, started: float) -> Live:
    journals = [reader.read() for reader in crew.journals]
    return Live(
        phase=phase,
        elapsed_s=time.monotonic() - started,
        produced=sum(journal.offered_end for journal in journals),
        durable=sum(journal.acked.records for journal in journals),
        consumed=rows_stored(crew.plan.database),
        queue_length=_queue_length(crew.plan.store),
        consumer_kills=crew.consumer_kills,
        producer_kills=crew.producer_kills,
    )


def _queue_length(store: Path) -> int:
    try:
        return read_footer((store / "ingest" / "manifest").read_bytes()).entry_count
    except FileNotFoundError:
        return 0
