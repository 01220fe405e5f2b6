"""`penstock demo`: the buffer end to end on this machine, with kills, then the totals that must balance."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import click

from penstock.cli.demo_balance import Balance, balance_of
from penstock.cli.demo_journal import Sums
from penstock.cli.demo_run import DemoFailed, Live, Plan, run_demo
from penstock.cli.display import print_json, print_table
from penstock.cli.failure import ExitCode
from penstock.errors import ConfigError
from penstock.units import format_duration, format_size

__all__ = ["demo"]

DEFAULT_RATE = 4000.0
"""Records per second and producer: busy, and yet gentle on two cores."""
LINE_EVERY_S = 3.0


@click.command()
@click.option(
    "--seconds", type=click.FloatRange(min=1), default=12.0, show_default=True, help="Time to produce."
)
@click.option("--producers", type=click.IntRange(1, 64), default=3, show_default=True, help="Processes.")
@click.option("--records", type=click.IntRange(min=100), help="Records altogether, spread over the time.")
@click.option("--data", type=click.Path(path_type=Path), help="Empty or new directory for everything.")
@click.option("--keep", is_flag=True, help="Leave the files there.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable result.")
def demo(
    seconds: float, producers: int, records: int | None, data: Path | None, keep: bool, as_json: bool
) -> int:
    """Run the whole path on this machine, kill processes in the middle, and balance the books.

    Producers write down what was acknowledged. A consumer stores rows and its position in one SQLite
    transaction. The consumer is killed twice and a producer once, with SIGKILL. In the end every acknowledged
    record must be in the table exactly once. Exits with 0 only then.
    """
    folder = _folder(data)
    plan = Plan(
        folder=folder,
        seconds=seconds,
        producers=producers,
        rate=DEFAULT_RATE if records is None else max(1.0, records / producers / seconds),
        records=None if records is None else -(-records // producers),
    )
    kept = keep
    try:
        with _until_terminated(), _display() as show:
            last = run_demo(plan, show)
        balance = balance_of(plan, last)
        kept = keep or not balance.balanced
    except DemoFailed as error:
        kept = True
        click.echo(f"error: {error}", err=True)
        return ExitCode.PROBLEM
    finally:
        if kept:
            click.echo(f"files kept in {folder}", err=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    if as_json:
        print_json(balance.to_json())
    else:
        _print(balance)
    return ExitCode.OK if balance.balanced else ExitCode.PROBLEM


def _folder(data: Path | None) -> Path:
    if data is None:
        return Path(tempfile.mkdtemp(prefix="penstock-demo-"))
    if data.exists() and (not data.is_dir() or any(data.iterdir())):
        raise ConfigError(f"--data {data}: give a directory that is empty or does not exist yet")
    return Path(os.path.abspath(data))


@contextmanager
def _until_terminated() -> Iterator[None]:
    """A SIGTERM ends the demo as a Ctrl-C does: its processes must not outlive it."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _display() -> Iterator[Callable[[Live], None]]:
    if not sys.stderr.isatty():
        yield _Lines().show
        return
    from rich.console import Console
    from rich.live import Live as Screen
    from rich.text import Text

    with Screen(console=Console(stderr=True), refresh_per_second=8, transient=True) as screen:
        yield lambda live: screen.update(Text(_panel(live)))


class _Lines:
    """Without a terminal: a line now and then."""

    def __init__(self) -> None:
        self._printed = time.monotonic()

    def show(self, live: Live) -> None:
        if time.monotonic() - self._printed >= LINE_EVERY_S:
            self._printed = time.monotonic()
            click.echo(_line(live), err=True)


def _panel(live: Live) -> str:
    return (
        f"{live.phase}, {live.elapsed_s:.1f}s\n"
        f"  produced {live.produced:>12,} records\n"
        f"  durable  {live.durable:>12,}\n"
        f"  consumed {live.consumed:>12,}\n"
        f"  queue    {live.queue_length:>12,} batches\n"
        f"  killed   {live.consumer_kills + live.producer_kills:>12,} processes "
        f"(consumer {live.consumer_kills}, producer {live.producer_kills})"
    )


def _line(live: Live) -> str:
    kills = f"consumer {live.consumer_kills}, producer {live.producer_kills}"
    return (
        f"{live.phase:<9} {live.elapsed_s:5.1f}s   produced {live.produced:>9,}   "
        f"durable {live.durable:>9,}   consumed {live.consumed:>9,}   "
        f"queue {live.queue_length:>4,}   killed: {kills}"
    )


def _print(balance: Balance) -> None:
    found = balance.found
    rows = [
        ("acknowledged to producers", *_cells(balance.acknowledged)),
        ("of these, rows in the table", *_cells(found.acknowledged)),
        ("durable but never acknowledged", *_cells(found.unacknowledged)),
    ]
    print_table(("", "records", "bytes", "checksum sum"), rows, right=(1, 2, 3))
    click.echo()
    rate = round(balance.acknowledged.records / balance.last.elapsed_s)
    click.echo(
        f"{found.rows:,} rows, {found.distinct:,} distinct ids, {found.rows - found.distinct:,} duplicates"
    )
    click.echo(
        f"{balance.never_durable:,} records were in flight and not durable when their producer was killed"
    )
    click.echo(
        f"killed with SIGKILL: the consumer {_times(balance.last.consumer_kills)}, "
        f"a producer {_times(balance.last.producer_kills)}"
    )
    click.echo(f"queue left: {balance.queue_left:,} batches; fsck: {balance.problems:,} problems")
    size = format_size(balance.acknowledged.size_bytes)
    click.echo(f"{size} in {format_duration(balance.last.elapsed_s)}, {rate:,} records/s from end to end")
    if balance.balanced:
        click.echo(
            click.style("balanced: every acknowledged record is in the table exactly once", fg="green")
        )
    else:
        click.echo(click.style("NOT balanced: the totals above must agree", fg="red", bold=True))


def _times(count: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(count, f"{count} times")


def _cells(sums: Sums) -> tuple[str, str, str]:
    return f"{sums.records:,}", f"{sums.size_bytes:,}", f"{sums.checksum:016x}"
