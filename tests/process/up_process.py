"""`penstock up` as a process, for tests: its log as it comes, its parts, and its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import httpx
import yaml
from tests.process.cli_runner import command, environment
from tests.servers import free_ports

__all__ = ["UpProcess", "ports_for", "up"]

Line = dict[str, object]
START_DEADLINE_S = 90.0


class UpProcess:
    """A running fleet. `lines` are those of `--json` so far."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, console: int) -> None:
        self.process = process
        self._log = log
        self.url = f"http://127.0.0.1:{console}"

    @property
    def lines(self) -> list[Line]:
        return [
            json.loads(line)
            for line in self._log.read_bytes().splitlines(keepends=True)
            if line[-1:] == b"\n"
        ]

    def parts(self) -> dict[str, Line]:
        """The last that was said of each part."""
        return {str(line["part"]): line for line in self.lines if line.get("event") == "part"}

    def pids(self) -> dict[str, int]:
        return {name: int(str(part["pid"])) for name, part in self.parts().items() if part["pid"]}

    def until(self, fits: Callable[[], bool], what: str, within_s: float = START_DEADLINE_S) -> None:
        deadline = time.monotonic() + within_s
        while not fits():
            assert self.process.poll() is None, f"it ended with {self.process.returncode}:\n{self.told()}"
            assert time.monotonic() < deadline, f"never {what}:\n{self.told()}"
            time.sleep(0.1)

    def readiness(self) -> Mapping[str, object] | None:
        with contextlib.suppress(httpx.TransportError):
            answer = httpx.get(f"{self.url}/ready", timeout=5)
            found: dict[str, object] = answer.json()
            assert answer.status_code == (200 if found["ready"] else 503)
            return found
        return None

    def until_ready(self, within_s: float = START_DEADLINE_S) -> None:
        self.until(lambda: bool((self.readiness() or {}).get("ready")), "ready", within_s)

    def consoles(self) -> list[str]:
        """Every address of the console that was told."""
        return [str(line["url"]) for line in self.lines if line.get("event") == "console"]

    @contextlib.contextmanager
    def session(self) -> Iterator[httpx.Client]:
        """Somebody who has opened the console by its last address."""
        token = {"token": self.consoles()[-1].rpartition("#token=")[2]}
        with httpx.Client(base_url=self.url, timeout=30) as client:
            assert client.post("/console/api/session", json=token).status_code == 204
            yield client

    def told(self) -> str:
        return "\n".join(str(line) for line in self.lines[-60:])

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(90)


def ports_for(settings: dict[str, object], *keys: str) -> dict[str, object]:
    """The settings with a free port at each of these keys, such as `topics.port`."""
    settings = json.loads(json.dumps(settings))
    for key, port in zip(keys, free_ports(len(keys)), strict=True):
        part, _, name = key.partition(".")
        own = settings.setdefault(part, {})
        assert isinstance(own, dict)
        own[name] = port
    return settings


@contextlib.contextmanager
def up(directory: Path, settings: dict[str, object], *more: str, **environ: str) -> Iterator[UpProcess]:
    """A fleet of these settings, whose console has a port; killed with the block if it still runs."""
    file = directory / "penstock.yaml"
    file.write_text(yaml.safe_dump(settings))
    log = directory / f"up-{time.monotonic_ns()}.log"
    console = settings["console"]
    assert isinstance(console, dict)
    with log.open("wb") as output, (directory / "errors.log").open("ab") as errors:
        process = subprocess.Popen(
            command("up", file, "--json", "--log", "debug", *more),
            env=environment(**environ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
        )
    running = UpProcess(process, log, console["port"])
    try:
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.wait()
