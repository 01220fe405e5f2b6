"""The event-log server in its own process, and the requests of the benchmarks."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from topics_load import Connection, HttpAnswer, drive

__all__ = ["RECORD_BYTES", "Server", "bodies", "diff_request", "opened", "texts", "write_requests"]

RECORD_BYTES = 200
_START_S = 120.0
_WORDS = ("accepted", "checkout", "eu-west", "declined", "mobile", "refund", "us-east", "retry", "web")
_TICKS = os.sysconf("SC_CLK_TCK")


class Server:
    """`penstock topics serve` on a data directory. It starts immediately and is stopped by process id."""

    def __init__(self, data_dir: Path, **settings: str) -> None:
        data_dir.mkdir(parents=True, exist_ok=True)
        self._port_file = data_dir / "port"
        self._port_file.unlink(missing_ok=True)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TOPICS_")}
        environment = {
            **kept,
            "TOPICS_DATA_DIR": str(data_dir / "data"),
            "TOPICS_PORT": "0",
            "TOPICS_PORT_FILE": str(self._port_file),
            **settings,
        }
        self._log = data_dir / "log"
        began = time.perf_counter()
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "penstock.cli", "topics", "serve"],
                env=environment,
                stdout=output,
                stderr=output,
            )
        try:
            self.port = self._bound_port(began + _START_S)
            self._wait_until_ready(began + _START_S)
        except BaseException:
            self.kill()
            raise
        self.start_s = time.perf_counter() - began
        """Seconds from the start of the process until it was ready."""

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _bound_port(self, deadline: float) -> int:
        while not self._port_file.exists():
            self._check_running(deadline)
            time.sleep(0.002)
        return int(self._port_file.read_text().rpartition(":")[2])

    def _wait_until_ready(self, deadline: float) -> None:
        while self._ask("GET", "/v0/ready")[0] != 200:
            self._check_running(deadline)
            time.sleep(0.005)

    def _check_running(self, deadline: float) -> None:
        if self._process.poll() is not None or time.perf_counter() > deadline:
            raise RuntimeError(f"the server did not start: {self._log.read_text()[-500:]}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> float:
        """Stop the server gracefully. Return the time that took."""
        began = time.perf_counter()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()
        return time.perf_counter() - began

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def cpu_s(self) -> float:
        """Return the CPU seconds that all threads of the process have used so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def memory_bytes(self) -> tuple[int, int]:
        """Return the resident bytes of anonymous memory and of mapped files."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        own, mapped = (int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile"))
        return own, mapped

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """Send one request outside of any measurement, and return its parsed response."""
        status, answer = self._ask(method, path, body)
        if status not in (200, 201):
            raise RuntimeError(f"{method} {path} was answered with {status}: {answer}")
        return answer

    def _ask(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def fill(self, topic: str, count: int, records: Sequence[bytes], *, batch: int = 1000) -> None:
        """Write the given number of records into a topic, quickly."""
        requests = write_requests(topic, bodies(records, batch))
        connections = [Connection(self.port, requests[place:], HttpAnswer()) for place in range(4)]
        turns = -(-count // (batch * len(connections)))
        with opened(connections):
            for _ in range(turns):
                drive(connections, 0.0)
        found = self.ask("GET", f"/v0/topics/{topic}")["count"]
        assert found >= count, f"{topic} has {found} records, not {count}"


@contextmanager
def opened(connections: Sequence[Connection]) -> Iterator[Sequence[Connection]]:
    """Open connections that are closed afterwards."""
    try:
        yield connections
    finally:
        for connection in connections:
            connection.socket.close()


def texts(count: int, size: int = RECORD_BYTES, seed: int = 1) -> list[bytes]:
    """Return compact JSON objects of `size` bytes each, with entropy and words."""
    rng = random.Random(seed)
    return [_text(rng, size) for _ in range(count)]


def _text(rng: random.Random, size: int) -> bytes:
    if size < 160:
        digits = size - len('{"n":""}')
        return b'{"n":"%b"}' % rng.randbytes(-(-digits // 2)).hex()[:digits].encode()
    start = (
        f'{{"id":"{rng.getrandbits(64):016x}","at":{1_760_000_000_000 + rng.randrange(10**9)},'
        f'"user":{rng.randrange(10**6)},"amount":{rng.random() * 1000:.2f},'
        f'"trace":"{rng.randbytes(16).hex()}","text":"'
    )
    room = size - len(start) - 2
    words = " ".join(rng.choices(_WORDS, k=room // 3))[:room]
    return f'{start}{words}"}}'.encode()


def bodies(records: Sequence[bytes], batch: int) -> list[bytes]:
    """Return the bodies of writes of `batch` records each."""
    wrapped = [b'{"data":%b}' % record for record in records]
    return [
        b'{"records":[%b]}' % b",".join(wrapped[start : start + batch])
        for start in range(0, len(wrapped) - batch + 1, batch)
    ]


def write_requests(topic: str, payloads: Sequence[bytes]) -> list[bytes]:
    """Return complete requests that write these bodies."""
    return [_post(f"/v0/topics/{topic}", body) for body in payloads]


def diff_request(topic: str, from_seq: int, limit: int) -> bytes:
    """Return a complete request for one page."""
    return _post(f"/v0/topics/{topic}/diff", b'{"from_seq":%d,"limit":%d}' % (from_seq, limit))


def _post(path: str, body: bytes) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
