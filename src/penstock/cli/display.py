"""What people see: tables on a terminal, aligned plain text in a pipe, progress on standard error."""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import click
import msgspec

if TYPE_CHECKING:
    from rich.status import Status

__all__ = ["Progress", "print_json", "print_pairs", "print_table", "time_text"]

QUIET_S = 1.0
"""Work shorter than this shows no progress: a flicker tells nobody anything."""
PLAIN_EVERY_S = 5.0
"""Without a terminal, progress is a line now and then: it lands in a log."""


def print_json(value: object) -> None:
    """One JSON document on standard output, for programs."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=2)
    click.echo(text.decode())


def print_pairs(pairs: Sequence[tuple[str, str]], title: str = "") -> None:
    """Names and values, one per line."""
    width = max((len(name) for name, _ in pairs), default=0)
    if title:
        click.echo(click.style(title, bold=True))
    for name, value in pairs:
        click.echo(f"  {name:<{width}}  {value}".rstrip())


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> None:
    """Columns; those numbered in `right` are aligned to the right."""
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
    """A moment in UTC, to the millisecond, or the plain number when it is beyond any calendar."""
    try:
        moment = datetime.datetime.fromtimestamp(ms / 1000, datetime.UTC)
    except (OverflowError, OSError, ValueError):
        return f"{ms}ms"
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Progress:
    """One line about work that takes longer than a second: kept current on a terminal, else now and then."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._printed = self._started + QUIET_S - PLAIN_EVERY_S
        self._status: Status | None = None

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
        """Say how far it is. Cheap to call often."""
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
