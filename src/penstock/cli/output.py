"""Output for people and programs: tables, JSON, progress, findings, and lines for slow readers."""

from __future__ import annotations

import contextlib
import datetime
import enum
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Final, TextIO

import click
import msgspec

if TYPE_CHECKING:
    from rich.status import Status as LiveLine


QUIET_S = 1.0
"""Work shorter than this shows no progress."""
PLAIN_EVERY_S = 5.0
"""The interval of progress lines without a terminal, where they usually go to a log."""
_HELD_BYTES_MAX: Final = 4 << 20
_LAST_WORDS_S: Final = 2.0


def print_json(value: object) -> None:
    """Print a JSON document on standard output."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=2)
    click.echo(text.decode())


def print_pairs(pairs: Sequence[tuple[str, str]], title: str = "") -> None:
    """Print names and values, one pair per line."""
    width = max((len(name) for name, _ in pairs), default=0)
    if title:
        click.echo(click.style(title, bold=True))
    for name, value in pairs:
        click.echo(f"  {name:<{width}}  {value}".rstrip())


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> None:
    """Print columns; those with an index in `right` are right-aligned."""
    if sys.stdout.isatty():
        _print_rich_table(headers, rows, right)
        return
    widths = [max(len(row[place]) for row in [headers, *rows]) for place in range(len(headers))]
    for row in [headers, *rows]:
        cells = [
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        click.echo("  ".join(cells).rstrip())


def _print_rich_table(headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for place, header in enumerate(headers):
        table.add_column(header, justify="right" if place in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)


def time_text(ms: int) -> str:
    """Format a time in UTC with milliseconds, or as a number if it is outside the calendar."""
    try:
        moment = datetime.datetime.fromtimestamp(ms / 1000, datetime.UTC)
    except (OverflowError, OSError, ValueError):
        return f"{ms}ms"
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Progress:
    """A progress line for work that takes longer than a second, updated in place on a terminal."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._printed = self._started + QUIET_S - PLAIN_EVERY_S
        self._status: LiveLine | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def show(self, text: str) -> None:
        """Show progress. Cheap to call often."""
        now = time.monotonic()
        if now - self._started < QUIET_S:
            return
        if sys.stderr.isatty():
            self._show_live(text)
        elif now - self._printed >= PLAIN_EVERY_S:
            self._printed = now
            click.echo(text, err=True)

    def _show_live(self, text: str) -> None:
        if self._status is None:
            from rich.console import Console

            self._status = Console(stderr=True).status(text)
            self._status.start()
        self._status.update(text)


class Status(enum.Enum):
    """The result of a check."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


_COLOURS: Final = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "red"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A check with its result and, unless it passed, advice."""

    status: Status
    name: str
    text: str
    advice: str = ""

    def to_json(self) -> dict[str, str]:
        """Return the check as a JSON object."""
        return {"status": self.status.value, "name": self.name, "text": self.text, "advice": self.advice}


def ok(name: str, text: str) -> Check:
    return Check(status=Status.OK, name=name, text=text)


def warn(name: str, text: str, advice: str) -> Check:
    return Check(status=Status.WARN, name=name, text=text, advice=advice)


def fail(name: str, text: str, advice: str) -> Check:
    return Check(status=Status.FAIL, name=name, text=text, advice=advice)


def print_finding(kind: str, text: str, advice: str | None = None) -> None:
    """Print a finding about stored data and its advice, if any. `kind` is problem or note."""
    click.echo(f"{click.style(f'{kind:<8}', fg='red' if kind == 'problem' else 'yellow')} {text}")
    if advice:
        click.echo(f"{'':8}   -> {advice}")


def print_check(check: Check, width: int) -> None:
    """Print a check, with its name in a column of `width`, followed by its advice."""
    label = click.style(f"{check.status.value:<4}", fg=_COLOURS[check.status])
    click.echo(f"{label}  {check.name:<{width}}  {check.text}")
    if check.advice:
        click.echo(f"{'':4}  {'':<{width}}  -> {check.advice}")


class LineWriter:
    """Writes lines to a stream from its own thread. `omitted` formats the number of dropped lines.

    A slow reader, such as a paused terminal, blocks only that thread: lines that do not fit into the buffer
    are dropped, counted and reported. Without a reader or a stream, all lines are dropped.
    """

    def __init__(
        self, stream: TextIO | None, omitted: Callable[[int], bytes], *, held_max: int = _HELD_BYTES_MAX
    ) -> None:
        self._stream = stream
        self._omitted = omitted
        self._held_max = held_max
        self._lines: deque[bytes] = deque()
        self._held = 0
        self._lost = 0
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="penstock-line-writer", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        """Queue a line. Never block."""
        with self._changed:
            if self._held + len(line) > self._held_max:
                self._lost += 1
                return
            self._lines.append(line)
            self._held += len(line)
            self._changed.notify()

    def close(self, timeout_s: float = _LAST_WORDS_S) -> None:
        """Write the queued lines; give up if the reader does not take them in time."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (data := self._next()) is not None:
            if self._stream is not None:
                with contextlib.suppress(OSError, ValueError):  # the reader has left, or the stream is closed
                    _write(self._stream, data)

    def _next(self) -> bytes | None:
        with self._changed:
            while not self._lines and not self._is_closed:
                self._changed.wait()
            if not self._lines:
                return None
            lost, self._lost = self._lost, 0
            notice = [self._omitted(lost)] if lost else []
            data = b"".join([*self._lines, *notice])
            self._lines.clear()
            self._held = 0
            return data


def _write(stream: TextIO, data: bytes) -> None:
    """Write without the stream's buffer: a blocked write would hold its lock until the exit."""
    try:
        number = stream.fileno()
    except OSError:  # not a file
        stream.write(data.decode("utf-8", "replace"))
        stream.flush()
        return
    left = memoryview(data)
    while left:
        left = left[os.write(number, left) :]
