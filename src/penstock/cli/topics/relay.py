"""`penstock topics relay`: a topic into a queue in object storage, each record once."""

from __future__ import annotations

import asyncio
import signal

import click

from penstock.buffer import ProducerConfig
from penstock.cli.buffer.target import Target, queue_options
from penstock.cli.display import Progress, print_json, print_pairs
from penstock.cli.failure import ExitCode, exit_code
from penstock.cli.topics.target import Server, address_options, complain, run
from penstock.errors import PenstockError
from penstock.services import Relay, RelayConfig, RelayGap, RelayReport, RelayTaken, TopicChanged
from penstock.services.relay_config import GAPS, VALUES, OnGap, Start, Value
from penstock.topics.wording import counted
from penstock.units import format_count, format_size

__all__ = ["relay"]


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
@click.option("--compression", type=click.Choice(["none", "zstd"]), help="How batches are stored.")
@click.option(
    "--flush-interval", metavar="DURATION", help="How long a batch waits for more records [default: 100ms]."
)
@click.option("--flush-bytes", metavar="SIZE", help="The size at which a batch is closed [default: 64MiB].")
def relay(
    topic: str,
    store: str | None,
    manifest: str | None,
    prefix: str | None,
    config: str | None,
    store_options: tuple[str, ...],
    as_json: bool,
    url: str,
    key: str | None,
    timeout: str,
    retry_for: str,
    once: bool,
    start: Start,
    on_gap: OnGap,
    value: Value,
    app: str,
    compression: str | None,
    flush_interval: str | None,
    flush_bytes: str | None,
) -> int:
    """Move the records of TOPIC into the queue at STORE, each of them once.

    Batch and position are stored in one write, so it may be stopped, killed and started again at any time.
    Ctrl-C or SIGTERM ends it after the batch that is under way.
    """
    target = Target.of(store, config=config, manifest=manifest, prefix=prefix, store_options=store_options)
    queue = target.build(
        ProducerConfig,
        batch_compression=compression,
        flush_interval=flush_interval,
        flush_size_bytes=flush_bytes,
    )
    plan = RelayConfig(
        topic=topic, queue=queue, app=app, start=start, on_gap=on_gap, value=value, retry_for=retry_for
    )
    server = Server(url=url, key=key, timeout=timeout, retry_for=retry_for)
    with Progress() as progress:
        return run(_relay(server, plan, progress, once=once, as_json=as_json))


async def _relay(server: Server, plan: RelayConfig, progress: Progress, *, once: bool, as_json: bool) -> int:
    caught: list[signal.Signals] = []
    async with server.client() as client:
        job = Relay(client, plan, on_progress=lambda report: progress.show(_line(report)))

        def on_signal(number: signal.Signals) -> None:
            caught.append(number)
            job.stop()
            if len(caught) > 1:  # asked twice: do not insist on finishing
                raise KeyboardInterrupt

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
        failure: PenstockError | None = None
        try:
            await job.run(once=once)
        except PenstockError as error:
            failure = error
        if failure is None or job.report.batches:
            _tell(job.report, caught[0] if caught else None, as_json=as_json)
    if failure is not None:
        return _complain(failure)
    if not caught or not once:
        return ExitCode.OK  # without --once a signal is how it ends
    return ExitCode.INTERRUPTED if caught[0] is signal.SIGINT else ExitCode.TERMINATED


def _complain(failure: PenstockError) -> int:
    """A gap is told by its own words: what is damaged, or who holds the queue, is not the question."""
    if isinstance(failure, RelayGap | RelayTaken | TopicChanged):
        click.echo(f"error: {failure}", err=True)
        return exit_code(failure)
    return complain(failure)


def _line(report: RelayReport) -> str:
    return (
        f"relayed {format_count(report.records)}  {format_size(report.record_bytes)}  at {report.through:,}  "
        f"{format_count(report.lag)} behind"
    )


def _tell(report: RelayReport, stopped_by: signal.Signals | None, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "topic": report.topic,
                "app": report.app,
                "through": report.through,
                "head": report.head,
                "records": report.records,
                "bytes": report.record_bytes,
                "batches": report.batches,
                "missed": report.missed,
                "gaps": report.gaps,
                "stopped_by": None if stopped_by is None else stopped_by.name,
            }
        )
        return
    print_pairs(
        [
            ("relayed", f"{counted(report.records, 'record')}, {format_size(report.record_bytes)}"),
            ("batches", f"{report.batches:,}"),
            ("position", f"{report.through:,} of {report.head:,}"),
            *[("gap", f"{gap.first:,} to {gap.last:,} ({gap.reason})") for gap in report.gaps],
        ]
    )
