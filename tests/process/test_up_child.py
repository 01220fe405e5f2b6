"""A command that the console runs, and a fleet that is killed meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.process.cli_runner import environment

SCRIPT = """
import asyncio
import os
from penstock.up import run_command
asyncio.run(run_command(["topics", "serve"], print, os.environ))
"""
LEAVING_S = 20.0


def children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for one in listed for child in one.read_text().split()]


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_command_ends_with_whoever_started_it_however_that_ends(tmp_path: Path) -> None:
    port_file = tmp_path / "address"
    environ = environment(
        TOPICS_PORT="0", TOPICS_DATA_DIR=str(tmp_path / "topics"), TOPICS_PORT_FILE=str(port_file)
    )
    with subprocess.Popen([sys.executable, "-c", SCRIPT], env=environ) as parent:
        try:
            deadline = time.monotonic() + 60
            while not port_file.exists():
                assert parent.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
            (child,) = children(parent.pid)
        finally:
            parent.kill()
    deadline = time.monotonic() + LEAVING_S
    try:
        while runs(child):
            assert time.monotonic() < deadline, "it outlives whoever started it"
            time.sleep(0.05)
    finally:
        if runs(child):
            os.kill(child, signal.SIGKILL)
