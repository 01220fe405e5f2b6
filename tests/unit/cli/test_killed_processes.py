"""Processes that a command has started and that are killed: said so, and not taken for wrong settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli.collector import _RESTART_S, _CoreProcess
from penstock.cli.demo.run import _failed

KILLED = ["/bin/sh", "-c", "kill -9 $$"]


def ended(*command: str) -> _CoreProcess:
    core = _CoreProcess(3, command)
    core._process.wait()
    return core


def test_a_core_that_is_killed_while_it_starts_is_started_again(caplog: pytest.LogCaptureFixture) -> None:
    core = ended(*KILLED)
    assert core.look() is None
    assert core.is_up
    first = core._process.pid
    core._started_s -= _RESTART_S
    assert core.look() is None
    assert core._process.pid != first
    core._process.wait()
    assert "core 3 was killed by signal 9 and is started again" in caplog.text


def test_a_core_that_ends_while_it_starts_ends_all() -> None:
    assert ended("/bin/sh", "-c", "exit 2").look() == 2


def test_the_demo_says_which_signal_has_killed_a_process(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text("error: something from before\n")
    assert str(_failed("the pipeline", -9, log)) == f"the pipeline was killed by signal 9; its log is {log}"
    assert "ended with code 3: something from before" in str(_failed("the pipeline", 3, log))
