"""Runs parts as child processes: starts, monitors, restarts and stops them. Also runs single commands."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.child_process import AsyncChild, Exit, Lines, Tail
from penstock.clock import Clock
from penstock.units import format_duration
from penstock.up import lifecycle
from penstock.up.lifecycle import Action, ProbeResult, ProcessState
from penstock.up.log import LogBuffer, LogFilter, OutputLine, event_of
from penstock.up.parts import TOPICS_URL, PartPlan, Probe, reachable
from penstock.up.status import Level, PartKind, PartState, PartStatus

PART_COMMAND: Final = (sys.executable, "-m", "penstock.cli.part")
"""Runs the following arguments as `penstock` does, and ends with its parent."""
PROBE_TIMEOUT_S: Final = 5.0
_OK: Final = 200
_PROBE_SOON_S: Final = 0.2
_PROBE_S: Final = 2.0
_HURRY_S: Final = 5.0
_LATE_S: Final = 5.0
"""If a sleep ends this late, the process itself was suspended."""
_READY_EVENTS: Final = {
    PartKind.COLLECTOR: "ready",
    PartKind.RELAY: "progress",
    PartKind.PIPELINE: "started",
}
_ALIVE_EVENTS: Final = frozenset({"alive", "progress"})
"""Heartbeats of a part without a probe, sent even when it is idle or busy with a long batch."""
_QUIET_EVENTS: Final = frozenset({"progress", "batch"})
"""Events too frequent for the log; the part's status shows the last one."""
_GOOD_ENDS: Final = (0, 130, 143)
_NOT_STARTED: Final = 127
_OUTPUT_BYTES_MAX: Final = 4 << 20
_ERROR_LINES: Final = 50
_ERROR_LINE_MAX: Final = 1 << 20


class Runner:
    """Runs one part, entirely in the event loop's thread."""

    def __init__(
        self,
        plan: PartPlan,
        command: Sequence[str],
        log_buffer: LogBuffer,
        *,
        clock: Clock,
        rng: random.Random,
        topics_address: Callable[[], str | None],
        disabled_why: str | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self.plan = plan
        self._command = command
        self._log_buffer = log_buffer
        self._clock = clock
        self._rng = rng
        self._topics_address = topics_address
        self._disabled_why = disabled_why
        self._environ = environ
        self._lifecycle = lifecycle.initial_state(clock.monotonic(), enabled=disabled_why is None)
        self._since_ms = clock.now_ms()
        self._child: AsyncChild | None = None
        self._address: str | None = None
        self._error: tuple[str, int] | None = None
        self._error_count = 0
        self._has_verdict = False
        self._hung = False
        self._progress: Mapping[str, object] = {}
        self._log_filter = LogFilter()
        self._wake = asyncio.Event()
        self._over = asyncio.Event()
        self._stopping: asyncio.Task[None] | None = None

    @property
    def status(self) -> PartStatus:
        process, now_s = self._lifecycle, self._clock.monotonic()
        waits_s = None if process.next_start_s is None else max(0.0, process.next_start_s - now_s)
        is_waiting = waits_s is not None and process.state in (PartState.RESTARTING, PartState.FAILED)
        return PartStatus(
            name=self.plan.name,
            kind=self.plan.kind,
            state=process.state,
            since_ms=self._since_ms,
            pid=self._child.pid if self._child is not None else None,
            restarts=process.restarts,
            next_start_ms=self._clock.now_ms() + int(1000 * (waits_s or 0.0)) if is_waiting else None,
            last_error=self._error[0] if self._error else None,
            last_error_ms=self._error[1] if self._error else None,
            address=self._address,
            disabled_why=self._disabled_why,
            progress=self._progress,
        )

    @property
    def address(self) -> str | None:
        return self._address

    async def live(self) -> None:
        """Run the part until it is stopped."""
        try:
            while await self._is_due():
                child = await self._start()
                if child is not None:
                    await self._supervise(child)
        finally:
            self._over.set()

    async def _is_due(self) -> bool:
        """Wait until the part is due to start. Return False if it never will be."""
        while not self._lifecycle.is_over:
            now_s = self._clock.monotonic()
            is_due = lifecycle.next_action(self._lifecycle, now_s) is Action.START
            if is_due and not (self.plan.needs_topics and self._topics_address() is None):
                return True
            at_s = self._lifecycle.next_start_s
            wait_s = None if at_s is None else max(_PROBE_SOON_S if is_due else 0.0, at_s - now_s)
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
        return False

    async def _start(self) -> AsyncChild | None:
        try:
            self._forget_run()
            child = await AsyncChild.start(
                [*self._command, *self._arguments()],
                {**self._environ, **self.plan.environment},
                output=Lines(self._on_output),
                errors=Lines(self._on_error_output),
            )
        except OSError as error:
            self._on_failure(f"cannot be started: {error.strerror or error}", Exit(code=None))
            return None
        if self._lifecycle.is_over:  # it was stopped during the start
            child.kill()
            await child.wait()
            return None
        self._child = child
        self._log_buffer.say(self.plan.name, Level.DEBUG, f"runs as process {child.pid}")
        self._set(lifecycle.on_start(self._lifecycle, self._clock.monotonic()))
        self._publish()
        return child

    def _forget_run(self) -> None:
        """Reset the state of the previous process."""
        self._address = self.plan.address
        self._progress = {}
        self._log_filter = LogFilter()
        self._error_count = 0
        self._has_verdict = False
        self._hung = False
        if self.plan.port_file is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.plan.port_file)

    def _arguments(self) -> list[str]:
        url = f"http://{reachable(self._topics_address() or '')}"
        return [url if argument == TOPICS_URL else argument for argument in self.plan.arguments]

    async def _supervise(self, child: AsyncChild) -> None:
        probing = asyncio.create_task(self._keep_probing(child))
        try:
            how = await child.wait()
        except asyncio.CancelledError:
            child.kill()
            raise
        finally:
            probing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await probing
            self._log_lines(self._log_filter.release())
            self._child = None
            self._progress = {}
            if self.plan.address is None:
                self._address = None
        self._on_exit(how)

    async def _keep_probing(self, child: AsyncChild) -> None:
        """Probe the process until it ends. Kill it if it hangs."""
        while True:
            wait_s = _PROBE_S if self._lifecycle.state is PartState.READY else _PROBE_SOON_S
            due_s = self._clock.monotonic() + wait_s
            await self._clock.sleep(wait_s)
            if self._clock.monotonic() - due_s > _LATE_S:
                self._set(lifecycle.excuse_silence(self._lifecycle, self._clock.monotonic()))
            self._log_lines(self._log_filter.overdue(self._clock.monotonic()))
            if self._address is None and self.plan.port_file is not None:
                self._look_for_address(self.plan.port_file)
            if self.plan.probe is not None and self._address is not None:
                answer = await ask(self._address, self.plan.probe)
                self._set(lifecycle.on_probe(self._lifecycle, answer, self._clock.monotonic()))
            if why := lifecycle.hang_reason(self._lifecycle, self._clock.monotonic()):
                self._log_error(why)
                self._hung = True
                child.kill()
                return

    def _look_for_address(self, port_file: str) -> None:
        with contextlib.suppress(OSError):
            text = Path(port_file).read_text(encoding="ascii").strip()
            if text:
                self._address = text
                self._publish()

    def _on_output(self, line: str) -> None:
        event = event_of(line)
        if event is None:
            if line.strip():
                self._log_buffer.hear(self.plan.name, OutputLine(Level.INFO, line))
            return
        name, now_s = str(event["event"]), self._clock.monotonic()
        if name == "progress":
            self._progress = {key: value for key, value in event.items() if key != "event"}
        if self.plan.probe is None and name in _ALIVE_EVENTS:
            self._set(lifecycle.on_heartbeat(self._lifecycle, now_s))
        if self.plan.probe is None and name == _READY_EVENTS.get(self.plan.kind):
            self._set(lifecycle.on_ready(self._lifecycle, now_s))
        if name == "restarting":
            self._set(lifecycle.on_trouble(self._lifecycle, now_s))
        self._log_event(name, event)
        if name == "progress":
            self._publish()

    def _log_event(self, name: str, event: Mapping[str, object]) -> None:
        error = event.get("error")
        if isinstance(error, str) or name in ("failed", "restarting"):
            text = error if isinstance(error, str) else event.get("message")
            self._log_line(OutputLine(Level.ERROR, str(text or name), is_verdict=True))
        elif isinstance(message := event.get("message"), str) and name not in _QUIET_EVENTS:
            self._log_line(OutputLine(Level.INFO, message))

    def _on_error_output(self, line: str) -> None:
        if line.strip():
            self._log_lines(self._log_filter.hear(line, self._clock.monotonic()))

    def _log_lines(self, lines: Sequence[OutputLine]) -> None:
        for line in lines:
            self._log_line(line)

    def _log_line(self, line: OutputLine) -> None:
        if line.level >= Level.ERROR:
            self._error_count += 1
        if line.level >= Level.ERROR and self._is_news(line):
            self._has_verdict = line.is_verdict
            self._error = (self._log_buffer.shown(line.text), self._clock.now_ms())
        if self._log_buffer.hear(self.plan.name, line) and line.level >= Level.ERROR:
            self._publish()

    def _is_news(self, line: OutputLine) -> bool:
        """Return whether a line replaces the last error; a traceback after a stated error does not."""
        return line.is_verdict or not self._has_verdict or self._lifecycle.state is PartState.READY

    def _on_exit(self, how: Exit) -> None:
        if self._lifecycle.state is PartState.STOPPING:
            self._set(lifecycle.on_exit(self._lifecycle, how, self._clock.monotonic(), self._rng))
            is_good = how.code in _GOOD_ENDS or how.signal == signal.SIGTERM
            level = Level.INFO if is_good else Level.WARNING
            self._log_buffer.say(self.plan.name, level, f"stopped ({how})")
            return
        self._on_failure(f"was {how}" if how.signal is not None else f"ended unexpectedly ({how})", how)

    def _on_failure(self, what: str, how: Exit) -> None:
        now_s = self._clock.monotonic()
        self._set(lifecycle.on_exit(self._lifecycle, how, now_s, self._rng))
        at_s = self._lifecycle.next_start_s
        then = "is not restarted" if at_s is None else f"is restarted in {_wait(at_s - now_s)}"
        why = lifecycle.failure_reason(how)
        text = f"{what}{f': {why}' if why else ''}"
        if not self._error_count or (how.signal is not None and not self._hung):
            self._error = (text, self._clock.now_ms())
        self._log_buffer.say(self.plan.name, Level.ERROR, f"{text}; it {then}")
        self._publish()

    def _log_error(self, text: str) -> None:
        self._error_count += 1
        self._error = (text, self._clock.now_ms())
        self._log_buffer.say(self.plan.name, Level.ERROR, text)

    def try_again(self) -> None:
        """Start the part now if it waits for a restart or has failed."""
        self._set(lifecycle.try_again(self._lifecycle, self._clock.monotonic()))
        self._wake.set()

    async def stop(self, hurry: asyncio.Event) -> None:
        """Stop the part and wait until it has ended. A second call waits for the first."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(hurry))
        await asyncio.shield(self._stopping)

    async def _stop(self, hurry: asyncio.Event) -> None:
        self._set(lifecycle.on_stop_request(self._lifecycle, self._clock.monotonic()))
        self._wake.set()
        child = self._child
        if child is not None:
            child.terminate()
            if not await self._is_over_within(self.plan.grace_s, hurry):
                if hurry.is_set():
                    child.terminate()
                if not hurry.is_set() or not await self._is_over_within(_HURRY_S, None):
                    grace_s = _HURRY_S if hurry.is_set() else self.plan.grace_s
                    self._log_error(f"did not stop within {_wait(grace_s)} and is killed")
                    child.kill()
        await self._over.wait()

    async def _is_over_within(self, grace_s: float, hurry: asyncio.Event | None) -> bool:
        """Return whether the part ends in time; return False as soon as `hurry` is set."""
        over = asyncio.create_task(self._over.wait())
        events = [over, *([asyncio.create_task(hurry.wait())] if hurry is not None else [])]
        try:
            await asyncio.wait(events, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
            return self._over.is_set()
        finally:
            for event in events:
                event.cancel()

    def _set(self, process: ProcessState) -> None:
        before, self._lifecycle = self._lifecycle, process
        if process.state is before.state:
            return
        self._since_ms = self._clock.now_ms()
        if process.state is PartState.READY:
            where = f" on {self._address}" if self._address else ""
            self._log_buffer.say(self.plan.name, Level.INFO, f"ready{where}")
        elif process.state is PartState.NOT_READY:
            self._log_buffer.say(self.plan.name, Level.WARNING, "runs but is not ready")
        self._publish()

    def _publish(self) -> None:
        self._log_buffer.changed(self.status)


def _wait(seconds: float) -> str:
    return format_duration(max(0.0, round(seconds, 1)))


async def ask(address: str, probe: Probe) -> ProbeResult:
    """Return the result of a probe: `SILENT` if the address cannot be reached."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            status = await _status(reachable(address), probe)
    except (OSError, TimeoutError, ValueError):
        return ProbeResult.SILENT
    return ProbeResult.READY if status == _OK else ProbeResult.NOT_READY


async def _status(address: str, probe: Probe) -> int:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    try:
        key = f"Authorization: Bearer {probe.key.reveal()}\r\n" if probe.key else ""
        head = f"GET {probe.path} HTTP/1.1\r\nHost: {address}\r\n{key}Connection: close\r\n\r\n"
        writer.write(head.encode("ascii"))
        line = await reader.readline()
        return int(line.split()[1]) if line.startswith(b"HTTP/1.") else 0
    except IndexError:
        return 0
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandOutcome:
    """The result of a command."""

    exit_code: int
    """The exit code, or the negative number of the signal that killed the command."""
    output: str
    """The last part of its standard output."""
    errors: str
    """The last part of its standard error."""


async def run_command(
    arguments: Sequence[str], tell: Callable[[str], None], environment: Mapping[str, str]
) -> CommandOutcome:
    """Run `penstock ARGUMENTS…` to completion; call `tell` with each line of its standard error.

    Cancellation, or the end of this process, kills the command. The last 4 MiB of standard output are kept.
    A command that cannot be started has exit code 127.
    """
    errors: deque[str] = deque(maxlen=_ERROR_LINES)

    def on_line(text: str) -> None:
        if line := text.rstrip():
            errors.append(line)
            tell(line)

    output = Tail(_OUTPUT_BYTES_MAX)
    lines = Lines(on_line, _ERROR_LINE_MAX)
    try:
        child = await AsyncChild.start([*PART_COMMAND, *arguments], environment, output=output, errors=lines)
    except OSError as error:
        return CommandOutcome(exit_code=_NOT_STARTED, output="", errors=str(error))
    try:
        how = await child.wait()
    except asyncio.CancelledError:
        child.kill()
        await child.wait()
        raise
    code = -how.signal if how.signal is not None else how.code
    assert code is not None
    return CommandOutcome(exit_code=code, output=output.text, errors="\n".join(errors))
