"""`penstock vector serve` as a process: killed over and over, stopped in order, fenced by a newer one."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.process.cli_runner import environment

from penstock.buffer import Producer, ProducerConfig
from penstock.cli.failure import ExitCode
from penstock.vector import Vector, VectorConfig, VectorStore
from penstock.vector.records import DELETE_METADATA, UPSERT_METADATA, encode_deletes, encode_upserts

LIVES = 6
ROOT = "/api/v1/vector"


def command(place: Path, *more: str) -> list[str]:
    return [
        *(sys.executable, "-m", "penstock.cli", "vector", "serve", str(place / "db")),
        *("--dimensions", "4", "--port", "0", "--port-file", str(place / "port")),
        *("--flush-interval", "50ms", "--poll-interval", "20ms", "--json"),
        *more,
    ]


@contextmanager
def serving(place: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    """A server from when it is ready; killed at the end if it still runs."""
    with (
        open(place / "log", "a") as log,
        subprocess.Popen(
            command(place, *more), env=environment(), stdout=subprocess.PIPE, stderr=log, text=True
        ) as process,
    ):
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if json.loads(line)["event"] == "ready":
                    break
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def ask(place: Path, path: str, body: object = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://{(place / 'port').read_text()}{path}",
        data=data,
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=20) as response:
        return json.loads(response.read())


def upsert(place: Path, name: str, *numbers: float) -> None:
    body = {"upsertVectors": [{"id": name, "attributes": {"vector": list(numbers)}}]}
    assert ask(place, f"{ROOT}/write", body)["vectorsUpserted"] == 1


async def held(place: Path) -> dict[str, list[float]]:
    """Everything in the collection, when nobody serves it."""
    async with await VectorStore.open(VectorConfig(store=(place / "db").as_uri())) as store:
        hits = await store.search([0, 0, 0, 0], k=10_000)
        return {hit.id: hit.vector.tolist() for hit in hits if hit.vector is not None}


class Source:
    """Produces upserts and deletions, and knows what a collection holds that took all of them."""

    def __init__(self, queue: Path) -> None:
        self.config = ProducerConfig(store=queue.as_uri(), flush_interval="5ms")
        self.held: dict[str, list[float]] = {}
        self.rng = np.random.default_rng(8)

    async def produce(self, batches: int) -> None:
        async with Producer(self.config) as producer:
            for _ in range(batches):
                names = [f"v{number}" for number in self.rng.permutation(400)[:40]]
                vectors = [Vector(name, self.rng.normal(size=4)) for name in names[:30]]
                await producer.produce([encode_upserts(vectors)], UPSERT_METADATA)
                handle = await producer.produce([encode_deletes(names[30:])], DELETE_METADATA)
                await handle.watcher.await_durable()
                self.held.update({one.id: one.vector.tolist() for one in vectors})
                for name in names[30:]:
                    self.held.pop(name, None)


@pytest.mark.timeout(180)
def test_a_fed_collection_that_is_killed_over_and_over_equals_what_was_produced(tmp_path: Path) -> None:
    queue = tmp_path / "queue"
    queue.mkdir()
    source, rng = Source(queue), random.Random(3)
    for _ in range(LIVES):
        with serving(tmp_path, "--buffer", str(queue)) as process:
            asyncio.run(source.produce(6))
            time.sleep(rng.uniform(0, 0.3))  # at any moment
            assert process.poll() is None
            process.kill()
    with serving(tmp_path, "--buffer", str(queue)) as process:
        deadline = time.monotonic() + 60
        while served(tmp_path) != source.held:
            assert time.monotonic() < deadline, "the collection never gets to what was produced"
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == ExitCode.OK
    assert asyncio.run(held(tmp_path)) == source.held


def served(place: Path) -> dict[str, list[float]]:
    """Everything in the collection, from whoever serves it."""
    answer = ask(place, f"{ROOT}/search", {"vector": [0, 0, 0, 0], "k": 10_000})
    return {hit["vector"]["id"]: hit["vector"]["attributes"]["vector"] for hit in answer["results"]}


@pytest.mark.timeout(120)
def test_what_was_acknowledged_over_http_survives_a_kill_and_a_stop_is_in_order(tmp_path: Path) -> None:
    with serving(tmp_path) as process:
        for number in range(10):
            upsert(tmp_path, f"v{number}", number, 0, 0, 0)
        process.kill()
    with serving(tmp_path) as process:
        assert ask(tmp_path, f"{ROOT}/vectors/v9")["vector"]["attributes"]["vector"] == [9, 0, 0, 0]
        upsert(tmp_path, "last", 1, 1, 1, 1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == ExitCode.OK
        assert process.stdout is not None
        assert json.loads(process.stdout.read().splitlines()[-1]) == {"event": "stopped", "error": None}
    assert len(asyncio.run(held(tmp_path))) == 11


@pytest.mark.timeout(120)
def test_a_server_that_a_newer_one_fenced_stops_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "newer").mkdir()
    with serving(tmp_path) as older:
        upsert(tmp_path, "a", 1, 0, 0, 0)
        later = ["--port-file", str(tmp_path / "newer" / "port")]
        with serving(tmp_path, *later) as newer:
            assert older.wait(30) == ExitCode.FENCED, "an idle server does not notice"
            assert "fenc" in (tmp_path / "log").read_text().lower()
            upsert(tmp_path / "newer", "b", 0, 1, 0, 0)
            newer.send_signal(signal.SIGTERM)
            assert newer.wait(30) == ExitCode.OK
    assert sorted(asyncio.run(held(tmp_path))) == ["a", "b"]


@pytest.mark.timeout(60)
def test_a_collection_that_is_described_wrongly_is_not_served(tmp_path: Path) -> None:
    with serving(tmp_path) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == ExitCode.OK
    done = subprocess.run(
        command(tmp_path, "--dimensions", "5"), env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == ExitCode.REJECTED
    assert "4 dimensions, not 5" in done.stderr


@pytest.mark.timeout(60)
def test_a_queue_needs_flushes_that_become_durable_by_themselves(tmp_path: Path) -> None:
    (tmp_path / "vector.yaml").write_text("sync_mode: explicit\nsplit_at: 20\nmerge_below: 5\n")
    more = ("--config", str(tmp_path / "vector.yaml"), "--buffer", str(tmp_path))
    done = subprocess.run(
        command(tmp_path, *more), env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == ExitCode.REJECTED
    assert "every_flush" in done.stderr
