"""The demo while it runs, on standard error: a live panel on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import click

from penstock.cli.demo_run import Live, Stage

if TYPE_CHECKING:
    from rich.console import Console
    from rich.spinner import Spinner

__all__ = ["line", "open_stage", "panel"]

LINE_EVERY_S: Final = 5.0


@contextmanager
def open_stage() -> Iterator[Stage]:
    """A live panel on a terminal, plain lines elsewhere."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.live import Live as Screen
    from rich.spinner import Spinner

    console, spinner = Console(stderr=True), Spinner("dots", "")
    with Screen(spinner, console=console, refresh_per_second=8, transient=True):
        yield _Panel(console, spinner)


class _Panel:
    def __init__(self, console: Console, spinner: Spinner) -> None:
        self._console = console
        self._spinner = spinner

    def show(self, live: Live) -> None:
        from rich.text import Text

        self._spinner.update(text=Text(panel(live)))

    def say(self, live: Live, sentence: str) -> None:
        from rich.text import Text

        self.show(live)
        self._console.print(Text(_told(live, sentence)))


class _Lines:
    def __init__(self) -> None:
        self._printed = time.monotonic()

    def show(self, live: Live) -> None:
        if time.monotonic() - self._printed >= LINE_EVERY_S:
            self._printed = time.monotonic()
            click.echo(line(live), err=True)

    def say(self, live: Live, sentence: str) -> None:
        click.echo(_told(live, sentence), err=True)


def _told(live: Live, sentence: str) -> str:
    return f"{live.elapsed_s:5.1f}s  {sentence}"


def panel(live: Live) -> str:
    """The whole state, a line each."""
    return (
        f"{live.phase}, {live.elapsed_s:.0f}s\n"
        f"  produced      {live.produced:>10,} events\n"
        f"  acknowledged  {live.acknowledged:>10,}\n"
        f"  delivered     {live.delivered:>10,} rows\n"
        f"  dead letters  {live.dead:>10,}\n"
        f"  backlog       {live.backlog:>10,} batches\n"
        f"  lag           {live.lag_s:>10,.1f} s\n"
        f"  killed        producer {live.producer_kills}, Spark driver {live.driver_kills}"
    )


def line(live: Live) -> str:
    """The same in one line, without the kills: a line was said of each."""
    return (
        f"{live.elapsed_s:5.1f}s  {live.phase}: produced {live.produced:,}, acknowledged "
        f"{live.acknowledged:,}, delivered {live.delivered:,}, dead {live.dead:,}, backlog "
        f"{live.backlog:,} batches, lag {live.lag_s:,.1f} s"
    )
