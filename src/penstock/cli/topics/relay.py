"""`penstock topics relay`: move a topic into a queue in object storage, each record once."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import Final

import click

from penstock.buffer import ProducerConfig
from penstock.cli.base import Output, command, print_event
from penstock.cli.buffer.target import QueueOptions, queue_options
from penstock.cli.failure import ExitCode, exit_code
from penstock.cli.output import Progress, print_pairs
from penstock.cli.signals import LoopStop, signal_code
from penstock.cli.topics.client import Server, report_error, server_options
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


def _start(ctx: click.Context, option: click.Parameter, text: str) -> Start:
    if text == "earliest" or text == "latest":
        return "earliest" if text == "earliest" else "latest"
    if text.isascii() and text.isdigit():
        return int(text)
    raise click.BadParameter(f"{text!r} is neither a sequence nor 'earliest' nor 'latest'")


@command()
@click.argument("topic")
@click.option("--once", is_flag=True, help="Stop after the records that the topic holds now.")
@click.option(
    "--after",
    "start",
    callback=_start,
    metavar="SEQ|earliest|latest",
    default="earliest",
    show_default=True,
    help="Where the first run begins; later runs continue at the position stored in the queue.",
)
@click.option(
    "--on-gap",
    type=click.Choice(GAPS),
    default="fail",
    show_default=True,
    help="If records were removed before they were relayed: stop, continue, or store a record of the gap.",
)
@click.option(
    "--value",
    type=click.Choice(VALUES),
    default="record",
    show_default=True,
    help="What to store: the record with its sequence, time, node, tag and meta, or only its data.",
)
@click.option(
    "--app", default="", metavar="NAME", help="The relay's name in the queue [default: relay:TOPIC]."
)
@click.option("--create", is_flag=True, help="Create the topic if it does not exist.")
@click.option("--events", is_flag=True, help="Print progress as JSON on standard output, one event per line.")
@click.option("--compression", type=click.Choice(["none", "zstd"]), help="How batches are stored.")
@click.option(
    "--flush-interval", metavar="DURATION", help="How long a batch waits for more records [default: 100ms]."
)
@click.option("--flush-bytes", metavar="SIZE", help="The size at which a batch is closed [default: 64MiB].")
@queue_options
@server_options
def relay(
    topic: str,
    queue: QueueOptions,
    server: Server,
    out: Output,
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
    """Move the records of TOPIC into the queue at STORE, each record once.

    Batch and position are stored in one write, so the relay may be stopped, killed and restarted at any time.
    Ctrl-C or SIGTERM ends it after the current batch.
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
    job = _RelayJob(plan, out, once=once, create=create, prints_events=events)
    return server.run(job.run)


class _RelayJob:
    """One run of the command: the relay, its progress and its result."""

    def __init__(
        self, plan: RelayConfig, out: Output, *, once: bool, create: bool, prints_events: bool
    ) -> None:
        self._plan = plan
        self._out = out
        self._once = once
        self._create = create
        self._prints_events = prints_events
        self._progress = Progress()
        self._printed_s: float | None = None

    async def run(self, client: Client) -> int:
        """Relay until the end or a signal; return the exit code."""
        relay = Relay(client, self._plan, on_progress=self._show)
        creating = asyncio.create_task(_create_topic(client, self._plan.topic)) if self._create else None

        def stop() -> None:
            relay.stop()
            if creating is not None:
                creating.cancel()

        stopping = LoopStop(stop)
        failure: PenstockError | None = None
        heartbeat = asyncio.create_task(_print_alive()) if self._prints_events else None
        try:
            with self._progress:
                if creating is None or not await _is_cancelled(creating):
                    await relay.run(once=self._once)
        except PenstockError as error:
            failure = error
        finally:
            if heartbeat is not None:
                heartbeat.cancel()
        if failure is None or relay.report.batches:
            self._print_ending(relay.report, stopping.first)
        if failure is not None:
            return _report_failure(failure)
        if stopping.first is None or not self._once:
            return ExitCode.OK  # without --once, a signal is the expected end
        return signal_code(stopping.first)

    def _show(self, report: RelayReport) -> None:
        """Show progress. With events, print it once a second while the relay lags, and once caught up."""
        if not self._prints_events:
            self._progress.show(_line(report))
            return
        now_s = time.monotonic()
        if self._printed_s is None or now_s - self._printed_s >= _EVENT_EVERY_S or not report.lag:
            self._printed_s = now_s
            print_event("progress", **_figures(report), lag=report.lag)

    def _print_ending(self, report: RelayReport, stopped_by: signal.Signals | None) -> None:
        if self._prints_events:
            print_event("stopped", **_figures(report), lag=report.lag)
            return
        stopped = None if stopped_by is None else stopped_by.name
        self._out.show(
            {**_figures(report), "gaps": report.gaps, "stopped_by": stopped},
            lambda: print_pairs(_report_pairs(report)),
        )


async def _print_alive() -> None:
    """Print a heartbeat while the loop runs: `penstock up` kills a relay that is silent for too long."""
    while True:
        await asyncio.sleep(_ALIVE_EVERY_S)
        print_event("alive")


async def _create_topic(client: Client, topic: str) -> None:
    """Create the topic, with writes synced before each response. Do not change an existing topic."""
    try:
        await client.state(topic, touch=False)
    except NotFound:
        await client.put_topic(topic, TopicConfig(durability=Durability.FSYNC))


async def _is_cancelled(task: asyncio.Task[None]) -> bool:
    """Wait for the task. Return whether it was cancelled. Raise the error of the task."""
    await asyncio.wait([task])
    if task.cancelled():
        return True
    task.result()
    return False


def _report_failure(failure: PenstockError) -> int:
    """Report a failure. A gap needs no hint: its message states what to do."""
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


def _report_pairs(report: RelayReport) -> list[tuple[str, str]]:
    return [
        ("relayed", f"{pluralise(report.records, 'record')}, {format_size(report.record_bytes)}"),
        ("batches", f"{report.batches:,}"),
        ("position", f"{report.through:,} of {report.head:,}"),
        *[("gap", f"{gap.first:,} to {gap.last:,} ({gap.reason})") for gap in report.gaps],
    ]
