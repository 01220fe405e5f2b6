"""A fleet of small real processes: their output, their exits, and their stops."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.servers import free_ports

from penstock.child_process import AsyncChild, Lines
from penstock.up import Fleet, PartState, PartStatus, Plan, UpSettings, lifecycle, runner
from penstock.up.parts import Layout, PartPlan, Probe
from penstock.up.status import FleetMap, Level, PartKind

SCRIPT = """
import json, os, signal, subprocess, sys, time
mode = sys.argv[1]
def say(**event): print(json.dumps(event), flush=True)
if mode == "wrong":
    print("error: the port is not a number", file=sys.stderr)
    sys.exit(2)
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if mode == "flood":
    sys.stderr.write(f"2026-01-02 03:04:05,678 {sys.argv[2]} again\\n" * 5000)
    sys.stderr.flush()
if mode == "hostile":
    print('{"event":' + "[" * 4000, flush=True)
    sys.stderr.write("\\x1b[2J\\x9b31merror\\u202e\\n2026-01-02 03:04:05,678 ERROR \\x1b]0;mine\\x07\\n")
    sys.stderr.write("Traceback (most recent call last):\\n")
    sys.stderr.flush()
if mode == "parent":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    say(event="progress", child=child.pid)
if mode == "mute":
    import socket
    listening = socket.create_server(("127.0.0.1", int(sys.argv[2])))
    asking, _ = listening.accept()
    asking.recv(1000)
    asking.sendall(b"HTTP/1.1 200 OK\\r\\ncontent-length: 0\\r\\n\\r\\n")
    asking.close()
    while True:  # takes every question, and answers none
        asked = listening.accept()
if mode == "once" and not os.path.exists(sys.argv[2]):
    open(sys.argv[2], "w").close()
    sys.exit(7)
if mode == "dumb":
    time.sleep(600)
def trace():
    sys.stderr.write("Traceback (most recent call last):\\n  File \\"x.py\\", line 1, in f\\n")
    sys.stderr.write("BrokenPipeError: [Errno 32] Broken pipe\\n")
    sys.stderr.flush()
if mode == "killed":
    trace()
    os.kill(os.getpid(), signal.SIGKILL)
if mode == "secondary":
    say(event="restarting", message="Spark's Java was killed by signal 9; starting again in 1s")
    sys.stderr.write("error: Spark's Java was killed by signal 9\\n")
    trace()
    sys.stderr.write("the trace is written\\n")
    sys.stderr.flush()
    time.sleep(600)
say(event="progress", lag=3)
while mode == "lively":
    say(event="alive")
    time.sleep(0.05)
time.sleep(600)
"""


def part(name: str, *arguments: str, kind: PartKind = PartKind.RELAY, grace_s: float = 20.0) -> PartPlan:
    return PartPlan(name=name, kind=kind, arguments=arguments or (name,), grace_s=grace_s)


class Stage:
    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.stop, self.hurry = asyncio.Event(), asyncio.Event()
        self.changed = asyncio.Event()
        self.history: list[tuple[str, PartState]] = []
        fleet.subscribe(self._heard)

    def _heard(self, event: object) -> None:
        if isinstance(event, PartStatus):
            self.history.append((event.name, event.state))
        self.changed.set()

    def part(self, name: str) -> PartStatus:
        return next(status for status in self.fleet.parts() if status.name == name)

    async def until(self, fits: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not fits():
                self.changed.clear()
                await self.changed.wait()

    @property
    def texts(self) -> list[str]:
        return [line.text for line in self.fleet.log(limit=10_000)]


@asynccontextmanager
async def running(
    tmp_path: Path, *parts: PartPlan, disabled: Mapping[str, str] | None = None
) -> AsyncIterator[Stage]:
    script = tmp_path / "part.py"
    script.write_text(SCRIPT)
    layout = Layout(base=str(tmp_path), data_dir=str(tmp_path))
    plan = Plan(settings=UpSettings(), layout=layout, parts=parts, map=FleetMap(data_dir=str(tmp_path)))
    fleet = Fleet(plan, (sys.executable, "-I", str(script)), disabled=disabled)
    stage = Stage(fleet)
    task = asyncio.create_task(fleet.run(stage.stop, stage.hurry))
    try:
        yield stage
        stage.stop.set()
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_part_is_ready_when_it_reports_so_and_its_progress_is_kept(tmp_path: Path) -> None:
    async with running(tmp_path, part("good")) as stage:
        await stage.until(lambda: stage.part("good").state is PartState.READY)
        found = stage.part("good")
        assert found.progress == {"lag": 3}
        assert found.pid is not None
        os.kill(found.pid, 0)
        assert stage.fleet.not_ready() == []
    assert stage.part("good").state is PartState.STOPPED
    assert stage.part("good").pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(found.pid, 0)


async def test_a_part_with_wrong_settings_fails_with_its_reason_and_the_others_run(tmp_path: Path) -> None:
    async with running(tmp_path, part("wrong"), part("good")) as stage:
        await stage.until(lambda: stage.part("good").state is PartState.READY)
        await stage.until(lambda: stage.part("wrong").state is PartState.FAILED)
        found = stage.part("wrong")
        assert found.last_error == "the port is not a number"
        assert found.next_start_ms is not None
        assert [status.name for status in stage.fleet.not_ready()] == ["wrong"]
        assert any("its settings or its request are wrong" in text for text in stage.texts)
        # An operator who has corrected them need not wait.
        stage.fleet.try_again()
        await stage.until(lambda: stage.part("wrong").restarts == 1)


async def test_a_part_that_ends_is_restarted(tmp_path: Path) -> None:
    async with running(tmp_path, part("once", "once", str(tmp_path / "was-here"))) as stage:
        await stage.until(lambda: stage.part("once").state is PartState.READY)
        found = stage.part("once")
        assert (found.restarts, found.last_error) == (1, "ended unexpectedly (exit code 7)")


async def test_a_part_that_was_killed_has_that_as_its_last_error(tmp_path: Path) -> None:
    async with running(tmp_path, part("killed", kind=PartKind.PIPELINE)) as stage:
        await stage.until(
            lambda: any("was killed by signal 9 (SIGKILL); it is restarted" in text for text in stage.texts)
        )
        assert stage.part("killed").last_error == "was killed by signal 9 (SIGKILL)"


async def test_a_traceback_after_the_reason_of_a_failure_is_not_the_last_error(tmp_path: Path) -> None:
    async with running(tmp_path, part("secondary", kind=PartKind.PIPELINE)) as stage:
        await stage.until(lambda: "the trace is written" in stage.texts)
        assert "was killed by signal 9" in str(stage.part("secondary").last_error)
        assert any(text.startswith("BrokenPipeError") for text in stage.texts)


async def test_a_part_that_does_not_stop_is_killed_and_this_is_logged(tmp_path: Path) -> None:
    async with running(tmp_path, part("stubborn", grace_s=0.2)) as stage:
        await stage.until(lambda: stage.part("stubborn").state is PartState.READY)
    assert any("did not stop within 200ms and is killed" in text for text in stage.texts)


async def test_a_second_signal_does_not_wait_for_the_stages(tmp_path: Path) -> None:
    parts = [part("stubborn", kind=PartKind.RELAY), part("good", kind=PartKind.PIPELINE)]
    async with running(tmp_path, *parts) as stage:
        await stage.until(lambda: stage.part("stubborn").state is PartState.READY)
        stage.stop.set()
        await stage.until(lambda: stage.part("stubborn").state is PartState.STOPPING)
        assert stage.part("good").state is not PartState.STOPPING
        stage.hurry.set()
        await stage.until(lambda: stage.part("good").state is PartState.STOPPED)
        assert stage.part("stubborn").state is PartState.STOPPING


async def test_processes_stop_in_data_flow_order(tmp_path: Path) -> None:
    kinds = {"last": PartKind.VECTOR, "first": PartKind.COLLECTOR, "middle": PartKind.RELAY}
    parts = [part(name, "good", kind=kind) for name, kind in kinds.items()]
    async with running(tmp_path, *parts) as stage:
        await stage.until(lambda: stage.part("middle").state is PartState.READY)
    stopped = [name for name, state in stage.history if state is PartState.STOPPED]
    assert stopped == ["first", "middle", "last"]


@pytest.mark.parametrize("level", ["INFO", "ERROR"])
async def test_a_part_that_floods_the_log_is_limited_and_counted(tmp_path: Path, level: str) -> None:
    async with running(tmp_path, part("flood", "flood", level)) as stage:
        await stage.until(lambda: stage.part("flood").state is PartState.READY)
    lines = [line for line in stage.fleet.log(limit=10_000) if line.part == "flood"]
    shown = sum(line.text == "again" for line in lines)
    omitted = sum(int(line.text.split()[0]) for line in lines if "were omitted" in line.text)
    assert shown < 2000
    assert shown + omitted == 5000
    assert len(stage.history) < 2000, "nobody is told of every line"
    assert all(line.level is Level.WARNING for line in lines if "were omitted" in line.text)


async def test_the_children_of_a_killed_part_are_killed_too(tmp_path: Path) -> None:
    async with running(tmp_path, part("parent")) as stage:
        await stage.until(lambda: stage.part("parent").progress.get("lag") == 3)
        pid = stage.part("parent").pid
        assert pid is not None
        assert len(_members(pid)) == 2
        os.kill(pid, 9)
        await stage.until(lambda: stage.part("parent").restarts == 1)
        assert not _members(pid)


def _members(group: int) -> list[str]:
    return [entry.name for entry in Path("/proc").glob("[0-9]*") if _group(entry) == group]


def _group(entry: Path) -> int | None:
    try:
        fields = (entry / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[2]) if fields[0] != "Z" else None


async def test_a_part_that_stops_responding_is_killed_and_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "SILENT_MAX_S", 0.1)
    monkeypatch.setattr(runner, "_PROBE_S", 0.05)
    monkeypatch.setattr(runner, "PROBE_TIMEOUT_S", 0.1)
    (port,) = free_ports(1)
    mute = PartPlan(
        name="mute",
        kind=PartKind.VECTOR,
        arguments=("mute", str(port)),
        address=f"127.0.0.1:{port}",
        probe=Probe(path="/ready"),
    )
    async with running(tmp_path, mute) as stage:
        await stage.until(lambda: stage.part("mute").restarts == 1)
        assert "no longer responds and is killed" in stage.texts
        assert ("mute", PartState.NOT_READY) in stage.history


async def test_a_part_without_a_probe_that_falls_silent_is_killed_and_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "MUTE_MAX_S", 0.5)
    monkeypatch.setattr(runner, "_PROBE_S", 0.05)
    async with running(tmp_path, part("lively"), part("good")) as stage:
        await stage.until(lambda: stage.part("good").restarts == 1)
        assert "has been silent for 500ms and is killed" in stage.texts
        assert stage.part("lively").restarts == 0


async def test_a_part_that_hangs_during_its_start_is_killed_and_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "STARTING_MAX_S", 0.5)
    async with running(tmp_path, part("dumb")) as stage:
        await stage.until(lambda: stage.part("dumb").restarts == 1)
        assert "is not ready after 500ms and is killed" in stage.texts


async def test_a_disabled_part_is_listed_with_its_reason_and_does_not_run(tmp_path: Path) -> None:
    async with running(tmp_path, part("good"), part("off"), disabled={"off": "pip install it"}) as stage:
        await stage.until(lambda: stage.part("good").state is PartState.READY)
        found = stage.part("off")
        assert (found.state, found.disabled_why, found.pid) == (PartState.DISABLED, "pip install it", None)
        assert stage.fleet.not_ready() == []
    assert stage.part("off").state is PartState.DISABLED


async def test_a_part_that_cannot_be_started_does_not_affect_the_others(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    hindered = PartPlan(
        name="hindered",
        kind=PartKind.RELAY,
        arguments=("good",),
        port_file=str(tmp_path / "file" / "address"),
    )
    async with running(tmp_path, hindered, part("good")) as stage:
        await stage.until(lambda: stage.part("good").state is PartState.READY)
        await stage.until(lambda: stage.part("hindered").state is PartState.RESTARTING)
        assert stage.part("hindered").last_error == "cannot be started: Not a directory"
        assert stage.part("good").state is PartState.READY


async def test_any_output_of_a_part_is_text_and_does_not_stop_it(tmp_path: Path) -> None:
    async with running(tmp_path, part("hostile")) as stage:
        await stage.until(lambda: stage.part("hostile").state is PartState.READY)
        await stage.until(lambda: "Traceback (most recent call last):" in stage.texts)
        (error,) = [
            line.text for line in stage.fleet.log() if line.text.endswith("0;mine\N{REPLACEMENT CHARACTER}")
        ]
        assert all(text.isprintable() for text in stage.texts)
        assert error.isprintable()


async def test_the_pid_of_an_ended_process_is_never_signalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = await AsyncChild.start(
        [sys.executable, "-c", ""], os.environ, output=Lines(print), errors=Lines(print)
    )
    assert (await ended.wait()).code == 0

    def refuse(pid: int, number: int) -> None:
        raise AssertionError(f"signal {number} to {pid}, which may be anybody")

    monkeypatch.setattr(os, "kill", refuse)
    monkeypatch.setattr(os, "killpg", refuse)
    ended.terminate()
    ended.kill()
