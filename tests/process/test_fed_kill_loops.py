"""Databases fed from a queue that grows meanwhile, killed at any moment from their first breath on."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from tests.process.cli_runner import environment
from tests.process.test_timeseries_serve import METRICS, points

from penstock.buffer import Producer, ProducerConfig
from penstock.buffer.manifest import read_footer
from penstock.cli.failure import ExitCode
from penstock.objects import LocalStore
from penstock.services.feed import read_dead_letters
from penstock.timeseries.sync import TimeSeries
from penstock.vector import Vector, VectorConfig
from penstock.vector.records import DELETE_METADATA, UPSERT_METADATA, encode_deletes, encode_upserts
from penstock.vector.sync import VectorStore

LIVES = 8
SEED = 7
BAD = b"\xff\xff\xff\xff"
Records = tuple[list[bytes], bytes]


class Source(threading.Thread):
    """Produces batches until it is stopped; one of ten holds a record that nobody can read."""

    def __init__(self, queue: Path, make: Callable[[int], Records]) -> None:
        super().__init__()
        self._config = ProducerConfig(store=queue.as_uri(), flush_interval="5ms")
        self._make = make
        self._ended = threading.Event()
        self.batches = 0
        self.bad: list[int] = []

    def run(self) -> None:
        asyncio.run(self._produce())

    async def _produce(self) -> None:
        async with Producer(self._config) as producer:
            while not self._ended.is_set():
                records, payload = self._make(self.batches)
                if self.batches % 10 == 3:
                    self.bad.append(self.batches)
                    records = [*records, BAD]
                await (await producer.produce(records, payload)).watcher.await_durable()
                self.batches += 1
                await asyncio.sleep(0.03)

    def finish(self) -> None:
        self._ended.set()
        self.join()


def lead_through_lives(place: Path, seed: int, *command: str) -> None:
    """Kill the server over and over, from before it is ready to some time behind that."""
    rng, port_file = random.Random(seed), place / "port"
    arguments = [
        *(sys.executable, "-m", "penstock.cli", *command, "--port", "0", "--port-file", str(port_file)),
        *("--buffer", str(place / "queue"), "--poll-interval", "10ms", "--flush-interval", "30ms"),
    ]
    longest_s = 4.0
    with open(place / "log", "ab") as log:
        for _ in range(LIVES):
            port_file.unlink(missing_ok=True)
            began = time.monotonic()
            with subprocess.Popen(arguments, env=environment(), stdout=log, stderr=log) as process:
                until = began + rng.uniform(0.3, longest_s)
                while time.monotonic() < until:
                    if port_file.exists() and until > time.monotonic() + 1.5:
                        # It serves: what matters is the time from now on.
                        until = time.monotonic() + rng.uniform(0.0, 1.5)
                    time.sleep(0.01)
                assert process.poll() is None, (place / "log").read_text()
                process.kill()


def letters_of(queue: Path) -> dict[int, list[int]]:
    """Which records of which batch were set aside."""

    async def read() -> dict[int, list[int]]:
        store = LocalStore(queue)
        try:
            found = [
                read_dead_letters(bytes((await store.get(info.key)).data))
                for info in await store.list("ingest/manifest.dead/records/")
            ]
        finally:
            await store.close()
        return {one.sequence: [record.index for record in one.records] for one in found}

    return asyncio.run(read())


def fed_to_the_end(place: Path, source: Source, *command: str) -> None:
    """One more life, which takes everything that is left and ends in order."""
    port_file = place / "port"
    port_file.unlink(missing_ok=True)
    arguments = [
        *(sys.executable, "-m", "penstock.cli", *command, "--json"),
        *("--port", "0", "--port-file", str(port_file)),
        *("--buffer", str(place / "queue"), "--poll-interval", "10ms", "--flush-interval", "30ms"),
    ]
    with (
        open(place / "log", "ab") as log,
        subprocess.Popen(
            arguments, env=environment(), stdout=subprocess.PIPE, stderr=log, text=True
        ) as process,
    ):
        deadline = time.monotonic() + 100
        while fed_through(port_file) < source.batches - 1 and time.monotonic() < deadline:
            assert process.poll() is None, (place / "log").read_text()
            time.sleep(0.05)
        process.terminate()
        told, _ = process.communicate(timeout=60)
    assert process.returncode == 0, (place / "log").read_text()
    assert f'"through":{source.batches - 1}' in told


def fed_through(port_file: Path) -> int:
    """The last batch that is durable in the database, as its metrics tell."""
    if not port_file.exists():
        return -1
    text = httpx.get(f"http://{port_file.read_text()}/metrics").text
    return max(
        (int(float(line.split()[1])) for line in text.splitlines() if line.startswith("feed_sequence ")),
        default=-1,
    )


def waiting(queue: Path) -> int:
    """Entries that are still in the queue."""
    return read_footer((queue / "ingest" / "manifest").read_bytes()).entry_count


@pytest.mark.long
@pytest.mark.timeout(600)
def test_time_series_hold_every_point_of_the_queue_whatever_was_killed(tmp_path: Path) -> None:
    (tmp_path / "queue").mkdir()
    at_ms = int(time.time() * 1000)
    source = Source(tmp_path / "queue", lambda number: ([points(10 * number, 10, at_ms)], METRICS))
    source.start()
    serve = ("timeseries", "serve", str(tmp_path / "db"))
    try:
        lead_through_lives(tmp_path, SEED, *serve)
    finally:
        source.finish()
    fed_to_the_end(tmp_path, source, *serve)
    with TimeSeries.open(tmp_path / "db") as database:
        (found,) = database.query("sum(sum_over_time(produced[30d]))", at_ms).series
        (samples,) = database.query("sum(count_over_time(produced[30d]))", at_ms).series
        assert found.values.tolist() == samples.values.tolist() == [10.0 * source.batches]
        assert database.stored_sequence() == source.batches - 1
    assert letters_of(tmp_path / "queue") == {number: [1] for number in source.bad}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_vectors_are_those_of_the_queue_whatever_was_killed(tmp_path: Path) -> None:
    (tmp_path / "queue").mkdir()
    rng = random.Random(SEED)
    held: dict[str, list[float]] = {}

    def make(number: int) -> Records:
        names = rng.sample([f"v{one}" for one in range(300)], 20)
        if number % 4 == 3:
            for name in names:
                held.pop(name, None)
            return [encode_deletes(names)], DELETE_METADATA
        vectors = [Vector(name, [rng.randrange(1000), number, 0, 0]) for name in names]
        held.update((one.id, one.vector.tolist()) for one in vectors)
        return [encode_upserts(vectors)], UPSERT_METADATA

    source = Source(tmp_path / "queue", make)
    source.start()
    serve = ("vector", "serve", str(tmp_path / "db"), "--dimensions", "4")
    try:
        lead_through_lives(tmp_path, SEED, *serve)
    finally:
        source.finish()
    fed_to_the_end(tmp_path, source, *serve)
    with VectorStore.open(VectorConfig(store=(tmp_path / "db").as_uri())) as store:
        hits = store.search([0, 0, 0, 0], k=1000)
        assert {hit.id: hit.vector.tolist() for hit in hits if hit.vector is not None} == held
        assert store.position == source.batches - 1
    assert letters_of(tmp_path / "queue") == {number: [1] for number in source.bad}


@pytest.mark.timeout(120)
def test_a_server_that_is_pointed_at_another_queue_stops_and_says_what_to_do(tmp_path: Path) -> None:
    queue = tmp_path / "queue"
    queue.mkdir()
    source = Source(queue, lambda number: ([points(10 * number, 10, int(time.time() * 1000))], METRICS))
    source.start()
    while source.batches < 2:
        time.sleep(0.01)
    source.finish()
    with TimeSeries.open(tmp_path / "db") as database:
        database.write([], sequence=0, source="file:///elsewhere/ingest/manifest").wait()
    serve = ("timeseries", "serve", str(tmp_path / "db"), "--port", "0", "--buffer", str(queue))
    done = subprocess.run(
        (sys.executable, "-m", "penstock.cli", *serve),
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == ExitCode.REJECTED, done.stderr
    assert "was fed from file:///elsewhere/ingest/manifest, up to batch 0" in done.stderr
    assert "--adopt-queue moved" in done.stderr
    assert waiting(queue) == source.batches
    fed_to_the_end(tmp_path, source, "timeseries", "serve", str(tmp_path / "db"), "--adopt-queue", "new")
