"""`penstock demo`: run a complete pipeline here, kill processes, and check that the totals balance."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final

import click

from penstock.cli.base import Output, command
from penstock.cli.failure import ExitCode
from penstock.cli.output import print_json
from penstock.cli.pipelines import audit_document, print_audit
from penstock.clock import SYSTEM_CLOCK
from penstock.errors import ConfigError, PenstockError, Unsupported
from penstock.ids import SYSTEM_RNG, mint_ulid

if TYPE_CHECKING:
    from rich.console import Console
    from rich.spinner import Spinner

    from penstock.cli.demo.run import Live, Plan, Stage


_DAY_MS: Final = 86_400_000
LINE_EVERY_S: Final = 5.0


@command(json_help="Machine-readable result.")
@click.option(
    "--records", type=click.IntRange(min=1000), default=300_000, show_default=True, help="Number of events."
)
@click.option(
    "--producers", type=click.IntRange(1, 64), default=3, show_default=True, help="Number of producers."
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=1),
    default=20.0,
    show_default=True,
    help="Time over which to produce them.",
)
@click.option("--data", type=click.Path(path_type=Path), help="A new or empty directory for the files.")
@click.option(
    "--store", metavar="URL", help="Keep queue and tables in a folder of this store, not in --data."
)
@click.option("--keep", is_flag=True, help="Keep all files afterwards.")
def demo(
    records: int,
    producers: int,
    seconds: float,
    data: Path | None,
    store: str | None,
    keep: bool,
    out: Output,
) -> int:
    """Run the whole path on this machine, kill processes on the way, and check that no record is lost.

    Producers store clicks in a queue and write a journal of the acknowledged ones. A pipeline (`penstock
    run`) moves them into Delta tables: rows, totals per page, and dead letters for records that do not
    decode. A producer and the Spark driver are killed with SIGKILL while they work. At the end, every
    acknowledged click must be in the tables exactly once; only then is the exit code 0.
    """
    _require_spark()
    from penstock.cli.demo.run import Plan

    place = None if store is None else _store_folder(store)
    plan = Plan(
        folder=_local_folder(data),
        store=place,
        producers=producers,
        records=-(-records // producers),
        seconds=seconds,
        since_ms=(SYSTEM_CLOCK.now_ms() // _DAY_MS - 3) * _DAY_MS,
    )
    try:
        with _until_stopped():
            return _run_and_tidy(plan, out, keep=keep)
    except _Terminated:
        click.echo("stopped", err=True)
        return ExitCode.TERMINATED


def _run_and_tidy(plan: Plan, out: Output, *, keep: bool) -> ExitCode:
    """Run the demo. Keep its files if it fails or does not balance."""
    kept = keep
    try:
        balanced = _run_and_report(plan, out, keep=keep)
        kept = keep or not balanced
        return ExitCode.OK if balanced else ExitCode.PROBLEM
    except PenstockError:
        kept = True
        raise
    finally:
        if not kept:
            _remove(plan)
        elif not keep:
            click.echo(f"files kept in {plan.folder}{f' and {plan.store}' if plan.store else ''}", err=True)


def _run_and_report(plan: Plan, out: Output, *, keep: bool) -> bool:
    from penstock.cli.demo.report import audit_of, print_next, print_totals, read_books
    from penstock.cli.demo.run import run_demo

    with open_stage() as stage:
        outcome = run_demo(plan, stage)
    balance, audit = read_books(plan), audit_of(plan)
    balanced = balance.balanced and audit.balanced
    if out.is_json:
        print_json(
            {
                "balanced": balanced,
                **balance.to_json(),
                "producer_kills": outcome.last.producer_kills,
                "driver_kills": outcome.last.driver_kills,
                "interrupted_batches": outcome.interrupted,
                "seconds": round(outcome.last.elapsed_s, 2),
                "audit": audit_document(audit),
            }
        )
        return balanced
    print_totals(balance, outcome)
    click.echo()
    click.echo(click.style(f"$ penstock audit {shlex.quote(str(plan.pipeline_file))} --deep", bold=True))
    print_audit(audit)
    click.echo()
    if balanced:
        verdict = "balanced: every acknowledged event is in the tables exactly once"
        click.echo(click.style(verdict, fg="green", bold=True))
        click.echo()
        print_next(plan, kept=keep)
    else:
        click.echo(click.style("NOT balanced: the totals above differ", fg="red", bold=True))
    return balanced


def _require_spark() -> None:
    """Raise `Unsupported`, naming the missing package, before any process is started."""
    import importlib.util

    from penstock.spark import check_spark, find_java

    check_spark()
    if importlib.util.find_spec("deltalake") is None:
        raise Unsupported("Delta tables need the package deltalake; run `pip install 'penstock[spark]'`")
    find_java(os.environ)


def _local_folder(data: Path | None) -> Path:
    if data is None:
        return Path(tempfile.mkdtemp(prefix="penstock-demo-"))
    if data.exists() and (not data.is_dir() or any(data.iterdir())):
        raise ConfigError(f"--data {data}: give a directory that is empty or does not exist yet")
    return Path(os.path.abspath(data))


def _store_folder(store: str) -> str:
    """Return a new folder in the store, which can be removed afterwards."""
    from penstock.objects import StoreAddress

    address = StoreAddress.parse(store)
    if address.scheme == "memory":
        raise ConfigError("--store: memory:// works in one process only, and the demo has several; use s3://")
    root = os.path.abspath(address.path) if address.scheme == "file" else address.url
    return f"{root.rstrip('/')}/penstock-demo-{mint_ulid(SYSTEM_CLOCK.now_ms(), SYSTEM_RNG).lower()}"


def _remove(plan: Plan) -> None:
    shutil.rmtree(plan.folder, ignore_errors=True)
    if plan.store is None:
        return
    if "://" not in plan.store:
        shutil.rmtree(plan.store, ignore_errors=True)
        return
    try:
        left = _empty(plan.store)
    except PenstockError as error:
        click.echo(f"{plan.store} could not be removed: {error}", err=True)
    else:
        if left:
            click.echo(f"{left:,} objects in {plan.store} could not be removed", err=True)


def _empty(url: str) -> int:
    """Delete every object in a folder; return how many could not be deleted."""
    from penstock.blocking import loop_thread
    from penstock.objects import StoreConfig, open_store

    async def work() -> int:
        store = open_store(StoreConfig(url=url))
        try:
            return len(await store.delete_many([info.key for info in await store.list("")]))
        finally:
            await store.close()

    return loop_thread().run(work())


class _Terminated(BaseException):
    """Raised at SIGTERM. Not an `Exception`, so that error handlers do not catch it."""


@contextmanager
def _until_stopped() -> Iterator[None]:
    """End the demo at SIGTERM or SIGHUP in the same way as at Ctrl-C; ignore further signals.

    A second signal would interrupt the cleanup and leave processes running.
    """
    caught = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)

    def stop(number: int, frame: FrameType | None) -> None:
        for one in caught:
            signal.signal(one, signal.SIG_IGN)
        raise KeyboardInterrupt if number == signal.SIGINT else _Terminated

    before = [signal.signal(number, stop) for number in caught]
    try:
        yield
    finally:
        for number, handler in zip(caught, before, strict=True):
            signal.signal(number, handler)


@contextmanager
def open_stage() -> Iterator[Stage]:
    """Open a live panel on a terminal, or plain lines elsewhere."""
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
        self._console.print(Text(_stamped(live, sentence)))


class _Lines:
    def __init__(self) -> None:
        self._printed = time.monotonic()

    def show(self, live: Live) -> None:
        if time.monotonic() - self._printed >= LINE_EVERY_S:
            self._printed = time.monotonic()
            click.echo(line(live), err=True)

    def say(self, live: Live, sentence: str) -> None:
        click.echo(_stamped(live, sentence), err=True)


def _stamped(live: Live, sentence: str) -> str:
    return f"{live.elapsed_s:5.1f}s  {sentence}"


def panel(live: Live) -> str:
    """Format the state, one figure per line."""
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
    """Format the state as one line, without the kills, which have their own lines."""
    return (
        f"{live.elapsed_s:5.1f}s  {live.phase}: produced {live.produced:,}, acknowledged "
        f"{live.acknowledged:,}, delivered {live.delivered:,}, dead {live.dead:,}, backlog "
        f"{live.backlog:,} batches, lag {live.lag_s:,.1f} s"
    )
