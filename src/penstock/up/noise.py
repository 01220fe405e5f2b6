"""Traces that Spark prints although nothing is wrong, recognised as whole blocks. Pure.

Spark closes the connection to a Python worker that plans a read or a write as soon as it has the answer. The
worker then flushes what is left for nobody, and its daemon prints the `BrokenPipeError` with the two frames
that lead there. An error of the work itself has other frames, and what it does to a query is reported by
Spark.

Several workers may print at the same time, so the lines of their blocks mix with each other and with those of
Java's log.
"""

from __future__ import annotations

import re
from typing import Final

from penstock.up.lines import Levels, Said
from penstock.up.status import Level

__all__ = ["HELD_MAX_S", "Listener", "NoiseFilter"]

HELD_MAX_S: Final = 5.0
"""How long the beginning of a block waits for its end: a busy machine may stop a worker between two lines."""

_OPENING: Final = "Traceback (most recent call last):"
_FRAME: Final = re.compile(r'^  File ".*[/\\]pyspark[/\\]daemon\.py", line \d+, in (manager|worker)$')
_CODE: Final = re.compile(r"^    \s*(code = worker\(sock, authenticated\)|outfile\.flush\(\)|[\^~]+)$")
_END: Final = re.compile(r"^(BrokenPipeError: \[Errno 32\]|ConnectionResetError: \[Errno 104\]) .*$")
_LOGGED: Final = re.compile(
    r"^(\d{4}-\d\d-\d\d |\d\d/)?[\d:/]{8}[,. \d]* (TRACE|DEBUG|INFO|WARN|ERROR|FATAL)\b"
)
"""A line of Java's log, with its time first: never a part of a trace of Python."""


class NoiseFilter:
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
        elif not self._open or _LOGGED.match(line):
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
        if not _LOGGED.match(line):
            self._in_other = line == _OPENING or (self._in_other and line[:1].isspace())
        return [(line, False)]

    def release(self) -> list[tuple[str, bool]]:
        """What was held, as it is: nothing more came."""
        held, self._held = self._held, []
        self._open = self._flushes = 0
        return [told for line in held for told in self._other(line)]


class Listener:
    """Gives each line of standard error a level; a block of that noise is debug, everything else as it is."""

    def __init__(self) -> None:
        self._levels = Levels()
        self._filter = NoiseFilter()
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
