"""Killed child processes of commands are reported as killed, not as wrong settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.child_process import Exit
from penstock.cli.collector import _RESTART_S, CoreProcess
from penstock.cli.demo.run import failure_of

KILLED = ["/bin/sh", "-c", "kill -9 $$"]


def ended(*command: str) -> CoreProcess:
    core = CoreProcess(3, command)
    core.child.wait()
    return core


def test_a_core_that_is_killed_during_its_start_is_restarted(caplog: pytest.LogCaptureFixture) -> None:
    core = ended(*KILLED)
    assert core.check() is None
    first = core.child.pid
    core.started_s -= _RESTART_S
    assert core.check() is None
    assert core.child.pid != first
    core.child.wait()
    assert "core 3 was killed by signal 9 (SIGKILL) and is restarted" in caplog.text


def test_a_core_that_fails_during_its_start_stops_all() -> None:
    assert ended("/bin/sh", "-c", "exit 2").check() == 2


def test_the_demo_reports_which_signal_killed_a_process(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text("error: something from before\n")
    assert (
        str(failure_of("the pipeline", Exit(signal=9), log))
        == f"the pipeline was killed by signal 9 (SIGKILL); its log is {log}"
    )
    assert "ended with exit code 3: something from before" in str(
        failure_of("the pipeline", Exit(code=3), log)
    )
