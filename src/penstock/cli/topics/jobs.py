"""`penstock topics claim`, `ack`, `nack` and `extend`: jobs of a queue, one request at a time."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import click

from penstock.cli.failure import ExitCode
from penstock.cli.options import Command, injected, json_option, milliseconds
from penstock.cli.output import print_json, print_table, time_text
from penstock.cli.topics.client import ADDRESS_OPTIONS, Server
from penstock.topics import AckResult, ClaimedJob, ExtendResult, JobRef, NackResult, pluralise


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker(Server):
    """A server, and the name under which jobs are claimed: only that node may ack them."""

    node: str


worker_options = injected(
    "worker",
    Worker,
    *ADDRESS_OPTIONS,
    json_option,
    click.option(
        "--node",
        envvar="TOPICS_NODE",
        default=socket.gethostname,
        metavar="NAME",
        help="The name of the worker; TOPICS_NODE, else this machine's name.",
    ),
)
"""Hands a command its `worker`, and `as_json`."""


def job_arguments(command: Command) -> Command:
    """`SEQ`, or `SEQ:LEASE_ID` for exactly that delivery."""
    return click.argument("jobs", nargs=-1, required=True, metavar="JOB...", callback=_job_refs)(command)


def _job_refs(context: click.Context, parameter: click.Parameter, given: Sequence[str]) -> list[JobRef]:
    return [_job_ref(text) for text in given]


def _job_ref(text: str) -> JobRef:
    seq, colon, lease_id = text.partition(":")
    if not seq.isascii() or not seq.isdigit() or (colon and not lease_id):
        raise click.BadParameter(f"{text!r} is no job: write SEQ, or SEQ:LEASE_ID as the claim printed it.")
    return (int(seq), lease_id) if colon else int(seq)


def report(result: AckResult | NackResult | ExtendResult, sentence: str, *, as_json: bool) -> int:
    """Print what became of the jobs, and on standard error which were not the worker's; the exit code."""
    skipped = result.skipped
    if as_json:
        print_json(dataclasses.asdict(result))
    else:
        click.echo(sentence)
        _print_skipped(skipped)
    return ExitCode.REJECTED if skipped else ExitCode.OK


def _print_skipped(skipped: Sequence[int]) -> None:
    if skipped:
        named = ", ".join(map(str, skipped[:10])) + (", …" if len(skipped) > 10 else "")
        click.echo(
            f"skipped {pluralise(len(skipped), 'job')} that this node does not hold: {named}", err=True
        )


@click.command()
@click.argument("queue")
@worker_options
@click.option(
    "--max", "most", type=click.IntRange(1, 1000), default=1, show_default=True, help="Jobs at most."
)
@click.option("--lease", metavar="DURATION", help="How long to hold them [default: the queue's].")
def claim(
    queue: str,
    worker: Worker,
    as_json: bool,
    most: int,
    lease: str | None,
) -> int:
    """Take jobs of QUEUE. They are yours until the deadline; ack, nack or extend them as SEQ:LEASE_ID.

    With --json there is one job to a line.
    """
    lease_ms = None if lease is None else milliseconds("--lease", lease)
    result = worker.run(lambda client: client.claim(queue, worker.node, max=most, lease_ms=lease_ms))
    if as_json:
        for fragment in result.fragments:
            click.echo(fragment)
    elif result.seqs:
        headers = ("job", "delivery", "until", "data")
        print_table(headers, [_job_row(job) for job in result.jobs()], right=(1,))
    else:
        click.echo(f"nothing to do in {queue}", err=True)
    return ExitCode.OK


def _job_row(job: ClaimedJob) -> tuple[str, ...]:
    return (
        f"{job.seq}:{job.lease_id}",
        str(job.deliveries),
        time_text(job.deadline_ms),
        bytes(job.data).decode("utf-8", "replace"),
    )


@click.command()
@click.argument("queue")
@job_arguments
@worker_options
def ack(
    queue: str,
    jobs: Sequence[JobRef],
    worker: Worker,
    as_json: bool,
) -> int:
    """Delete jobs of QUEUE that are done: SEQ, or SEQ:LEASE_ID if only that delivery is meant.

    Exits with 2 if some of them are not held by this node.
    """
    result = worker.run(lambda client: client.ack(queue, worker.node, jobs))
    sentence = f"done: {pluralise(result.acked, 'job')}; {result.ready:,} ready, {result.in_flight:,} held"
    return report(result, sentence, as_json=as_json)


@click.command()
@click.argument("queue")
@job_arguments
@worker_options
@click.option("--delay", metavar="DURATION", default="0s", help="Ready again after this [default: at once].")
def nack(
    queue: str,
    jobs: Sequence[JobRef],
    worker: Worker,
    as_json: bool,
    delay: str,
) -> int:
    """Give jobs of QUEUE back: SEQ, or SEQ:LEASE_ID if only that delivery is meant.

    Exits with 2 if some of them are not held by this node.
    """
    delay_ms = milliseconds("--delay", delay)
    result = worker.run(lambda client: client.nack(queue, worker.node, jobs, delay_ms=delay_ms))
    sentence = f"back: {pluralise(result.nacked, 'job')}; {result.ready:,} ready, {result.in_flight:,} held"
    return report(result, sentence, as_json=as_json)


@click.command()
@click.argument("queue")
@job_arguments
@worker_options
@click.option("--lease", metavar="DURATION", required=True, help="How long from now.")
def extend(
    queue: str,
    jobs: Sequence[JobRef],
    worker: Worker,
    as_json: bool,
    lease: str,
) -> int:
    """Hold jobs of QUEUE longer: SEQ, or SEQ:LEASE_ID if only that delivery is meant.

    Exits with 2 if some of them are not held by this node.
    """
    lease_ms = milliseconds("--lease", lease)
    result = worker.run(lambda client: client.extend(queue, worker.node, jobs, lease_ms=lease_ms))
    until = ", until " + time_text(max(result.deadlines_ms.values())) if result.deadlines_ms else ""
    return report(result, f"held: {pluralise(len(result.deadlines_ms), 'job')}{until}", as_json=as_json)
