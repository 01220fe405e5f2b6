"""`penstock run` as a process: what it prints, how it stops, and what it survives."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from deltalake import DeltaTable
from tests.process.cli_runner import command, environment
from tests.process.java_children import java_of

from penstock.buffer import Producer, ProducerConfig

pytestmark = [pytest.mark.spark, pytest.mark.timeout(400)]

PIPELINE = """
name: clicks
source: {buffer: {store: queue}}
decode: {format: json, schema: "n bigint"}
sink: {delta: {path: table}}
trigger: {interval: 200ms, max_batches: 2}
spark:
  spark.driver.memory: 1g
  spark.driver.extraJavaOptions: -XX:TieredStopAtLevel=1 -XX:+UseSerialGC
"""
PATIENCE_S = 150.0


class Run:
    """A pipeline in a process of its own, in a process group of its own, telling what it does."""

    def __init__(self, root: Path, *options: str) -> None:
        self.root = root
        self.errors = root / "stderr"
        with self.errors.open("ab") as errors:
            self.process = subprocess.Popen(
                command("run", root / "clicks.yaml", "--json", "--master", "local[2]", *options),
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment(PYTHONWARNINGS="ignore"),  # PySpark's own workers leave files open
                start_new_session=True,
            )
        self._events: queue.Queue[dict[str, object]] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._events.put(json.loads(line))

    def until(self, event: str) -> dict[str, object]:
        """The next event of that name."""
        deadline = time.monotonic() + PATIENCE_S
        seen: list[dict[str, object]] = []
        while True:
            try:
                seen.append(self._events.get(timeout=max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                raise AssertionError((event, seen, self.errors.read_text())) from None
            if seen[-1]["event"] == event:
                return seen[-1]

    def until_read(self, records: int) -> None:
        """Until micro-batches with that many records are done."""
        while records > 0:
            records -= int(str(self.until("batch")["read"]))

    def end(self) -> int:
        code = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        assert "\tat org." not in self.errors.read_text()
        return code

    def told(self) -> str:
        """Its standard error."""
        return self.errors.read_text()

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(PATIENCE_S)
        assert self.process.stdout is not None
        self._reader.join(PATIENCE_S)
        self.process.stdout.close()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "clicks.yaml").write_text(PIPELINE)
    return tmp_path


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    started: list[Run] = []
    yield started
    for run in started:
        run.kill()


def produce(root: Path, numbers: range) -> None:
    async def work() -> None:
        config = ProducerConfig(store=str(root / "queue"), flush_interval="1h")
        async with Producer(config) as producer:
            for number in numbers:
                await producer.produce([b'{"n": %d}' % number])
                await producer.flush()

    asyncio.run(work())


def delivered(root: Path) -> list[int]:
    return sorted(DeltaTable(str(root / "table")).to_pyarrow_table(columns=["n"])["n"].to_pylist())


@pytest.mark.long
def test_a_pipeline_outlives_its_java_and_stops_when_asked(root: Path, runs: list[Run]) -> None:
    produce(root, range(3))
    run = Run(root)
    runs.append(run)
    assert run.until("started")["pipeline"] == "clicks"
    run.until_read(3)

    os.kill(java_of(run.process.pid), signal.SIGKILL)
    restarting = run.until("restarting")
    assert "Spark's Java was killed by signal 9 while it was working" in str(restarting["message"])
    assert "starting again in 1s (1 of 3)" in str(restarting["message"])
    produce(root, range(3, 6))
    run.until("started")
    run.until_read(3)

    # As a terminal does it for Ctrl-C: to everybody in the group, Java and the workers included.
    os.killpg(run.process.pid, signal.SIGINT)
    assert str(run.until("stopping")["message"]).startswith("finishing micro-batch ")
    stopped = run.until("stopped")
    assert stopped["message"] == "stopped by SIGINT"
    assert run.end() == 130
    assert stopped["restarts"] == 1
    assert "Traceback" not in run.told()
    assert delivered(root) == list(range(6))


@pytest.mark.long
def test_a_stop_loses_nothing_and_the_next_run_continues(root: Path, runs: list[Run]) -> None:
    produce(root, range(12))
    first = Run(root)
    runs.append(first)
    first.until("batch")
    first.process.send_signal(signal.SIGTERM)
    assert first.until("stopped")["message"] == "stopped by SIGTERM"
    assert first.end() == 143
    assert "Traceback" not in first.errors.read_text()
    assert 0 < len(delivered(root)) < 12

    second = Run(root, "--once")
    runs.append(second)
    told = second.until("stopped")
    assert second.end() == 0
    assert told["backlog_batches"] is None or told["backlog_batches"] == 0
    assert delivered(root) == list(range(12))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_a_java_that_is_killed_before_spark_is_ready_is_a_fault_that_may_pass(
    root: Path, runs: list[Run], number: signal.Signals
) -> None:
    run = Run(root, "--restarts", "1")
    runs.append(run)
    first = java_of(run.process.pid)
    os.kill(first, number)
    sentence = f"Spark's Java was killed by signal {number} before Spark was ready"
    assert sentence in str(run.until("restarting")["message"])
    os.kill(java_of(run.process.pid, other_than=first), number)
    assert sentence in str(run.until("failed")["message"])
    assert run.end() == 3
    assert f"error: {sentence}" in run.told()
    assert "Traceback" not in run.told()


def test_a_java_that_refuses_its_options_means_wrong_settings(root: Path, runs: list[Run]) -> None:
    run = Run(root, "--conf", "spark.driver.extraJavaOptions=-XX:NewRatio=abc")
    runs.append(run)
    assert "ready: Improperly specified VM option 'NewRatio=abc'" in str(run.until("failed")["message"])
    assert run.end() == 2
    assert (
        run.told().count("Improperly specified VM option 'NewRatio=abc'") == 2
    )  # Java's own line, and the error


def test_a_signal_while_spark_starts_stops_immediately(root: Path, runs: list[Run]) -> None:
    run = Run(root)
    runs.append(run)
    deadline = time.monotonic() + PATIENCE_S
    while "java" not in running_children(run.process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 143
    assert "stopped immediately" in run.errors.read_text()


def running_children(parent: int) -> set[str]:
    """The names of the processes that `parent` has started."""
    names: set[str] = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, fields = path.read_text().partition("(")[2].rpartition(")")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields.split()[1]) == parent:
            names.add(name)
    return names
