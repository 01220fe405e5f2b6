"""The log of a fleet: the output of its parts, with levels, limits and a buffer of the last lines.

Lines are assigned a level (`Levels`, `LogFilter`), rate-limited (`Throttle`), stored and published
(`LogBuffer`).

`SparkTraceFilter` recognises tracebacks that Spark prints although nothing is wrong. Spark closes the
connection to a Python worker that plans a read or a write as soon as it has the result. The worker then
flushes its buffer to the closed connection, and its daemon prints the `BrokenPipeError` with two frames. A
real error has other frames, and Spark reports its effect on the query. Several workers may print at the same
time, so their lines are mixed with each other and with Java's log.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from penstock.clock import Clock
from penstock.up.status import FleetEvent, Level, LogLine, PartStatus

_LOG = logging.getLogger(__name__)

_SECRET_MIN: Final = 8
_PYTHON_LOGGED: Final = re.compile(
    r"^\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[,.]\d+\s+(DEBUG|INFO|WARNING|ERROR|CRITICAL)\s+(.*)$", re.DOTALL
)
_PREFIXES: Final = {"error: ": Level.ERROR, "warning: ": Level.WARNING, "hint: ": Level.INFO}
_NAMES: Final = {**{level.name: level for level in Level}, "CRITICAL": Level.ERROR}
_CONTROL: Final = dict.fromkeys(
    [
        *(code for code in range(32) if code != ord("\t")),
        *range(127, 160),
        *(0x200E, 0x200F),
        *range(0x2028, 0x202F),
        *range(0x2066, 0x206A),
        *range(0xD800, 0xE000),
    ],
    "\N{REPLACEMENT CHARACTER}",
)
"""Terminal control characters, line ends, text direction marks, and surrogates."""
HELD_MAX_S: Final = 5.0
"""How long to hold an incomplete traceback. On a busy machine, a worker may pause between two lines."""

_OPENING: Final = "Traceback (most recent call last):"
_FRAME: Final = re.compile(r'^  File ".*[/\\]pyspark[/\\]daemon\.py", line \d+, in (manager|worker)$')
_CODE: Final = re.compile(r"^    \s*(code = worker\(sock, authenticated\)|outfile\.flush\(\)|[\^~]+)$")
_END: Final = re.compile(r"^(BrokenPipeError: \[Errno 32\]|ConnectionResetError: \[Errno 104\]) .*$")
_JAVA_LOGGED: Final = re.compile(
    r"^(\d{4}-\d\d-\d\d |\d\d/)?[\d:/]{8}[,. \d]* (TRACE|DEBUG|INFO|WARN|ERROR|FATAL)\b"
)
"""A line of Java's log, which begins with a time; never part of a Python traceback."""
_KEPT: Final = 2000


def shown(text: str) -> str:
    """Return text as a single line without control characters, which any encoding accepts."""
    return text.translate(_CONTROL)


class SecretMask:
    """Masks secrets in text. Secrets of less than eight characters would match ordinary words."""

    def __init__(self, secrets: Iterable[str]) -> None:
        found = sorted((one for one in secrets if len(one) >= _SECRET_MIN), key=len, reverse=True)
        self._found = re.compile("|".join(map(re.escape, found))) if found else None

    def apply(self, text: str) -> str:
        return text if self._found is None else self._found.sub("***", text)


@dataclass(frozen=True, slots=True)
class OutputLine:
    """A line of output and its level."""

    level: Level
    text: str
    is_verdict: bool = False
    """Whether it states an error, in contrast to a line of a traceback."""


class Levels:
    """Assigns a level to each line of standard error. A continuation line keeps the previous level."""

    def __init__(self) -> None:
        self._last = Level.INFO
        self._in_trace = False

    def of(self, line: str) -> OutputLine:
        logged = _PYTHON_LOGGED.match(line)
        if logged is not None:
            self._in_trace = False
            self._last = _NAMES[logged[1]]
            return OutputLine(self._last, logged[2])
        for prefix, level in _PREFIXES.items():
            if line.lower().startswith(prefix):
                self._last = level
                text = line[len(prefix) :] if level is not Level.INFO else line
                return OutputLine(level, text, is_verdict=level is Level.ERROR)
        return OutputLine(self._continuation_level(line), line)

    def _continuation_level(self, line: str) -> Level:
        if line.startswith("Traceback (most recent call last)"):
            self._in_trace, self._last = True, Level.ERROR
        elif not line[:1].isspace():
            # The line after a traceback is the error message; the next line is unrelated.
            self._last = Level.ERROR if self._in_trace else Level.INFO
            self._in_trace = False
        return self._last


def event_of(line: str) -> Mapping[str, object] | None:
    """Return the event in a line of standard output, or None if there is none."""
    if not line.startswith("{"):
        return None
    try:
        found = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("event"), str) else None


class Throttle:
    """Admits a burst of `burst` lines, then `per_s` lines per second, and counts the others."""

    def __init__(self, *, per_s: float = 100.0, burst: int = 500) -> None:
        self._per_s = per_s
        self._burst = burst
        self._room = float(burst)
        self._at_s: float | None = None
        self._omitted = 0

    def admits(self, now_s: float) -> bool:
        """Return whether one more line is admitted now."""
        if self._at_s is not None:
            self._room = min(self._burst, self._room + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        if self._room < 1:
            self._omitted += 1
            return False
        self._room -= 1
        return True

    def take_omitted(self) -> int:
        """Return how many lines were rejected since the last call."""
        count, self._omitted = self._omitted, 0
        return count


class SparkTraceFilter:
    """Marks the lines of harmless Spark tracebacks in standard error.

    Lines that may belong to such a traceback are held until it is complete or proves to be another one.
    """

    def __init__(self) -> None:
        self._held: list[str] = []
        self._open = 0
        """The number of incomplete tracebacks held."""
        self._flushes = 0
        """How many of them are known to come from a worker's flush."""
        self._in_other = False
        """Whether a traceback of another kind is incomplete."""

    def hear(self, line: str) -> list[tuple[str, bool]]:
        """Add a line. Return the lines decided now, each with whether it is harmless."""
        if line == _OPENING:
            self._open += 1
        elif not self._open or _JAVA_LOGGED.match(line):
            return self._other(line)
        elif frame := _FRAME.match(line):
            self._flushes += frame[1] == "worker"
        elif _END.match(line) and self._flushes:
            return self._ended(line)
        elif not _CODE.match(line):
            return self._interrupted(line)
        self._held.append(line)
        return []

    def _ended(self, line: str) -> list[tuple[str, bool]]:
        self._open -= 1
        self._flushes -= 1
        self._held.append(line)
        if self._open:
            return []
        held, self._held = self._held, []
        return [(text, True) for text in held]

    def _interrupted(self, line: str) -> list[tuple[str, bool]]:
        """Handle a line that does not fit the held tracebacks: some traceback in progress is real."""
        if self._in_other:
            return self._other(line)
        if self._open > 1 and self._open > self._flushes:
            # One of the held tracebacks is real; the others may still be harmless.
            self._open -= 1
            del self._held[len(self._held) - 1 - self._held[::-1].index(_OPENING)]
            return [*self._other(_OPENING), *self._other(line)]
        return [*self.release(), *self._other(line)]

    def _other(self, line: str) -> list[tuple[str, bool]]:
        if not _JAVA_LOGGED.match(line):
            self._in_other = line == _OPENING or (self._in_other and line[:1].isspace())
        return [(line, False)]

    def release(self) -> list[tuple[str, bool]]:
        """Return the held lines as not harmless: no more lines follow."""
        held, self._held = self._held, []
        self._open = self._flushes = 0
        return [marked for line in held for marked in self._other(line)]


class LogFilter:
    """Assigns a level to each line of standard error; harmless Spark tracebacks get the level debug."""

    def __init__(self) -> None:
        self._levels = Levels()
        self._filter = SparkTraceFilter()
        self._heard_s = 0.0

    def hear(self, line: str, now_s: float) -> list[OutputLine]:
        """Add a line. Return the lines decided now."""
        self._heard_s = now_s
        return self._with_levels(self._filter.hear(line))

    def overdue(self, now_s: float) -> list[OutputLine]:
        """Return the held lines if they have been held for too long."""
        return self.release() if now_s - self._heard_s >= HELD_MAX_S else []

    def release(self) -> list[OutputLine]:
        """Return the held lines."""
        return self._with_levels(self._filter.release())

    def _with_levels(self, lines: list[tuple[str, bool]]) -> list[OutputLine]:
        return [
            OutputLine(Level.DEBUG, line) if is_harmless else self._levels.of(line)
            for line, is_harmless in lines
        ]


class LogBuffer:
    """Numbers lines, keeps the last ones, and publishes lines and status changes to its listeners.

    No line contains any of `secrets`.
    """

    def __init__(self, *, clock: Clock, kept: int = _KEPT, secrets: Iterable[str] = ()) -> None:
        self._clock = clock
        self._mask = SecretMask(secrets)
        self._lines: deque[LogLine] = deque(maxlen=kept)
        self._number = 0
        self._listeners: dict[int, Callable[[FleetEvent], None]] = {}
        self._subscribed = 0
        self._throttles: dict[str, Throttle] = {}

    def subscribe(self, listener: Callable[[FleetEvent], None]) -> Callable[[], None]:
        """Implement `FleetView.subscribe`."""
        self._subscribed += 1
        number = self._subscribed
        self._listeners[number] = listener

        def end() -> None:
            self._listeners.pop(number, None)

        return end

    def lines(self, after: int = 0, limit: int = 200) -> Sequence[LogLine]:
        """Implement `FleetView.log`."""
        found = [line for line in self._lines if line.number > after]
        return found[-limit:] if limit > 0 else []

    def say(self, part: str, level: Level, text: str) -> None:
        """Log a message of the fleet about a part. It is never rate-limited."""
        self._write(part, level, text)

    def hear(self, part: str, line: OutputLine) -> bool:
        """Log a line printed by a part. Return False if it exceeds the rate limit and was only counted."""
        throttle = self._throttles.setdefault(part, Throttle())
        admitted = throttle.admits(self._clock.monotonic())
        if admitted:
            self._write(part, line.level, line.text)
        return admitted

    def report_omitted(self) -> None:
        """Log, for every part, how many of its lines were omitted since the last call."""
        for part, throttle in self._throttles.items():
            if count := throttle.take_omitted():
                self.say(part, Level.WARNING, f"{count} lines were omitted: the part prints too many")

    def shown(self, text: str) -> str:
        """Return text without secrets and control characters."""
        return self._mask.apply(shown(text))

    def changed(self, status: PartStatus) -> None:
        """Publish a change in the status of a part."""
        self._publish(status)

    def _write(self, part: str, level: Level, text: str) -> None:
        self._number += 1
        line = LogLine(
            number=self._number, at_ms=self._clock.now_ms(), level=level, part=part, text=self.shown(text)
        )
        self._lines.append(line)
        self._publish(line)

    def _publish(self, event: FleetEvent) -> None:
        for number, listener in list(self._listeners.items()):
            try:
                listener(event)
            except Exception:  # noqa: BLE001 - a listener must not end the log
                self._listeners.pop(number, None)
                _LOG.exception("a listener of the log has failed and is removed")
