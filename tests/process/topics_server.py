"""A real topics server as a process, for the tests that need one."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.process.cli_runner import command, environment, penstock

from penstock.topics.client.sync import Client
from penstock.topics.config import Durability, TopicConfig

__all__ = ["FSYNC", "KEY", "Server", "serving"]

KEY = "s3cret"
FSYNC = TopicConfig(durability=Durability.FSYNC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running server, and how to talk to it."""

    url: str
    data: Path
    process: subprocess.Popen[bytes]

    def run(self, *arguments: str | Path, given: bytes | None = None, code: int = 0) -> bytes:
        return penstock(
            "topics", *arguments, "--url", self.url, given=given, code=code, TOPICS_API_KEY=KEY
        ).stdout

    def json(self, *arguments: str | Path, given: bytes | None = None, code: int = 0) -> dict[str, object]:
        told = json.loads(self.run(*arguments, "--json", given=given, code=code))
        assert isinstance(told, dict)
        return told

    def client(self, **options: str) -> Client:
        return Client(self.url, key=KEY, **options)  # type: ignore[arg-type]


@contextmanager
def serving(data: Path, port: int = 0, **settings: str) -> Iterator[Server]:
    """A server on a data directory, stopped at the end."""
    port_file = data.parent / f"{data.name}.port"
    port_file.unlink(missing_ok=True)
    variables = {
        "TOPICS_PORT": str(port),
        "TOPICS_PORT_FILE": str(port_file),
        "TOPICS_DATA_DIR": str(data),
        "TOPICS_API_KEYS": KEY,
        "TOPICS_WAL_SHARDS": "2",
    }
    process = subprocess.Popen(command("topics", "serve"), env=environment(**variables | settings))
    try:
        deadline = time.monotonic() + 20
        while not port_file.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield Server(url=f"http://{port_file.read_text().strip()}", data=data, process=process)
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(timeout=20)
