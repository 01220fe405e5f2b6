"""Several cores: a process each, with a directory and a share of the disk of its own, on the same ports."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Final

from penstock.cli.failure import ExitCode
from penstock.collector import Plan

__all__ = ["run_cores"]

_LOG = logging.getLogger(__name__)
_LOOK_S: Final = 0.2
_RESTART_S: Final = 1.0
_GRACE_S: Final = 30.0
"""Beyond the time that deliveries get, for closing the stores."""


class _Core:
    """One process; started again when it ends by itself."""

    def __init__(self, core_id: int, command: Sequence[str]) -> None:
        self._core_id = core_id
        self._command = [*command, "--core", str(core_id)]
        self._started_s = 0.0
        self._process = self._start()
        self.is_up = True

    def _start(self) -> subprocess.Popen[bytes]:
        self._started_s = time.monotonic()
        return subprocess.Popen(self._command)

    def look(self) -> int | None:
        """Start it again if it died after it had been up for a while; else the code it ended with.

        One that was killed is started again in any case: that says nothing about its settings.
        """
        code = self._process.poll()
        if code is None:
            return None
        is_new = time.monotonic() - self._started_s < _RESTART_S
        if is_new and code < 0:
            return None  # it is started again as soon as it is not new any more
        if is_new:
            self.is_up = False
            return code
        how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
        _LOG.error("core %d %s and is started again", self._core_id, how)
        self._process = self._start()
        return None

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float) -> int:
        try:
            return self._process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def run_cores(plan: Plan, arguments: Sequence[str]) -> int:
    """Run every core until SIGTERM or Ctrl-C. One that dies is started again; one that cannot start ends all.

    A core that is killed while it starts counts as one that dies.

    The code is 0 when all of them stopped in order.
    """
    stopping = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopping
        if stopping:
            for core in cores:
                core.stop()
        stopping = True

    cores: list[_Core] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    command = [sys.executable, "-m", "penstock.cli", *arguments]
    cores += [_Core(core_id, command) for core_id in range(plan.cores)]
    failed = 0
    while not stopping and not failed:
        time.sleep(_LOOK_S)
        failed = next((code for core in cores if (code := core.look())), 0)
    for core in cores:
        core.stop()
    deadline_s = time.monotonic() + plan.drain_timeout_s + _GRACE_S
    codes = [core.wait(deadline_s - time.monotonic()) for core in cores]
    return failed or (ExitCode.OK if not any(codes) else ExitCode.PROBLEM)
