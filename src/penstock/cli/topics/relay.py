"""`penstock topics relay`: a topic into a queue in object storage, each record once."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from typing import Final, Literal, TypeAlias

import click
import msgspec

from penstock.buffer import ProducerConfig
from penstock.cli.buffer.target import QueueOptions, queue_options
from penstock.cli.failure import ExitCode, exit_code
from penstock.cli.output import Progress, print_json, print_pairs
from penstock.cli.signals import LoopStop, signal_code
from penstock.cli.topics.client import Server, address_options, report_error
from penstock.errors import NotFound, PenstockError
from penstock.services import (
    GAPS,
    VALUES,
    OnGap,
    Relay,
    RelayConfig,
    RelayGap,
    RelayReport,
    RelayTaken,
    Start,
    TopicChanged,
    Value,
)
from penstock.topics import Client, Durability, TopicConfig, pluralise
from penstock.units import format_count, format_size

_EVENT_EVERY_S: Final = 1.0
_ALIVE_EVERY_S: Final = 5.0
_Style: TypeAlias = Literal["words", "json", "events"]
"""How the end of it is printed."""


def _start(ctx: click.Context, option: click.Parameter, text: str) -> Start:
    if text == "earliest" or text == "latest":
        return "earliest" if text == "earliest" else "latest"
    if text.isascii() and text.isdigit():
        return int(text)
    raise click.BadParameter(f"{text!r} is neither a sequence nor 'earliest' nor 'latest'")


@click.command()
@click.argument("topic")
@queue_options
@address_options
@click.option("--once", is_flag=True, help="Stop when everything is relayed that the topic has now.")
@click.option(
    "--after",
    "start",
    callback=_start,
    metavar="SEQ|earliest|latest",
    default="earliest",
    show_default=True,
    help="Where the first run begins; later ones go on where the queue says.",
)
@click.option(
    "--on-gap",
    type=click.Choice(GAPS),
    default="fail",
    show_default=True,
    help="Records that are gone before they were relayed: stop, go on, or go on and store a record of it.",
)
@click.option(
    "--value",
    type=click.Choice(VALUES),
    default="record",
    show_default=True,
    help="What is stored: the record with its sequence, time, node, tag and meta, or its data alone.",
)
@click.option(
    "--app", default="", metavar="NAME", help="The relay's name in the queue [default: relay:TOPIC]."
)
@click.option("--create", is_flag=True, help="Make the topic if there is none of that name.")
@click.option("--events", is_flag=True, help="Tell how far it is as lines of JSON on standard output.")
@click.option("--compression", type=click.Choice(["none", "zstd"]), help="How batches are stored.")
@click.option(
    "--flush-interval", metavar="DURATION", help="How long a batch waits for more records [default: 100ms]."
)
@click.option("--flush-bytes", metavar="SIZE", help="The size at which a batch is closed [default: 64MiB].")
def relay(
    topic: str,
    queue: QueueOptions,
    as_json: bool,
    server: Server,
    once: bool,
    start: Start,
    on_gap: OnGap,
    value: Value,
    app: str,
    create: bool,
    events: bool,
    compression: str | None,
    flush_interval: str | None,
    flush_bytes: str | None,
) -> int:
    """Move the records of TOPIC into the queue at STORE, each of them once.

    Batch and position are stored in one write, so it may be stopped, killed and started again at any time.
    Ctrl-C or SIGTERM ends it after the batch that is under way.
    """
    destination = queue.target().build(
        ProducerConfig,
        batch_compression=compression,
        flush_interval=flush_interval,
        flush_size_bytes=flush_bytes,
    )
    plan = RelayConfig(
        topic=topic,
        queue=destination,
        app=app,
        start=start,
        on_gap=on_gap,
        value=value,
        retry_for=server.retry_for,
    )
    style: _Style = "events" if events else "json" if as_json else "words"
    with Progress() as progress:
        show = _Events().show if events else lambda report: progress.show(_line(report))
        return server.run(lambda client: _relay(client, plan, show, style, once=once, create=create))


class _Events:
    """Progress for programs: once a second while it is behind, and whenever it has caught up."""

    def __init__(self) -> None:
        self._printed_s: float | None = None

    def show(self, report: RelayReport) -> None:
        now_s = time.monotonic()
        if self._printed_s is not None and now_s - self._printed_s < _EVENT_EVERY_S and report.lag:
            return
        self._printed_s = now_s
        _print_event("progress", report)


async def _relay(
    client: Client,
    plan: RelayConfig,
    show: Callable[[RelayReport], None],
    style: _Style,
    *,
    once: bool,
    create: bool,
) -> int:
    job = Relay(client, plan, on_progress=show)
    making = asyncio.create_task(_make_topic(client, plan.topic)) if create else None

    def stop() -> None:
        job.stop()
        if making is not None:
            making.cancel()

    stopping = LoopStop(stop)
    failure: PenstockError | None = None
    telling = asyncio.create_task(_print_alive()) if style == "events" else None
    try:
        if making is None or not await _is_cancelled(making):
            await job.run(once=once)
    except PenstockError as error:
        failure = error
    finally:
        if telling is not None:
            telling.cancel()
    if failure is None or job.report.batches:
        _print_ending(job.report, stopping.first, style)
    if failure is not None:
        return _complain(failure)
    if stopping.first is None or not once:
        return ExitCode.OK  # without --once a signal is how it ends
    return signal_code(stopping.first)


async def _print_alive() -> None:
    """Print now and then that the loop runs, whatever the relay awaits: a fleet kills one that does not."""
    while True:
        await asyncio.sleep(_ALIVE_EVERY_S)
        click.echo(msgspec.json.encode({"event": "alive"}).decode())


async def _make_topic(client: Client, topic: str) -> None:
    """Make the topic, synced before each answer, unless it is there: then it stays as it is."""
    try:
        await client.state(topic, touch=False)
    except NotFound:
        await client.put_topic(topic, TopicConfig(durability=Durability.FSYNC))


async def _is_cancelled(task: asyncio.Task[None]) -> bool:
    """Return whether the task was cancelled before it had done its work. Raises what it raises."""
    await asyncio.wait([task])
    if task.cancelled():
        return True
    task.result()
    return False


def _complain(failure: PenstockError) -> int:
    """Report a failure. A gap needs no hint: its own message says what to do."""
    if isinstance(failure, RelayGap | RelayTaken | TopicChanged):
        click.echo(f"error: {failure}", err=True)
        return exit_code(failure)
    return report_error(failure)


def _line(report: RelayReport) -> str:
    return (
        f"relayed {format_count(report.records)}  {format_size(report.record_bytes)}  at {report.through:,}  "
        f"{format_count(report.lag)} behind"
    )


def _figures(report: RelayReport) -> dict[str, object]:
    return {
        "topic": report.topic,
        "app": report.app,
        "through": report.through,
        "head": report.head,
        "records": report.records,
        "bytes": report.record_bytes,
        "batches": report.batches,
        "missed": report.missed,
    }


def _print_event(name: str, report: RelayReport) -> None:
    document = {"event": name, **_figures(report), "lag": report.lag}
    click.echo(msgspec.json.encode(document).decode())


def _print_ending(report: RelayReport, stopped_by: signal.Signals | None, style: _Style) -> None:
    if style == "events":
        _print_event("stopped", report)
        return
    if style == "json":
        stopped = None if stopped_by is None else stopped_by.name
        print_json({**_figures(report), "gaps": report.gaps, "stopped_by": stopped})
        return
    print_pairs(
        [
            ("relayed", f"{pluralise(report.records, 'record')}, {format_size(report.record_bytes)}"),
            ("batches", f"{report.batches:,}"),
            ("position", f"{report.through:,} of {report.head:,}"),
            *[("gap", f"{gap.first:,} to {gap.last:,} ({gap.reason})") for gap in report.gaps],
        ]
    )
