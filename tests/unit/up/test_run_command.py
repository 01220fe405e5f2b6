"""A command as a child process: its output, its exit, and its end after a cancellation."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from penstock.up import run_command, runner


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands are Python programs."""
    monkeypatch.setattr(runner, "PART_COMMAND", (sys.executable, "-c"))


@pytest.mark.usefixtures("script")
async def test_an_outcome_has_the_end_of_the_output() -> None:
    told: list[str] = []
    program = (
        "import sys; print('x' * 5_000_000 + 'end'); print('one \\n\\ntwo', file=sys.stderr); sys.exit(3)"
    )
    outcome = await run_command([program], told.append, os.environ)
    assert outcome.exit_code == 3
    assert len(outcome.output) == 4 << 20
    assert outcome.output.endswith("xend\n")
    assert (outcome.errors, told) == ("one\ntwo", ["one", "two"])


@pytest.mark.usefixtures("script")
async def test_a_killed_command_has_the_negative_signal_as_exit_code() -> None:
    program = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert (await run_command([program], print, os.environ)).exit_code == -9


async def test_a_command_that_cannot_be_started_has_an_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "PART_COMMAND", ("/no/such/program",))
    outcome = await run_command([], print, os.environ)
    assert (outcome.exit_code, outcome.output) == (127, "")
    assert "/no/such/program" in outcome.errors


@pytest.mark.usefixtures("script")
async def test_a_cancelled_command_is_killed_with_its_children(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys, time\n"
        "started = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(started.pid, file=sys.stderr, flush=True)\n"
        "time.sleep(60)\n"
    )
    told: asyncio.Queue[str] = asyncio.Queue()
    running = asyncio.create_task(run_command([program], told.put_nowait, os.environ))
    pid = int(await told.get())
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    async with asyncio.timeout(20):
        while _runs(pid):  # noqa: ASYNC110 - only the kernel knows
            await asyncio.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
