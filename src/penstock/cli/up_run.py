"""The process of `penstock up`: its parts, the console, the probes and the log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Final, TextIO

import click
import msgspec

from penstock.cli.output import LineWriter, time_text
from penstock.clock import SYSTEM_CLOCK
from penstock.errors import Unavailable
from penstock.up import (
    OWN_NAME,
    PART_COMMAND,
    Fleet,
    FleetEvent,
    FleetMap,
    Level,
    LogLine,
    PartKind,
    PartState,
    PartStatus,
    Plan,
    Prepared,
    address_of,
    missing_extra,
    reachable,
    scratch_of_spark,
)

if TYPE_CHECKING:
    from penstock.http import Request

_CONSOLE: Final = "console"
_DRAIN_S: Final = 2.0
_COLOURS: Final = {Level.DEBUG: "bright_black", Level.WARNING: "yellow", Level.ERROR: "red"}
_WIDTH: Final = 16


def run_fleet(prepared: Prepared, printer: LogPrinter) -> None:
    """Run every part until SIGTERM or Ctrl-C. The caller holds the lock of the data directory."""
    os.environ.setdefault("SPARK_LOCAL_DIRS", scratch_of_spark(prepared.plan))
    with asyncio.Runner() as runner:
        runner.run(_Up(prepared, printer).run())


def _host_check(host: str, names: tuple[str, ...]) -> Callable[[Request], None]:
    """Return the console's check of a request's host name."""
    from penstock.console import Access
    from penstock.http import Keyring
    from penstock.servers import is_loopback

    access = Access(Keyring(()), SYSTEM_CLOCK, host=host, is_loopback=is_loopback(host), names=names)
    return access.check_host


class _Own(logging.Handler):
    """Forwards the log records of this process, mainly the console's, to the fleet's log."""

    def __init__(self, fleet: Fleet, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._fleet = fleet
        self._loop = loop

    def emit(self, record: logging.LogRecord) -> None:
        level = max((level for level in Level if level <= record.levelno), default=Level.DEBUG)
        with contextlib.suppress(RuntimeError):  # the loop is closed: the fleet has ended
            self._loop.call_soon_threadsafe(self._fleet.say, self.format(record), level)


class _Up:
    def __init__(self, prepared: Prepared, printer: LogPrinter) -> None:
        self._prepared = prepared
        self._printer = printer
        self._fleet = Fleet(prepared.plan, PART_COMMAND, disabled=prepared.disabled)
        self._fleet.subscribe(printer)
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self) -> None:
        self._catch_signals()
        logging.basicConfig(level=logging.INFO, handlers=[_Own(self._fleet, asyncio.get_running_loop())])
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every poll of the console
        layout = self._prepared.plan.layout
        self._fleet.say(f"running {self._prepared.file.where}; data is in {layout.data_dir}")
        self._say_disabled()
        async with contextlib.AsyncExitStack() as stack:
            await self._open_front(stack)
            stack.callback(self._hint())
            await self._fleet.run(self._stop, self._hurry)
        self._fleet.say("stopped")

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._request_stop)
        # Closing the terminal stops a fleet that was started in it.
        in_terminal = sys.stdin is not None and sys.stdin.isatty()
        on_hangup = self._request_stop if in_terminal else self._fleet.try_again
        loop.add_signal_handler(signal.SIGHUP, on_hangup)

    def _request_stop(self) -> None:
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    def _say_disabled(self) -> None:
        for part, why in self._prepared.disabled.items():
            self._fleet.log_buffer.say(part, Level.INFO, f"does not run: {why}")
        for part, fault in self._prepared.faults.items():
            self._fleet.log_buffer.say(part, Level.ERROR, fault)

    async def _open_front(self, stack: contextlib.AsyncExitStack) -> None:
        """Open the fleet's probes, and the console on the same port."""
        if missing := missing_extra(PartKind.CONSOLE):
            self._fleet.say(f"console and /health are not available: {missing}", Level.WARNING)
            return
        settings = self._prepared.plan.settings
        host, port = settings.console.host or settings.host, settings.console.port
        if settings.console.enabled:
            bound = await self._open_console(stack, host, port)
        else:
            bound = await self._open_probes(stack, host, port)
        self._report_front(address_of(*bound))

    async def _open_probes(self, stack: contextlib.AsyncExitStack, host: str, port: int) -> tuple[str, int]:
        from penstock.http import Listener
        from penstock.up import Front

        names = self._prepared.plan.settings.allowed_hosts
        listener = Listener(Front(self._fleet, check=_host_check(host, names)))
        try:
            bound = await listener.bind(host, port)
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else str(error)
            raise Unavailable(f"cannot listen on {host}:{port} (console.port): {why}") from error
        stack.push_async_callback(listener.drain, timeout_s=_DRAIN_S)
        return bound

    async def _open_console(self, stack: contextlib.AsyncExitStack, host: str, port: int) -> tuple[str, int]:
        from penstock.console import KEYS_VARIABLE, Console, ConsoleSettings
        from penstock.http import Keyring
        from penstock.up import Front

        keys = self._prepared.plan.settings.console.keys
        names = self._prepared.plan.settings.allowed_hosts
        keyring = Keyring.parse(keys.reveal() if keys else "", KEYS_VARIABLE)
        sessions = self._prepared.plan.layout.inner("console-sessions.json")
        console = Console(
            self._fleet,
            ConsoleSettings(host=host, port=port, keys=keyring, sessions_file=sessions, allowed_hosts=names),
            front=lambda app: Front(self._fleet, app, check=_host_check(host, names)),
        )
        bound = await console.start()
        stack.push_async_callback(console.close)
        self._printer.print_url(console.url)
        asyncio.get_running_loop().add_signal_handler(
            signal.SIGUSR1, lambda: self._printer.print_url(console.new_url())
        )
        return bound

    def _report_front(self, address: str) -> None:
        self._fleet.own(
            PartStatus(
                name=_CONSOLE,
                kind=PartKind.CONSOLE,
                state=PartState.READY,
                since_ms=SYSTEM_CLOCK.now_ms(),
                pid=os.getpid(),
                address=address,
            )
        )
        self._fleet.say(f"health of all parts: http://{reachable(address)}/ready")

    def _hint(self) -> Callable[[], None]:
        """Log how to use each part when it is first ready. Return a function that stops this."""
        seen: set[str] = set()

        def look(event: FleetEvent) -> None:
            if not isinstance(event, PartStatus) or event.state is not PartState.READY or event.name in seen:
                return
            seen.add(event.name)
            hint = hint_of(self._prepared.plan, event)
            if hint is not None:
                self._fleet.log_buffer.say(event.name, Level.INFO, hint)
            if event.kind is not PartKind.CONSOLE and not self._fleet.not_ready():
                self._fleet.say("all parts are ready")

        return self._fleet.subscribe(look)


def hint_of(plan: Plan, part: PartStatus) -> str | None:
    """Return how to use a part that is ready, or None."""
    here = f"http://{reachable(part.address)}" if part.address else ""
    if part.kind is PartKind.TOPICS and here:
        return _write_an_event(plan.map, here)
    if part.kind is PartKind.COLLECTOR:
        ports = plan.part(part.name).ports
        if "collector.grpc_port" not in ports:
            return None
        where = reachable(address_of(*ports["collector.grpc_port"]))
        return f"send telemetry: OTEL_EXPORTER_OTLP_ENDPOINT=http://{where}"
    if part.kind is PartKind.TIMESERIES and here:
        return f"query a series: curl '{here}/api/v1/query?query=NAME'"
    if part.kind is PartKind.VECTOR and here:
        return f"search vectors: POST {here}/api/v1/vector/search"
    if part.kind is PartKind.PIPELINE:
        files = [place.file for place in plan.map.pipelines if place.part == part.name]
        return f"its file: {files[0]}" if files else None
    return None


def _write_an_event(places: FleetMap, here: str) -> str:
    topic = places.relays[0].topic if places.relays else "events"
    key = " -H 'Authorization: Bearer KEY'" if places.topics is not None and places.topics.key else ""
    body = """-H 'Content-Type: application/json' -d '{"records":[{"data":{"hello":1}}]}'"""
    return f"write an event: curl -X POST {here}/v0/topics/{topic}{key} {body}"


class LogPrinter:
    """Prints log lines of at least `level`: text on standard error, or JSON on standard output.

    With JSON, status changes of parts are printed as well. A missing or slow reader does not block.
    """

    def __init__(self, level: Level, *, as_json: bool) -> None:
        self._level = level
        self._as_json = as_json
        self._states: dict[str, tuple[object, ...]] = {}
        self._stream: TextIO | None = sys.stdout if as_json else sys.stderr  # None if it is closed
        self._writer = LineWriter(self._stream, self._omitted)

    def __enter__(self) -> LogPrinter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._writer.close()

    def __call__(self, event: FleetEvent) -> None:
        if isinstance(event, LogLine):
            self._line(event)
        elif self._as_json:
            self._part(event)

    def print_url(self, url: str) -> None:
        """Print the console's address. It may contain a token, so it must not appear in the log."""
        if self._as_json:
            self._json({"time": _now(), "event": "console", "url": url})
        else:
            self._text(f"console: {url}")

    def _line(self, line: LogLine) -> None:
        if line.level >= self._level:
            self._writer.put(self._formatted(time_text(line.at_ms), line.level, line.part, line.text))

    def _omitted(self, count: int) -> bytes:
        text = f"{count} lines were omitted: the reader of the log is too slow"
        return self._formatted(_now(), Level.WARNING, OWN_NAME, text)

    def _formatted(self, at: str, level: Level, part: str, text: str) -> bytes:
        if self._as_json:
            return _encoded({"time": at, "level": level.name.lower(), "part": part, "message": text})
        name = f"{level.name:<7}"
        if self._stream is not None and self._stream.isatty() and level in _COLOURS:
            name = click.style(name, fg=_COLOURS[level])
        return self._bytes(f"{at} {name} {part:<{_WIDTH}} {text}")

    def _part(self, part: PartStatus) -> None:
        shown = (part.state, part.pid, part.address, part.restarts)
        if self._states.get(part.name) == shown:
            return
        self._states[part.name] = shown
        self._json(
            {
                "time": _now(),
                "event": "part",
                "part": part.name,
                "kind": part.kind.value,
                "state": part.state.value,
                "since": time_text(part.since_ms),
                "pid": part.pid,
                "address": part.address,
                "restarts": part.restarts,
                "last_error": part.last_error,
                "disabled_why": part.disabled_why,
            }
        )

    def _json(self, document: dict[str, object]) -> None:
        self._writer.put(_encoded(document))

    def _text(self, text: str) -> None:
        self._writer.put(self._bytes(text))

    def _bytes(self, text: str) -> bytes:
        encoding = None if self._stream is None else self._stream.encoding
        return f"{text}\n".encode(encoding or "utf-8", "backslashreplace")


def _encoded(document: dict[str, object]) -> bytes:
    return msgspec.json.encode(document) + b"\n"


def _now() -> str:
    return time_text(SYSTEM_CLOCK.now_ms())
