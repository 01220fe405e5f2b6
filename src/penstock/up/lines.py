"""What a part prints, as lines of the one log: cut, given a level, counted when there are too many. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from penstock.up.status import Level

__all__ = ["LINE_MAX", "Levels", "Said", "Splitter", "Throttle", "Veil", "event_of", "shown"]

LINE_MAX: Final = 4096
"""Bytes of a line that are kept."""
_SECRET_MIN: Final = 8
_LOGGED: Final = re.compile(
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


class Splitter:
    """Bytes as they come, as lines. What is longer than a line may be is left out and said so."""

    def __init__(self, line_max: int = LINE_MAX) -> None:
        self._line_max = line_max
        self._kept = bytearray()
        self._cut = 0

    def feed(self, data: bytes) -> Iterator[str]:
        """The lines that `data` completes."""
        *whole, rest = data.split(b"\n")
        for piece in whole:
            self._keep(piece)
            yield self._line()
        self._keep(rest)

    def rest(self) -> str | None:
        """What came after the last end of a line."""
        return self._line() if self._kept or self._cut else None

    def _keep(self, piece: bytes) -> None:
        room = self._line_max - len(self._kept)
        self._kept += piece[:room]
        self._cut += max(0, len(piece) - room)

    def _line(self) -> str:
        text = self._kept.decode("utf-8", "replace").rstrip("\r")
        cut, self._cut = self._cut, 0
        self._kept.clear()
        return f"{text} … ({cut} more bytes)" if cut else text


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
        logged = _LOGGED.match(line)
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
            # The line behind a trace tells the error; whatever follows it is something new.
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
