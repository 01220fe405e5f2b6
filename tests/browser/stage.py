"""`tests.console_stage` as a separate process, which is controlled line by line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.process.cli_runner import SRC, environment

__all__ = ["StageProcess", "staged"]


class StageProcess:
    """A running stage. Orders: see `tests.console_stage`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.first_url = str(self._answer()["url"])
        self.page = self.first_url.partition("#")[0]

    def order(self, *lines: str) -> dict[str, object]:
        """Send the orders together, and return the response to the last one."""
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write("".join(f"{line}\n" for line in lines))
        stdin.flush()
        return [self._answer() for _ in lines][-1]

    def url(self) -> str:
        """Return an address with a new one-time token."""
        return str(self.order("url")["url"])

    def _answer(self) -> dict[str, object]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the stage ended"
        found: dict[str, object] = json.loads(line)
        assert "error" not in found, found
        return found


@contextmanager
def staged(folder: Path, *options: str) -> Iterator[StageProcess]:
    """Run a stage on a folder until the end of the block."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "stage.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.console_stage", "--dir", str(folder / "data"), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=SRC.parent,
            env=environment(),
        )
    try:
        yield StageProcess(process)
    finally:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.wait(60)
        process.stdout.close()
