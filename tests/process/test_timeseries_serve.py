"""`penstock timeseries serve` as a process: killed while it is fed, fenced, stopped in order."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from tests.process.cli_runner import command, environment
from tests.servers import moto
from tests.unit.timeseries.remote_write_wire import HEADERS, request

from penstock.buffer import Producer, ProducerConfig

METRICS = b"\x01\x01\x01\x00"
KILLS = 5


def points(first: int, count: int, at_ms: int) -> bytes:
    """A request with one point of the value 1 for each number, each in a series and at a time of its own."""
    message = ExportMetricsServiceRequest()
    metrics = message.resource_metrics.add().scope_metrics.add().metrics
    for number in range(first, first + count):
        point = metrics.add(name="produced").gauge.data_points.add(as_double=1.0)
        point.time_unix_nano = (at_ms - 1000 * number) * 1_000_000
        attribute = point.attributes.add(key="lane")
        attribute.value.string_value = str(number % 7)
    return message.SerializeToString()


@contextmanager
def serving(
    tmp_path: Path, *more: str, store: str | None = None, **extra: str
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    port_file = tmp_path / "port"
    port_file.unlink(missing_ok=True)
    where = store or str(tmp_path / "db")
    arguments = ("timeseries", "serve", where, "--port", "0", "--port-file", str(port_file))
    with subprocess.Popen(
        command(*arguments, "--json", *more),
        env=environment(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            yield process, address(process, port_file)
        finally:
            process.kill()


def address(process: subprocess.Popen[bytes], port_file: Path) -> str:
    """Where it listens, once it is ready."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        if port_file.exists():
            url = f"http://{port_file.read_text()}"
            if httpx.get(f"{url}/-/ready").status_code == 200:
                return url
        time.sleep(0.02)
    raise AssertionError("it does not get ready")


def total(url: str, at_ms: int) -> float:
    answer = httpx.get(
        f"{url}/api/v1/query",
        params={"query": "sum(sum_over_time(produced[6h]))", "time": at_ms / 1000},
        timeout=30,
    )
    result = answer.json()["data"]["result"]
    return float(result[0]["value"][1]) if result else 0.0


async def produce(store: str, first: int, batches: int, at_ms: int) -> int:
    """Batches of ten points; returns the number behind the last."""
    async with Producer(ProducerConfig(store=store, flush_interval="1ms")) as producer:
        for place in range(batches):
            handle = await producer.produce([points(first + 10 * place, 10, at_ms)], METRICS)
            await handle.watcher.await_durable()
    return first + 10 * batches


@pytest.mark.timeout(240)
def test_every_point_of_the_queue_counts_once_after_every_kill(tmp_path: Path) -> None:
    store, rng = (tmp_path / "queue").as_uri(), random.Random(7)
    at_ms = int(time.time() * 1000)
    produced = 0
    for _ in range(KILLS):
        produced = asyncio.run(produce(store, produced, 20, at_ms))
        with serving(tmp_path, "--buffer", store, "--poll-interval", "10ms", "--flush-interval", "50ms") as (
            process,
            url,
        ):
            deadline = time.monotonic() + rng.uniform(0.05, 0.6)
            while time.monotonic() < deadline:
                assert total(url, at_ms) <= produced
            process.send_signal(signal.SIGKILL)
            process.communicate()
    with serving(tmp_path, "--buffer", store, "--poll-interval", "10ms", "--flush-interval", "50ms") as (
        process,
        url,
    ):
        deadline = time.monotonic() + 60
        while total(url, at_ms) < produced and time.monotonic() < deadline:
            time.sleep(0.02)
        assert total(url, at_ms) == produced
        process.send_signal(signal.SIGTERM)
        told, errors = process.communicate(timeout=30)
        assert process.returncode == 0, errors
    events = [json.loads(line) for line in told.splitlines()]
    assert [event["event"] for event in events] == ["listening", "ready", "stopped"]
    assert events[-1]["through"] == 20 * KILLS - 1
    assert events[-1]["refused"] == 0


@pytest.mark.timeout(120)
def test_a_second_process_fences_the_first_which_stops_and_says_so(tmp_path: Path) -> None:
    at_ms = int(time.time() * 1000)
    with serving(tmp_path) as (first, url):
        write = {"content": request(({"__name__": "produced"}, [(at_ms, 5.0)])), "headers": HEADERS}
        assert httpx.post(f"{url}/api/v1/write", timeout=30, **write).status_code == 204  # type: ignore[arg-type]
        with serving(tmp_path) as (second, newer):
            told, errors = first.communicate(timeout=60)
            assert first.returncode == 4, errors
            assert b"newer" in errors
            assert b"Traceback" not in errors
            assert json.loads(told.splitlines()[-1])["error"]
            assert total(newer, at_ms) == 5.0
            second.send_signal(signal.SIGTERM)
            second.communicate(timeout=30)
            assert second.returncode == 0


@pytest.mark.timeout(120)
def test_a_remote_write_that_was_answered_survives_a_kill(tmp_path: Path) -> None:
    at_ms = int(time.time() * 1000)
    for number in range(3):
        with serving(tmp_path, "--flush-interval", "20ms") as (process, url):
            body = request(({"__name__": "produced", "n": str(number)}, [(at_ms, 1.0)]))
            assert (
                httpx.post(f"{url}/api/v1/write", content=body, headers=HEADERS, timeout=30).status_code
                == 204
            )
            process.send_signal(signal.SIGKILL)
            process.communicate()
    with serving(tmp_path) as (_, url):
        assert total(url, at_ms) == 3.0


class Line:
    """A way to a server that can go silent: connections stay, and nothing goes through any more."""

    def __init__(self, port: int) -> None:
        self._there = ("127.0.0.1", port)
        self._open = threading.Event()
        self._open.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._open.clear()

    def close(self) -> None:
        self._open.set()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._there)
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError), one, other:
            while data := one.recv(65_536):
                self._open.wait()
                other.sendall(data)


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_stop_while_the_store_is_away_takes_bounded_time_and_says_what_is_not_stored(
    tmp_path: Path,
) -> None:
    at_ms = int(time.time() * 1000)
    with moto() as server:
        server.make_bucket("metrics")
        line = Line(int(server.endpoint.rsplit(":", 1)[1]))
        where = {
            "AWS_ENDPOINT": f"http://127.0.0.1:{line.port}",
            "AWS_ACCESS_KEY_ID": server.access_key,
            "AWS_SECRET_ACCESS_KEY": server.secret_key,
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }
        with serving(tmp_path, "--acknowledge", "applied", store="s3://metrics/db", **where) as (
            process,
            url,
        ):
            write = {"content": request(({"__name__": "produced"}, [(at_ms, 5.0)])), "headers": HEADERS}
            assert httpx.post(f"{url}/api/v1/write", timeout=30, **write).status_code == 204  # type: ignore[arg-type]
            assert httpx.post(f"{url}/-/flush", timeout=30).status_code == 204
            line.cut()
            assert httpx.post(f"{url}/api/v1/write", timeout=30, **write).status_code == 204  # type: ignore[arg-type]
            assert total(url, at_ms) == 5.0
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            told, errors = process.communicate(timeout=60)
            assert time.monotonic() - began < 30
            assert process.returncode == 6, errors
            assert b"accepted writes that may not be stored: 1" in errors
            assert b"Traceback" not in errors
            assert json.loads(told.splitlines()[-1])["event"] == "stopped"
        line.close()


def test_queries_that_grow_labels_are_refused_and_take_no_memory(tmp_path: Path) -> None:
    at_ms = int(time.time() * 1000)
    query = 'label_replace(up, "a", "$1", "n", "(.*)")'
    for _ in range(12):
        query = f'label_replace({query}, "a", "$1$1$1$1", "a", "(.*)")'
    slow = 'label_replace(up, "b", "$1", "a", "(x|xx|xxx){900}(.*)")'
    long = "x" * 15_000
    rows = [({"__name__": "up", "n": str(n), "a": f"{n}{long}"}, [(at_ms, 1.0)]) for n in range(1000)]
    with serving(tmp_path) as (process, url):
        for first in range(0, len(rows), 100):
            body = request(*rows[first : first + 100])
            assert httpx.post(f"{url}/api/v1/write", content=body, headers=HEADERS, timeout=60).is_success

        def peak_mb() -> int:
            status = Path(f"/proc/{process.pid}/status").read_text()
            return int(status.partition("VmHWM:")[2].split()[0]) // 1024

        before_mb = peak_mb()
        ask = {"query": query, "time": str(at_ms / 1000)}
        refused = httpx.post(f"{url}/api/v1/query", data=ask, timeout=60)
        assert refused.status_code == 422
        assert "makes label 'a' too long" in refused.json()["error"]
        assert "at most 16,384" in refused.json()["error"]
        started = time.monotonic()
        ask = {"query": slow, "time": str(at_ms / 1000), "timeout": "1s"}
        late = httpx.post(f"{url}/api/v1/query", data=ask, timeout=120)
        assert late.status_code in (422, 503), late.text
        assert "timed out after 1s" in late.json()["error"]
        assert time.monotonic() - started < 30
        assert peak_mb() - before_mb < 400
