"""Child processes: how they end, which processes are killed with them, and what they read."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.child_process import AsyncChild, ChildProcess, Exit, Tail

DEADLINE_S = 20.0
STUBBORN = (
    "import signal, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "print('ready', flush=True)\n"
    "time.sleep(60)\n"
)
PARENT = (
    "import subprocess, sys, time\n"
    "started = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], stdout=sys.stderr)\n"
    "print(started.pid, flush=True)\n"
    "time.sleep({seconds})\n"
)


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pid: int) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while runs(pid):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def first_line(child: ChildProcess) -> bytes:
    output = child.streams[1]
    assert output is not None
    with output:
        return output.readline()


@pytest.mark.parametrize(
    ("returncode", "reason"),
    [
        (0, "ended with exit code 0"),
        (3, "ended with exit code 3"),
        (-9, "was killed by signal 9 (SIGKILL)"),
        (-15, "was killed by signal 15 (SIGTERM)"),
        (-40, "was killed by signal 40"),
    ],
)
def test_the_reason_of_an_exit_names_the_code_or_the_signal(returncode: int, reason: str) -> None:
    assert Exit.of(returncode).reason == reason


def test_a_process_that_ignores_the_stop_is_killed_at_the_deadline() -> None:
    child = ChildProcess.start(python(STUBBORN), stdout=subprocess.PIPE)
    assert first_line(child) == b"ready\n"
    child.terminate()
    assert child.wait_for(0.1) is None
    assert child.finish(0.1) == Exit(signal=9)
    assert child.poll() == Exit(signal=9)


def test_a_process_that_stops_in_time_is_not_killed() -> None:
    child = ChildProcess.start(python("import time; time.sleep(60)"))
    child.terminate()
    assert child.finish(DEADLINE_S) == Exit(signal=15)


def test_a_process_that_has_ended_is_never_signalled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    child = ChildProcess.start(python(""))
    assert child.wait() == Exit(code=0)

    def refuse(*arguments: object) -> None:
        raise AssertionError("the number may belong to another process")

    monkeypatch.setattr(os, "kill", refuse)
    monkeypatch.setattr(os, "killpg", refuse)
    child.terminate()
    child.kill()
    assert child.wait() == Exit(code=0)


def test_a_kill_reaches_the_processes_that_the_child_has_started() -> None:
    child = ChildProcess.start(python(PARENT.format(seconds=60)), stdout=subprocess.PIPE)
    started = int(first_line(child))
    child.kill()
    assert child.wait() == Exit(signal=9)
    wait_until_gone(started)


def test_without_its_own_session_a_kill_ends_only_the_child() -> None:
    child = ChildProcess.start(python("import time; time.sleep(60)"), own_session=False)
    child.kill()
    assert child.wait() == Exit(signal=9)


@pytest.mark.parametrize("kill_group", [True, False])
async def test_the_children_of_an_ended_child_are_killed_only_with_kill_group(kill_group: bool) -> None:
    output = Tail(100)
    child = await AsyncChild.start(
        python(PARENT.format(seconds=0)), os.environ, output=output, kill_group=kill_group
    )
    assert await child.wait() == Exit(code=0)
    left = int(output.text)
    if kill_group:
        wait_until_gone(left)
    else:
        assert runs(left)
        os.kill(left, 9)


async def test_a_child_reads_its_input_to_the_end() -> None:
    output = Tail(1 << 21)
    data = os.urandom(1 << 20)
    program = "import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())"
    child = await AsyncChild.start(python(program), os.environ, output=output, input=data)
    assert await child.wait() == Exit(code=0)
    assert output.text.strip() == hashlib.sha256(data).hexdigest()


async def test_a_child_that_does_not_read_its_input_still_ends() -> None:
    child = await AsyncChild.start(python(""), os.environ, input=bytes(1 << 20))
    assert await child.wait() == Exit(code=0)
