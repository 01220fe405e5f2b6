"""One fleet for the console, for the whole session, and clients with a session on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).parents[3]


class StageProcess:
    """A running stage. Commands are answered one at a time."""

    def __init__(self, directory: Path, *options: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._errors = (directory / "stage.err").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.console_stage", "--dir", str(directory / "stage"), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        )
        told = self._answer()
        self.url: str = told["url"].partition("#")[0]
        self.first_token: str = told["url"].partition("#token=")[2]
        self.parts: dict[str, int | None] = told["parts"]

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, (self.directory / "stage.err").read_text()[-4000:]
        return json.loads(line)

    def order(self, text: str) -> dict[str, object]:
        assert self._process.stdin is not None
        self._process.stdin.write(text.encode() + b"\n")
        self._process.stdin.flush()
        return dict(self._answer())

    def new_token(self) -> str:
        return str(self.order("url")["url"]).partition("#token=")[2]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        finally:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._errors.close()


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StageProcess]:
    running = StageProcess(tmp_path_factory.mktemp("console"))
    try:
        yield running
    finally:
        running.close()


@pytest.fixture(scope="session")
def console(stage: StageProcess) -> Iterator[httpx.Client]:
    """Return a client with a session, like the console's own page."""
    headers = {"Sec-Fetch-Site": "same-origin"}
    with httpx.Client(base_url=f"{stage.url}/api/", headers=headers, timeout=30, trust_env=False) as client:
        assert client.post("session", json={"token": stage.new_token()}).status_code == 204
        yield client


def eventually(check: Callable[[], bool], within_s: float = 20.0) -> None:
    """Poll until the condition holds."""
    deadline = time.monotonic() + within_s
    while not check():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.05)
