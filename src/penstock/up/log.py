"""The one log of a fleet: what parts print becomes lines with a level, and the last lines are kept.

Lines of output get a level (`Levels`, `LogFilter`), are limited (`Throttle`),
kept and published (`LogBuffer`).

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
"""Commands of terminals, ends of lines, turns of the direction of writing, and halves of characters."""
HELD_MAX_S: Final = 5.0
"""How long the beginning of a block waits for its end: a busy machine may stop a worker between two lines."""

_OPENING: Final = "Traceback (most recent call last):"
_FRAME: Final = re.compile(r'^  File ".*[/\\]pyspark[/\\]daemon\.py", line \d+, in (manager|worker)$')
_CODE: Final = re.compile(r"^    \s*(code = worker\(sock, authenticated\)|outfile\.flush\(\)|[\^~]+)$")
_END: Final = re.compile(r"^(BrokenPipeError: \[Errno 32\]|ConnectionResetError: \[Errno 104\]) .*$")
_JAVA_LOGGED: Final = re.compile(
    r"^(\d{4}-\d\d-\d\d |\d\d/)?[\d:/]{8}[,. \d]* (TRACE|DEBUG|INFO|WARN|ERROR|FATAL)\b"
)
"""A line of Java's log, with its time first: never a part of a trace of Python."""
_KEPT: Final = 2000


def shown(text: str) -> str:
    """Text as one line, without what a terminal would take for a command, and that any encoding takes."""
    return text.translate(_CONTROL)


class Veil:
    """Takes secrets out of texts. Those that are shorter than eight characters would take words with them."""

    def __init__(self, secrets: Iterable[str]) -> None:
        found = sorted((one for one in secrets if len(one) >= _SECRET_MIN), key=len, reverse=True)
        self._found = re.compile("|".join(map(re.escape, found))) if found else None

    def over(self, text: str) -> str:
        return text if self._found is None else self._found.sub("***", text)


@dataclass(frozen=True, slots=True)
class Said:
    """A line and how much it matters."""

    level: Level
    text: str
    is_verdict: bool = False
    """Whether the part says with it what is wrong, as opposed to a trace that it prints."""


class Levels:
    """Gives each line of a part's standard error a level; one that goes on has that of the line before."""

    def __init__(self) -> None:
        self._last = Level.INFO
        self._in_trace = False

    def of(self, line: str) -> Said:
        logged = _PYTHON_LOGGED.match(line)
        if logged is not None:
            self._in_trace = False
            self._last = _NAMES[logged[1]]
            return Said(self._last, logged[2])
        for prefix, level in _PREFIXES.items():
            if line.lower().startswith(prefix):
                self._last = level
                text = line[len(prefix) :] if level is not Level.INFO else line
                return Said(level, text, is_verdict=level is Level.ERROR)
        return Said(self._going_on(line), line)

    def _going_on(self, line: str) -> Level:
        if line.startswith("Traceback (most recent call last)"):
            self._in_trace, self._last = True, Level.ERROR
        elif not line[:1].isspace():
            # The line after a trace is the error; the next line is something new.
            self._last = Level.ERROR if self._in_trace else Level.INFO
            self._in_trace = False
        return self._last


def event_of(line: str) -> Mapping[str, object] | None:
    """The event in a line of a part's standard output, or None if there is none in it."""
    if not line.startswith("{"):
        return None
    try:
        found = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("event"), str) else None


class Throttle:
    """Lets `burst` lines through at once and `per_s` a second from then on, and counts the others."""

    def __init__(self, *, per_s: float = 100.0, burst: int = 500) -> None:
        self._per_s = per_s
        self._burst = burst
        self._room = float(burst)
        self._at_s: float | None = None
        self._left_out = 0

    def admits(self, now_s: float) -> bool:
        """Whether one more line may pass now."""
        if self._at_s is not None:
            self._room = min(self._burst, self._room + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        if self._room < 1:
            self._left_out += 1
            return False
        self._room -= 1
        return True

    def take_left_out(self) -> int:
        """How many lines were left out since this was last asked."""
        count, self._left_out = self._left_out, 0
        return count


class SparkTraceFilter:
    """Tells each line of standard error, and whether it is a part of such a block.

    The lines of what may become a block are held until it has ended, or has become something else.
    """

    def __init__(self) -> None:
        self._held: list[str] = []
        self._open = 0
        """Held blocks that have begun and not ended."""
        self._flushes = 0
        """How many of them are known to come from the flush of a worker."""
        self._in_other = False
        """Whether a trace of another kind has begun and not ended."""

    def hear(self, line: str) -> list[tuple[str, bool]]:
        """What can be said now that this line has come."""
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
        """A line that is no noise, although a block is open: of another trace, or this block is none."""
        if self._in_other:
            return self._other(line)
        if self._open > 1 and self._open > self._flushes:
            # One of the traces that have begun is another one; the rest may still be noise.
            self._open -= 1
            del self._held[len(self._held) - 1 - self._held[::-1].index(_OPENING)]
            return [*self._other(_OPENING), *self._other(line)]
        return [*self.release(), *self._other(line)]

    def _other(self, line: str) -> list[tuple[str, bool]]:
        if not _JAVA_LOGGED.match(line):
            self._in_other = line == _OPENING or (self._in_other and line[:1].isspace())
        return [(line, False)]

    def release(self) -> list[tuple[str, bool]]:
        """What was held, as it is: nothing more came."""
        held, self._held = self._held, []
        self._open = self._flushes = 0
        return [told for line in held for told in self._other(line)]


class LogFilter:
    """Gives each line of standard error a level; a block of that noise is debug, everything else as it is."""

    def __init__(self) -> None:
        self._levels = Levels()
        self._filter = SparkTraceFilter()
        self._heard_s = 0.0

    def hear(self, line: str, now_s: float) -> list[Said]:
        """What can be said now that this line has come."""
        self._heard_s = now_s
        return self._said(self._filter.hear(line))

    def overdue(self, now_s: float) -> list[Said]:
        """What was held for too long: nothing more came."""
        return self.release() if now_s - self._heard_s >= HELD_MAX_S else []

    def release(self) -> list[Said]:
        """What was held, as it is."""
        return self._said(self._filter.release())

    def _said(self, lines: list[tuple[str, bool]]) -> list[Said]:
        return [Said(Level.DEBUG, line) if is_noise else self._levels.of(line) for line, is_noise in lines]


class LogBuffer:
    """Numbers lines, keeps the last ones, and publishes lines and changes of parts to its listeners.

    None of `secrets` appears in any of them.
    """

    def __init__(self, *, clock: Clock, kept: int = _KEPT, secrets: Iterable[str] = ()) -> None:
        self._clock = clock
        self._veil = Veil(secrets)
        self._lines: deque[LogLine] = deque(maxlen=kept)
        self._number = 0
        self._listeners: dict[int, Callable[[FleetEvent], None]] = {}
        self._subscribed = 0
        self._throttles: dict[str, Throttle] = {}

    def subscribe(self, listener: Callable[[FleetEvent], None]) -> Callable[[], None]:
        """See `FleetView.subscribe`."""
        self._subscribed += 1
        number = self._subscribed
        self._listeners[number] = listener

        def end() -> None:
            self._listeners.pop(number, None)

        return end

    def lines(self, after: int = 0, limit: int = 200) -> Sequence[LogLine]:
        """See `FleetView.log`."""
        found = [line for line in self._lines if line.number > after]
        return found[-limit:] if limit > 0 else []

    def say(self, part: str, level: Level, text: str) -> None:
        """Log a line of the fleet itself about a part. It is never left out."""
        self._write(part, level, text)

    def hear(self, part: str, said: Said) -> bool:
        """Log a line that a part printed; return false if there were too many and it was only counted."""
        throttle = self._throttles.setdefault(part, Throttle())
        admitted = throttle.admits(self._clock.monotonic())
        if admitted:
            self._write(part, said.level, said.text)
        return admitted

    def tell_left_out(self) -> None:
        """Log for every part how many of its lines were left out since the last time."""
        for part, throttle in self._throttles.items():
            if count := throttle.take_left_out():
                self.say(part, Level.WARNING, f"{count} lines were left out: it prints too many of them")

    def shown(self, text: str) -> str:
        """Return a text without secrets and control characters."""
        return self._veil.over(shown(text))

    def changed(self, status: PartStatus) -> None:
        """Publish that a part has another state or other figures."""
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
                _LOG.exception("a listener of the log has failed, and hears nothing any more")
