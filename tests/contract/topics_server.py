"""A real server process for the contract tests, and clients that check the generic rules every time."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

import penstock

__all__ = ["PROTOCOLS", "Api", "Server", "fresh_name", "launch", "run_refused", "serving"]

SRC = Path(penstock.__file__).parents[1]
"""The path of this process's package, so that its child processes run a mutant, too."""
START_DEADLINE_S = 60.0
PROTOCOLS = ("h1", "h2")
_DATA_KEYS_NEVER = {"error", "ok", "status"}
_NAMES = itertools.count(1)


def fresh_name(stem: str = "topic") -> str:
    """Return a name that no other test of this run uses."""
    return f"{stem}-{os.getpid()}-{next(_NAMES)}"


def environment(**extra: str) -> dict[str, str]:
    """Return the environment without settings of the machine that runs the tests."""
    foreign = ("TOPICS_", "PENSTOCK_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return kept | {"PYTHONPATH": str(SRC), "PYTHONWARNINGS": "error"} | extra


def command() -> list[str]:
    return [sys.executable, "-m", "penstock.cli", "topics", "serve"]


@dataclass(slots=True)
class Server:
    """One running server. Its clients are closed with it."""

    process: subprocess.Popen[bytes]
    address: str
    data: Path
    log: Path
    _clients: list[httpx.Client] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    @property
    def host_and_port(self) -> tuple[str, int]:
        host, _, port = self.address.rpartition(":")
        return host.strip("[]"), int(port)

    def api(self, protocol: str = "h1", key: str | None = None) -> Api:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        is_h2 = protocol == "h2"
        client = httpx.Client(
            base_url=self.url, http1=not is_h2, http2=is_h2, headers=headers, timeout=40, trust_env=False
        )
        self._clients.append(client)
        return Api(client)

    def wait_until_ready(self, key: str | None = None) -> None:
        api = self.api(key=key)
        deadline = time.monotonic() + START_DEADLINE_S
        while api.client.get("/v0/ready").status_code != 200:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, "not ready in time"
            time.sleep(0.01)

    def close_clients(self) -> None:
        while self._clients:
            self._clients.pop().close()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Stop the server with SIGTERM and return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(timeout=30)
        finally:
            self.close_clients()

    def kill(self) -> None:
        """Kill the server, as a crash would."""
        self.process.kill()
        self.process.wait(timeout=30)
        self.close_clients()


def launch(data: Path, **settings: str) -> Server:
    """Start a server and wait for its port, but not for its recovery."""
    port_file = data.with_name(data.name + ".port")
    port_file.unlink(missing_ok=True)
    log = data.with_name(data.name + ".log")
    variables = {
        "TOPICS_PORT": "0",
        "TOPICS_PORT_FILE": str(port_file),
        "TOPICS_DATA_DIR": str(data),
        "TOPICS_WAL_SHARDS": "1",
    }
    with log.open("ab") as said:
        process = subprocess.Popen(command(), env=environment(**variables | settings), stderr=said)
    deadline = time.monotonic() + START_DEADLINE_S
    while not port_file.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            process.wait()
            raise AssertionError(f"the server did not start: {log.read_text()}")
        time.sleep(0.01)
    return Server(process=process, address=port_file.read_text(), data=data, log=log)


@contextlib.contextmanager
def serving(data: Path, *, key: str | None = None, **settings: str) -> Iterator[Server]:
    """Start a server and wait until it is ready; stop it at the end unless the test has done so."""
    server = launch(data, **settings)
    try:
        server.wait_until_ready(key)
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()
        server.close_clients()


def run_refused(data: Path, **settings: str) -> str:
    """Start a server that must refuse to start; return its output."""
    variables = {"TOPICS_PORT": "0", "TOPICS_DATA_DIR": str(data), "TOPICS_WAL_SHARDS": "1"}
    ended = subprocess.run(
        command(), env=environment(**variables | settings), capture_output=True, timeout=60, check=False
    )
    said = ended.stderr.decode()
    assert ended.returncode not in (0, None), "it started and ended well"
    assert ended.returncode > 0, said
    assert "Traceback" not in said
    return said


class Api:
    """The `/v0` API through one client. Every response is checked against the common rules."""

    def __init__(self, client: httpx.Client) -> None:
        self.client = client

    # Bodies are JSON of any shape; the tests check them, so the types are loose.
    def ask(self, method: str, path: str, body: object = None, *, status: int = 200, **options: Any) -> Any:
        """Send, expect this status, and return the decoded body."""
        if body is not None:
            options["content"] = json.dumps(body).encode()
            options.setdefault("headers", {"Content-Type": "application/json"})
        response = self.client.request(method, path, **options)
        assert response.status_code == status, (response.status_code, response.text)
        check_answer(response)
        return response.json()

    def refused(self, method: str, path: str, body: object = None, *, status: int, **options: Any) -> Any:
        """Expect an error; return the content of `error`."""
        return self.ask(method, path, body, status=status, **options)["error"]

    def put(self, topic: str, *, status: int = 201, **config: object) -> Any:
        return self.ask("PUT", f"/v0/topics/{topic}", config, status=status)

    def write(self, topic: str, *data: object, status: int | None = None, **fields: object) -> Any:
        return self.write_records(topic, [{"data": one} for one in data], status=status, **fields)

    def write_records(
        self, topic: str, records: list[dict[str, Any]], *, status: int | None = None, **fields: object
    ) -> Any:
        body = {"records": records, **fields}
        if status is not None:
            return self.ask("POST", f"/v0/topics/{topic}", body, status=status)
        response = self.client.post(f"/v0/topics/{topic}", json=body)
        check_answer(response)
        answer = response.json()
        assert response.status_code == (201 if answer["created"] else 200), response.text
        return answer

    def diff(self, topic: str, *, status: int = 200, **fields: object) -> Any:
        return self.ask("POST", f"/v0/topics/{topic}/diff", fields, status=status)

    def delete(self, topic: str, *, status: int = 200, **fields: object) -> Any:
        return self.ask("POST", f"/v0/topics/{topic}/delete", fields, status=status)

    def state(self, topic: str, *, status: int = 200, **query: str) -> Any:
        return self.ask("GET", f"/v0/topics/{topic}", status=status, params=query)

    def remove(self, topic: str, *, status: int = 200, **query: str) -> Any:
        return self.ask("DELETE", f"/v0/topics/{topic}", status=status, params=query)

    def data_of(self, topic: str, **fields: object) -> list[Any]:
        return [record["data"] for record in self.diff(topic, **fields)["records"]]

    def seqs_of(self, topic: str, **fields: object) -> list[int]:
        return [record["$seq"] for record in self.diff(topic, **fields)["records"]]


def check_answer(response: httpx.Response) -> None:
    """Check the rules of §1 indefinitelyy JSON response."""
    assert response.headers["content-type"] == "application/json", response.headers
    if response.request.method == "HEAD":
        return
    body = response.json()
    assert isinstance(body, dict)
    if response.status_code >= 400:
        check_error(body, response.status_code, response.headers.get("retry-after"))
    elif "/topics" in response.request.url.path:
        assert not _DATA_KEYS_NEVER & body.keys()
        total = body["performance"]["server_total_ms"]
        assert isinstance(total, float | int)
        assert total >= 0


def check_error(body: Any, status: int, retry_after: str | None) -> None:
    assert body.keys() == {"error"}
    error = body["error"]
    assert {"code", "message"} <= error.keys() <= {"code", "message", "detail"}
    assert isinstance(error["code"], str)
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error.get("detail", {}), dict)
    assert retry_after == ("1" if status in (429, 503) else None)
