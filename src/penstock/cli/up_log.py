"""The one log of a fleet, as people and as programs read it."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Final, TextIO

import click
import msgspec

from penstock.cli.output import LineWriter, time_text
from penstock.clock import SYSTEM_CLOCK
from penstock.up import OWN_NAME, FleetEvent, Level, LogLine, PartStatus

__all__ = ["LogPrinter"]

_COLOURS: Final = {Level.DEBUG: "bright_black", Level.WARNING: "yellow", Level.ERROR: "red"}
_WIDTH: Final = 16


class LogPrinter:
    """Prints every line from a level on: text on standard error, or JSON lines on standard output.

    With JSON, changes of parts are told as lines, too. Nobody reading is no reason to end, or to wait.
    """

    def __init__(self, level: Level, *, as_json: bool) -> None:
        self._level = level
        self._as_json = as_json
        self._states: dict[str, tuple[object, ...]] = {}
        self._stream: TextIO | None = sys.stdout if as_json else sys.stderr  # None if it is closed
        self._outlet = LineWriter(self._stream, self._left_out)

    def __enter__(self) -> LogPrinter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._outlet.close()

    def __call__(self, event: FleetEvent) -> None:
        if isinstance(event, LogLine):
            self._line(event)
        elif self._as_json:
            self._part(event)

    def tell_url(self, url: str) -> None:
        """Where the console is. Not a line of the log, which others may read: it may bring a token."""
        if self._as_json:
            self._json({"time": _now(), "event": "console", "url": url})
        else:
            self._text(f"console: {url}")

    def _line(self, line: LogLine) -> None:
        if line.level >= self._level:
            self._outlet.put(self._formatted(time_text(line.at_ms), line.level, line.part, line.text))

    def _left_out(self, count: int) -> bytes:
        text = f"{count} lines were left out: the log is read too slowly"
        return self._formatted(_now(), Level.WARNING, OWN_NAME, text)

    def _formatted(self, at: str, level: Level, part: str, text: str) -> bytes:
        if self._as_json:
            return _encoded({"time": at, "level": level.name.lower(), "part": part, "message": text})
        name = f"{level.name:<7}"
        if self._stream is not None and self._stream.isatty() and level in _COLOURS:
            name = click.style(name, fg=_COLOURS[level])
        return self._bytes(f"{at} {name} {part:<{_WIDTH}} {text}")

    def _part(self, part: PartStatus) -> None:
        said = (part.state, part.pid, part.address, part.restarts)
        if self._states.get(part.name) == said:
            return
        self._states[part.name] = said
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
        self._outlet.put(_encoded(document))

    def _text(self, text: str) -> None:
        self._outlet.put(self._bytes(text))

    def _bytes(self, text: str) -> bytes:
        encoding = None if self._stream is None else self._stream.encoding
        return f"{text}\n".encode(encoding or "utf-8", "backslashreplace")


def _encoded(document: dict[str, object]) -> bytes:
    return msgspec.json.encode(document) + b"\n"


def _now() -> str:
    return time_text(SYSTEM_CLOCK.now_ms())
