"""A Prometheus and a `penstock timeseries serve` as processes of their own, and how both are asked."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.process.cli_runner import command, environment
from tests.servers import free_ports
from tests.unit.timeseries.remote_write_wire import HEADERS

__all__ = ["Peer", "Reply", "penstock", "program", "prometheus", "until"]

PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Reply:
    """A status and a JSON body."""

    status: int
    body: dict[str, Any]

    @property
    def data(self) -> Any:
        assert self.status == 200, self.body
        return self.body["data"]


@dataclass(frozen=True, slots=True)
class Peer:
    """A server of Prometheus' HTTP API."""

    url: str
    client: httpx.Client

    def get(self, path: str, **parameters: str | float | Sequence[str]) -> Reply:
        answer = self.client.get(f"{self.url}/api/v1/{path}", params=parameters)
        return Reply(answer.status_code, answer.json())

    def post(self, path: str, **form: str | float | Sequence[str]) -> Reply:
        answer = self.client.post(f"{self.url}/api/v1/{path}", data=form)
        return Reply(answer.status_code, answer.json())

    def write(self, body: bytes) -> None:
        answer = self.client.post(f"{self.url}/api/v1/write", content=body, headers=HEADERS)
        assert answer.status_code == 204, answer.text


def program() -> str:
    """The path of Prometheus. A run that asks for these tests and has none fails, with one line."""
    found = os.environ.get("PENSTOCK_PROMETHEUS", "")
    if not os.access(found, os.X_OK):
        pytest.exit(f"PENSTOCK_PROMETHEUS has to be the path of Prometheus, and is {found!r}", returncode=1)
    return found


def until(holds: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    """Waits for it. Raises `AssertionError` if it does not come."""
    deadline = time.monotonic() + patience_s
    while not holds():
        assert time.monotonic() < deadline, f"waited {patience_s:g} s: {what}"
        time.sleep(0.05)


@contextmanager
def prometheus(folder: Path, config: str) -> Iterator[Peer]:
    """A Prometheus with a port and data of its own, on the loopback device, that takes remote writes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prometheus.yml").write_text(config)
    (port,) = free_ports(1)
    arguments = [
        program(), f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}", "--web.enable-remote-write-receiver", "--log.level=warn",
    ]  # fmt: skip
    with _running(arguments, folder, dict(os.environ), lambda: f"http://127.0.0.1:{port}") as peer:
        yield peer


@contextmanager
def penstock(folder: Path) -> Iterator[Peer]:
    """A server of time series over a directory."""
    folder.mkdir(parents=True, exist_ok=True)
    port_file = folder / "port"
    arguments = command(
        "timeseries", "serve", folder / "db", "--port", "0", "--port-file", port_file,
        "--flush-interval", "50ms",
    )  # fmt: skip

    def url() -> str:
        return f"http://{port_file.read_text()}" if port_file.exists() else ""

    with _running(arguments, folder, environment(), url) as peer:
        yield peer


@contextmanager
def _running(
    arguments: Sequence[str], folder: Path, environ: dict[str, str], url: Callable[[], str]
) -> Iterator[Peer]:
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            arguments, cwd=folder, env=environ, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        with httpx.Client(timeout=PATIENCE_S) as client:

            def ready() -> bool:
                assert process.poll() is None, f"it ended at once:\n{log.read_text()[-3000:]}"
                try:
                    return bool(url()) and client.get(f"{url()}/-/ready").status_code == 200
                except httpx.TransportError:
                    return False

            until(ready, f"{arguments[0]} does not get ready")
            yield Peer(url(), client)
            assert process.poll() is None, f"it ended early:\n{log.read_text()[-3000:]}"
    finally:
        process.kill()
        process.wait()
