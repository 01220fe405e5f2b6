"""The processes of the demo: started, killed in the middle of their work, and none left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from penstock.cli.demo_plan import Plan
from penstock.errors import PenstockError
from penstock.storage import data_modes

__all__ = ["Crew", "DemoFailed", "crew_of", "session_members"]

_LEAVING_S: Final = 10.0
_QUICK_JAVA: Final = "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""For a Java that lives a minute: quick to start rather than quick in the long run."""
_STOPPED: Final = (0, 128 + signal.SIGTERM)


class DemoFailed(PenstockError):
    """A process of the demo ended by itself, or nothing moved any more."""


class Crew:
    """The producers and the pipeline's driver, and how often each was killed."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._producers: dict[int, subprocess.Popen[bytes]] = {}
        self._driver: subprocess.Popen[bytes] | None = None
        self._sessions: list[int] = []
        self.producer_kills = 0
        self.driver_kills = 0

    def start_producer(self, number: int) -> None:
        """Start it, or start it again where its journal ends."""
        plan = self._plan
        arguments = ["penstock.cli.demo_worker", "--store", plan.queue, "--producer", str(number)]
        arguments += ["--journal", str(plan.journal(number)), "--release", str(plan.release)]
        arguments += ["--records", str(plan.records), "--rate", str(plan.rate)]
        arguments += ["--since-ms", str(plan.since_ms)]
        self._producers[number] = self._start(f"producer-{number}", arguments)

    def start_driver(self) -> None:
        """`penstock run`: the same command that people use."""
        arguments = ["penstock.cli", "run", str(self._plan.pipeline_file), "--conf", _QUICK_JAVA]
        self._driver = self._start("run", arguments)

    def _start(self, name: str, arguments: list[str]) -> subprocess.Popen[bytes]:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        with open(data_modes().new_file(str(self._plan.log(name)), flags), "ab") as log:
            started = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "SPARK_LOCAL_DIRS": str(self._plan.folder / "spark")},
                start_new_session=True,  # a Ctrl-C is for the demo, which then ends them
            )
        self._sessions.append(started.pid)
        return started

    def kill_producer(self, number: int) -> bool:
        """SIGKILL, unless it has ended."""
        if self._producers[number].poll() is not None:
            return False
        _kill_group(self._producers[number])
        self.producer_kills += 1
        return True

    def kill_driver(self) -> None:
        """SIGKILL to the whole process group: the driver, and the Java it has started."""
        assert self._driver is not None
        _kill_group(self._driver)
        self.driver_kills += 1

    def stop_driver(self) -> None:
        """Ask it to stop, as a service manager would."""
        assert self._driver is not None
        self._driver.send_signal(signal.SIGTERM)

    @property
    def driver_stopped(self) -> bool:
        """Whether it has ended as it should when it is asked to stop. Raises `DemoFailed` if otherwise."""
        assert self._driver is not None
        code = self._driver.poll()
        if code not in (None, *_STOPPED):
            raise _failed("the pipeline", code, self._plan.log("run"))
        return code is not None

    @property
    def producing(self) -> bool:
        return any(process.poll() is None for process in self._producers.values())

    def check(self) -> None:
        """Raises `DemoFailed` if a process ended that should not have."""
        for number, process in self._producers.items():
            code = process.poll()
            if code not in (None, 0):
                raise _failed(f"producer {number}", code, self._plan.log(f"producer-{number}"))
        if self._driver is not None and self._driver.poll() is not None:
            raise _failed("the pipeline", self._driver.returncode, self._plan.log("run"))

    def end(self) -> None:
        """End everything that is left, Spark's Python workers included, which have a group of their own."""
        for process in [*self._producers.values(), *([self._driver] if self._driver else [])]:
            if process.poll() is None:
                _kill_group(process)
        deadline = time.monotonic() + _LEAVING_S
        while (left := session_members(self._sessions)) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _failed(name: str, code: int | None, log: Path) -> DemoFailed:
    if code is not None and code < 0:
        return DemoFailed(f"{name} was killed by signal {-code}; its log is {log}")
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error:")]
    return DemoFailed(f"{name} ended with code {code}{f': {told[-1]}' if told else ''}; its log is {log}")


def session_members(sessions: list[int]) -> list[int]:
    """The processes of these sessions that still run; none where the system does not tell (no /proc)."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        if int(fields[3]) in sessions and fields[0] != "Z":
            found.append(int(entry.parent.name))
    return found


@contextmanager
def crew_of(plan: Plan) -> Iterator[Crew]:
    """A crew that does not outlive the block."""
    crew = Crew(plan)
    try:
        yield crew
    finally:
        crew.end()
