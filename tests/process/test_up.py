"""`penstock up` with real parts: killed, stopped, and started again in the middle of traffic."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import httpx
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from tests.process.cli_runner import command, environment, penstock
from tests.process.up_process import ports_for, up

from penstock.buffer import Consumer, ConsumerConfig
from penstock.buffer.append import last_version
from penstock.storage.fs import DirectoryLock, OsFileSystem
from penstock.up import preflight

FLOW = {
    "stop_timeout": "30s",
    "collector": {"grpc_port": 0},
    "relays": [{"topic": "events", "queue": "events", "value": "data", "flush_interval": "10ms"}],
    "timeseries": {"queue": "metrics"},
}
TOPICS = {
    "stop_timeout": "20s",
    "relays": [{"topic": "events", "queue": "events", "value": "data", "flush_interval": "10ms"}],
}


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def port(settings: dict[str, object], part: str, key: str = "port") -> int:
    own = settings[part]
    assert isinstance(own, dict)
    return int(own[key])


def temperature(value: float) -> bytes:
    message = ExportMetricsServiceRequest()
    metric = message.resource_metrics.add().scope_metrics.add().metrics.add(name="temperature")
    metric.gauge.data_points.add(time_unix_nano=time.time_ns(), as_double=value)
    return message.SerializeToString()


def value_of(url: str) -> float | None:
    answer = httpx.get(f"{url}/api/v1/query", params={"query": "temperature"}, timeout=30).json()
    result = answer["data"]["result"]
    return float(result[0]["value"][1]) if result else None


@pytest.mark.timeout(300)
def test_a_killed_part_comes_back_alone_and_a_stop_goes_with_the_flow(tmp_path: Path) -> None:
    ports = ("console.port", "topics.port", "timeseries.port", "collector.http_port", "collector.admin_port")
    settings = ports_for(FLOW, *ports)
    with up(tmp_path, settings) as fleet:
        fleet.until_ready()
        # What the collector takes comes out of the database.
        answer = httpx.post(
            f"http://127.0.0.1:{port(settings, 'collector', 'http_port')}/v1/metrics",
            content=temperature(21.5),
            headers={"content-type": "application/x-protobuf"},
        )
        assert answer.status_code == 200
        database = f"http://127.0.0.1:{port(settings, 'timeseries')}"
        fleet.until(lambda: value_of(database) == 21.5, "in the database")

        before = fleet.pids()
        assert len(set(before.values())) == len(before) == 5
        os.kill(before["timeseries"], signal.SIGKILL)
        fleet.until(lambda: fleet.parts()["timeseries"]["restarts"] == 1, "started again")
        fleet.until_ready()
        after = fleet.pids()
        assert after.pop("timeseries") != before.pop("timeseries")
        assert after == before
        metrics = httpx.get(f"{fleet.url}/metrics").text
        assert 'fleet_part_restarts{part="timeseries",kind="timeseries"} 1' in metrics
        assert httpx.get(f"{fleet.url}/health").json() == {"status": "ok"}
        assert value_of(database) == 21.5

        # The console sees the same.
        with fleet.session() as console:
            seen = {part["name"]: part for part in console.get("/console/api/overview").json()["parts"]}
            assert {name: part["pid"] for name, part in seen.items()} == fleet.pids()
            assert seen["timeseries"]["restarts"] == 1
        fleet.process.send_signal(signal.SIGUSR1)
        fleet.until(lambda: len(fleet.consoles()) == 2, "told again")
        with fleet.session():
            pass

        assert fleet.stop() == 0
        stopped = [
            line["part"] for line in fleet.lines if line.get("event") == "part" and line["state"] == "stopped"
        ]
        assert set(stopped[:2]) == {"collector", "topics"}
        assert stopped[2:] == ["relay-events", "timeseries"]
        assert not any(map(is_alive, [*after.values()]))


class Writer:
    """Writes numbered records one after the other, and remembers those that were acknowledged."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.acknowledged: list[int] = []
        self._number = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._write)

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        self._end.set()
        self._thread.join()

    def _write(self) -> None:
        with httpx.Client(timeout=5) as client:
            while not self._end.is_set():
                self._number += 1
                body = {"records": [{"data": {"n": self._number}}]}
                with contextlib.suppress(httpx.TransportError):
                    answer = client.post(f"{self._url}/v0/topics/events", json=body)
                    if answer.status_code == 200:
                        self.acknowledged.append(self._number)
                        continue
                self._end.wait(0.05)


def queue_at(directory: Path) -> ConsumerConfig:
    store = (directory / "queues").as_uri()
    return ConsumerConfig(store=store, manifest_path="events/manifest", data_path_prefix="events")


async def queued(config: ConsumerConfig) -> list[int]:
    """The numbers in the queue, in its order."""
    found: list[int] = []
    async with await Consumer.open(config) as consumer:
        while (batch := await consumer.next_batch()) is not None:
            found += [json.loads(bytes(record))["n"] for record in batch.entries]
    return found


@pytest.mark.timeout(300)
def test_a_fleet_killed_in_the_middle_of_traffic_loses_nothing_and_leaves_no_process(
    tmp_path: Path,
) -> None:
    settings = ports_for(TOPICS, "console.port", "topics.port")
    url = f"http://127.0.0.1:{port(settings, 'topics')}"
    queue = queue_at(tmp_path / "penstock-data")
    with Writer(url) as writer:
        with up(tmp_path, settings) as fleet:
            fleet.until_ready()
            fleet.until(lambda: len(writer.acknowledged) > 50, "written to")
            children = [pid for pid in fleet.pids().values() if pid != fleet.process.pid]
            assert len(children) == 2
            os.kill(fleet.process.pid, signal.SIGKILL)
            fleet.process.wait()
            deadline = time.monotonic() + 30
            while any(map(is_alive, children)):
                assert time.monotonic() < deadline, "the parts outlive their supervisor"
                time.sleep(0.02)
        survived = len(writer.acknowledged)
        with up(tmp_path, settings) as fleet:
            fleet.until_ready()
            fleet.until(lambda: len(writer.acknowledged) > survived + 50, "written to again")
            writer.end()
            last = writer.acknowledged[-1]
            head = httpx.get(f"{url}/v0/topics/events").json()["head_seq"]
            fleet.until(lambda: asyncio.run(last_version(queue, "relay:events")) == head, "relayed")
            assert fleet.stop() == 0
    found = asyncio.run(queued(queue))
    assert len(found) == len(set(found)), "a record came twice"
    assert set(writer.acknowledged) <= set(found)
    assert found == sorted(found)
    assert found[-1] >= last


@pytest.mark.timeout(120)
def test_a_part_with_wrong_settings_fails_and_the_others_run(tmp_path: Path) -> None:
    (tmp_path / "collector.yaml").write_text("nodes: {a: {kind: recever}}")
    settings = ports_for({"collector": {"file": "collector.yaml"}}, "console.port", "topics.port")
    with up(tmp_path, settings) as fleet:
        fleet.until(lambda: fleet.parts().get("topics", {}).get("state") == "ready", "ready")
        fleet.until(lambda: fleet.parts()["collector"]["state"] == "failed", "failed")
        told = fleet.readiness()
        assert told is not None
        (waiting,) = told["not_ready"]  # type: ignore[misc]
        assert waiting == {"name": "collector", "state": "failed"}
        assert "recever" in str(fleet.parts()["collector"]["last_error"])
        elsewhere = httpx.get(f"{fleet.url}/ready", headers={"host": "evil.example"})
        assert elsewhere.status_code == 403
        assert fleet.parts()["topics"]["restarts"] == 0
        assert fleet.stop() == 0


def test_all_faults_are_reported_together_and_nothing_is_started(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("name: x")
    file = tmp_path / "penstock.yaml"
    file.write_text("topics: {prt: 1}\npipelines: [{file: bad.yaml}]\nvector: {port: x}\n")
    told = penstock("up", file, code=2).stderr.decode()
    assert "topics.prt: unknown key, did you mean 'port'?" in told
    assert "vector.port: expected a whole number" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.yaml", "penstock.yaml"]

    file.write_text("host: 0.0.0.0\ntopics:\npipelines: [{file: bad.yaml}, {file: none.yaml}]\n")
    checked = json.loads(penstock("up", file, "--check", "--json", code=2).stdout)
    assert len(checked["faults"]) == 4
    assert [part["name"] for part in checked["parts"]] == ["topics", "pipeline-bad", "pipeline-none"]


@pytest.mark.timeout(120)
def test_a_fleet_runs_without_standard_streams_and_stops_promptly_while_it_starts(tmp_path: Path) -> None:
    settings = ports_for(TOPICS, "console.port", "topics.port")
    (tmp_path / "penstock.yaml").write_text(json.dumps(settings))
    process = subprocess.Popen(
        ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command("up", tmp_path / "penstock.yaml")],
        env=environment(),
    )
    try:
        deadline = time.monotonic() + 60
        url = f"http://127.0.0.1:{port(settings, 'console')}/health"
        while not answers(url):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0
    finally:
        process.kill()
        process.wait()


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url, timeout=5).status_code == 200
    return False


def test_a_directory_has_one_fleet_and_the_second_names_its_process(tmp_path: Path) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text("data_dir: data\ntopics:\n")
    with DirectoryLock(OsFileSystem(), str(tmp_path / "data"), name=preflight.LOCK_NAME):
        told = penstock("up", file, code=3).stderr.decode()
    assert f"is in use by process {os.getpid()}" in told


def test_ports_that_are_taken_are_all_named_with_their_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "LEAVING_S", 0.0)
    file = tmp_path / "penstock.yaml"
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2))
        numbers = [one.getsockname()[1] for one in (first, second)]
        file.write_text(f"topics: {{port: {numbers[0]}}}\nconsole: {{port: {numbers[1]}}}\n")
        told = penstock("up", file, code=3).stderr.decode()
    assert f"port {numbers[0]} of 127.0.0.1 is in use (topics.port)" in told
    assert f"port {numbers[1]} of 127.0.0.1 is in use (console.port)" in told
    assert "change" in told


def test_what_init_writes_runs_and_is_never_replaced_unasked(tmp_path: Path) -> None:
    penstock("init", tmp_path / "site")
    checked = json.loads(penstock("up", tmp_path / "site" / "penstock.yaml", "--check", "--json").stdout)
    assert [part["name"] for part in checked["parts"]] == [
        "collector",
        "topics",
        "relay-events",
        "pipeline-events",
        "timeseries",
        "vector",
    ]
    assert all(part["what"] and "does not run" not in part["what"] for part in checked["parts"])
    site = ("up", tmp_path / "site" / "penstock.yaml", "--data-dir", tmp_path / "elsewhere")
    assert json.loads(penstock(*site, "--check", "--json").stdout)["faults"] == []
    (tmp_path / "site" / "events.yaml").write_text("mine")
    told = penstock("init", tmp_path / "site", code=2).stderr.decode()
    assert "events.yaml: exists already; use --force to replace it" in told
    assert (tmp_path / "site" / "events.yaml").read_text() == "mine"
    penstock("init", tmp_path / "site", "--force")
    assert (tmp_path / "site" / "events.yaml").read_text() != "mine"
