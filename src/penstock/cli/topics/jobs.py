"""`penstock topics claim`, `ack`, `nack` and `extend`: jobs of a queue, one request at a time."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Sequence

import click

from penstock.cli.base import Command, Output, milliseconds
from penstock.cli.failure import ExitCode
from penstock.cli.output import print_table, time_text
from penstock.cli.topics.client import topics_command
from penstock.topics import (
    AckResult,
    ClaimedJob,
    ClaimResult,
    Client,
    ExtendResult,
    JobRef,
    NackResult,
    pluralise,
)

node_option = click.option(
    "--node",
    envvar="TOPICS_NODE",
    default=socket.gethostname,
    metavar="NAME",
    help="The name of the worker that holds the jobs; by default TOPICS_NODE or the host name.",
)
lease_option = click.option(
    "--lease",
    "lease_ms",
    callback=milliseconds,
    metavar="DURATION",
    help="How long to hold them [default: the queue's].",
)


def job_arguments(function: Command) -> Command:
    """Add the argument `jobs`: each is `SEQ`, or `SEQ:LEASE_ID` for exactly that delivery."""
    return click.argument("jobs", nargs=-1, required=True, metavar="JOB...", callback=_job_refs)(function)


def _job_refs(context: click.Context, parameter: click.Parameter, given: Sequence[str]) -> list[JobRef]:
    return [_job_ref(text) for text in given]


def _job_ref(text: str) -> JobRef:
    seq, colon, lease_id = text.partition(":")
    if not seq.isascii() or not seq.isdigit() or (colon and not lease_id):
        raise click.BadParameter(f"{text!r} is not a job: write SEQ, or SEQ:LEASE_ID as `claim` prints it.")
    return (int(seq), lease_id) if colon else int(seq)


@topics_command()
@click.argument("queue")
@click.option(
    "--max",
    "most",
    type=click.IntRange(1, 1000),
    default=1,
    show_default=True,
    help="Maximum number of jobs.",
)
@lease_option
@node_option
async def claim(client: Client, out: Output, queue: str, most: int, lease_ms: int | None, node: str) -> None:
    """Claim jobs of QUEUE. You hold them until the deadline; ack, nack or extend them as SEQ:LEASE_ID.

    With --json, each job is printed on its own line.
    """
    result = await client.claim(queue, node, max=most, lease_ms=lease_ms)
    if out.is_json:
        for fragment in result.fragments:
            click.echo(fragment)
    elif result.seqs:
        _print_jobs(result)
    else:
        click.echo(f"no job in {queue} is ready", err=True)


def _print_jobs(result: ClaimResult) -> None:
    headers = ("job", "delivery", "until", "data")
    print_table(headers, [_job_row(job) for job in result.jobs()], right=(1,))


def _job_row(job: ClaimedJob) -> tuple[str, ...]:
    return (
        f"{job.seq}:{job.lease_id}",
        str(job.deliveries),
        time_text(job.deadline_ms),
        bytes(job.data).decode("utf-8", "replace"),
    )


@topics_command()
@click.argument("queue")
@job_arguments
@node_option
async def ack(client: Client, out: Output, queue: str, jobs: Sequence[JobRef], node: str) -> int:
    """Delete finished jobs of QUEUE, named as SEQ, or as SEQ:LEASE_ID for exactly that delivery.

    Exits with 2 if this node does not hold all of them.
    """
    result = await client.ack(queue, node, jobs)
    sentence = f"done: {pluralise(result.acked, 'job')}; {result.ready:,} ready, {result.in_flight:,} held"
    return _show(out, result, sentence)


@topics_command()
@click.argument("queue")
@job_arguments
@click.option(
    "--delay", "delay_ms", callback=milliseconds, metavar="DURATION", default="0s",
    help="Make them ready again after this [default: immediately].",
)  # fmt: skip
@node_option
async def nack(
    client: Client, out: Output, queue: str, jobs: Sequence[JobRef], delay_ms: int, node: str
) -> int:
    """Return jobs to QUEUE, named as SEQ, or as SEQ:LEASE_ID for exactly that delivery.

    Exits with 2 if this node does not hold all of them.
    """
    result = await client.nack(queue, node, jobs, delay_ms=delay_ms)
    returned = pluralise(result.nacked, "job")
    sentence = f"returned: {returned}; {result.ready:,} ready, {result.in_flight:,} held"
    return _show(out, result, sentence)


@topics_command()
@click.argument("queue")
@job_arguments
@click.option(
    "--lease", "lease_ms", callback=milliseconds, metavar="DURATION", required=True,
    help="How long to hold them from now.",
)  # fmt: skip
@node_option
async def extend(
    client: Client, out: Output, queue: str, jobs: Sequence[JobRef], lease_ms: int, node: str
) -> int:
    """Extend the leases of jobs of QUEUE, named as SEQ, or as SEQ:LEASE_ID for exactly that delivery.

    Exits with 2 if this node does not hold all of them.
    """
    result = await client.extend(queue, node, jobs, lease_ms=lease_ms)
    until = ", until " + time_text(max(result.deadlines_ms.values())) if result.deadlines_ms else ""
    return _show(out, result, f"held: {pluralise(len(result.deadlines_ms), 'job')}{until}")


def _show(out: Output, result: AckResult | NackResult | ExtendResult, sentence: str) -> int:
    """Print the result, and on standard error the skipped jobs. Return the exit code."""
    skipped = result.skipped
    out.show(dataclasses.asdict(result), sentence)
    if skipped and not out.is_json:
        named = ", ".join(map(str, skipped[:10])) + (", …" if len(skipped) > 10 else "")
        count = pluralise(len(skipped), "job")
        click.echo(f"skipped {count} that this node does not hold: {named}", err=True)
    return ExitCode.REJECTED if skipped else ExitCode.OK
