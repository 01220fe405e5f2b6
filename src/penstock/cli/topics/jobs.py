"""`penstock topics claim`, `ack`, `nack` and `extend`: jobs of a queue, one request at a time."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable, Sequence
from typing import TypeVar

import click

from penstock.cli.failure import ExitCode
from penstock.cli.output import print_json, print_table, time_text
from penstock.cli.topics.client import Server, run, server_options
from penstock.errors import ConfigError
from penstock.topics import AckResult, ClaimedJob, ClaimResult, ExtendResult, JobRef, NackResult, counted
from penstock.units import parse_duration

F = TypeVar("F", bound=Callable[..., object])


def node_option(command: F) -> F:
    """Who claims, and therefore who may ack."""
    return click.option(
        "--node",
        envvar="TOPICS_NODE",
        default=socket.gethostname,
        metavar="NAME",
        help="The name of the worker; TOPICS_NODE, else this machine's name.",
    )(command)


def job_arguments(command: F) -> F:
    """`SEQ`, or `SEQ:LEASE_ID` for exactly that delivery."""
    return click.argument("jobs", nargs=-1, required=True, metavar="JOB...", callback=_job_refs)(command)


def _job_refs(context: click.Context, parameter: click.Parameter, given: Sequence[str]) -> list[JobRef]:
    return [_job_ref(text) for text in given]


def _job_ref(text: str) -> JobRef:
    seq, colon, lease_id = text.partition(":")
    if not seq.isascii() or not seq.isdigit() or (colon and not lease_id):
        raise click.BadParameter(f"{text!r} is no job: write SEQ, or SEQ:LEASE_ID as the claim printed it.")
    return (int(seq), lease_id) if colon else int(seq)


def milliseconds(option: str, text: str) -> int:
    """A duration that was given for an option."""
    try:
        return round(parse_duration(text) * 1000)
    except ConfigError as error:
        raise click.BadParameter(str(error), param_hint=f"'{option}'") from error


def report(result: AckResult | NackResult | ExtendResult, sentence: str, *, as_json: bool) -> int:
    """Print what became of the jobs, and on standard error which were not the worker's; the exit code."""
    skipped = result.skipped
    if as_json:
        print_json(dataclasses.asdict(result))
    else:
        click.echo(sentence)
        _tell_skipped(skipped)
    return ExitCode.REJECTED if skipped else ExitCode.OK


def _tell_skipped(skipped: Sequence[int]) -> None:
    if skipped:
        named = ", ".join(map(str, skipped[:10])) + (", …" if len(skipped) > 10 else "")
        click.echo(f"skipped {counted(len(skipped), 'job')} that this node does not hold: {named}", err=True)


@click.command()
@click.argument("queue")
@server_options
@node_option
@click.option(
    "--max", "most", type=click.IntRange(1, 1000), default=1, show_default=True, help="Jobs at most."
)
@click.option("--lease", metavar="DURATION", help="How long to hold them [default: the queue's].")
def claim(
    queue: str,
    url: str,
    key: str | None,
    timeout: str,
    retry_for: str,
    as_json: bool,
    node: str,
    most: int,
    lease: str | None,
) -> int:
    """Take jobs of QUEUE. They are yours until the deadline; ack, nack or extend them as SEQ:LEASE_ID.

    With --json there is one job to a line.
    """
    lease_ms = None if lease is None else milliseconds("--lease", lease)
    server = Server(url=url, key=key, timeout=timeout, retry_for=retry_for)
    result = run(_claim(server, queue, node, most, lease_ms))
    if as_json:
        for fragment in result.fragments:
            click.echo(fragment)
    elif result.seqs:
        headers = ("job", "delivery", "until", "data")
        print_table(headers, [_job_row(job) for job in result.jobs()], right=(1,))
    else:
        click.echo(f"nothing to do in {queue}", err=True)
    return ExitCode.OK


async def _claim(server: Server, queue: str, node: str, most: int, lease_ms: int | None) -> ClaimResult:
    async with server.client() as client:
        return await client.claim(queue, node, max=most, lease_ms=lease_ms)


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
@server_options
@node_option
def ack(
    queue: str,
    jobs: Sequence[JobRef],
    url: str,
    key: str | None,
    timeout: str,
    retry_for: str,
    as_json: bool,
    node: str,
) -> int:
    """Delete jobs of QUEUE that are done: SEQ, or SEQ:LEASE_ID if only that delivery is meant.

    Exits with 2 if some of them are not held by this node.
    """
    result = run(_ack(Server(url=url, key=key, timeout=timeout, retry_for=retry_for), queue, node, jobs))
    sentence = f"done: {counted(result.acked, 'job')}; {result.ready:,} ready, {result.in_flight:,} held"
    return report(result, sentence, as_json=as_json)


async def _ack(server: Server, queue: str, node: str, jobs: Sequence[JobRef]) -> AckResult:
    async with server.client() as client:
        return await client.ack(queue, node, jobs)


@click.command()
@click.argument("queue")
@job_arguments
@server_options
@node_option
@click.option("--delay", metavar="DURATION", default="0s", help="Ready again after this [default: at once].")
def nack(
    queue: str,
    jobs: Sequence[JobRef],
    url: str,
    key: str | None,
    timeout: str,
    retry_for: str,
    as_json: bool,
    node: str,
    delay: str,
) -> int:
    """Give jobs of QUEUE back: SEQ, or SEQ:LEASE_ID if only that delivery is meant.

    Exits with 2 if some of them are not held by this node.
    """
    delay_ms = milliseconds("--delay", delay)
    server = Server(url=url, key=key, timeout=timeout, retry_for=retry_for)
    result = run(_nack(server, queue, node, jobs, delay_ms))
    sentence = f"back: {counted(result.nacked, 'job')}; {result.ready:,} ready, {result.in_flight:,} held"
    return report(result, sentence, as_json=as_json)


async def _nack(server: Server, queue: str, node: str, jobs: Sequence[JobRef], delay_ms: int) -> NackResult:
    async with server.client() as client:
        return await client.nack(queue, node, jobs, delay_ms=delay_ms)


@click.command()
@click.argument("queue")
@job_arguments
@server_options
@node_option
@click.option("--lease", metavar="DURATION", required=True, help="How long from now.")
def extend(
    queue: str,
    jobs: Sequence[JobRef],
    url: str,
    key: str | None,
    timeout: str,
    retry_for: str,
    as_json: bool,
    node: str,
    lease: str,
) -> int:
    """Hold jobs of QUEUE longer: SEQ, or SEQ:LEASE_ID if only that delivery is meant.

    Exits with 2 if some of them are not held by this node.
    """
    lease_ms = milliseconds("--lease", lease)
    server = Server(url=url, key=key, timeout=timeout, retry_for=retry_for)
    result = run(_extend(server, queue, node, jobs, lease_ms))
    until = ", until " + time_text(max(result.deadlines_ms.values())) if result.deadlines_ms else ""
    return report(result, f"held: {counted(len(result.deadlines_ms), 'job')}{until}", as_json=as_json)


async def _extend(
    server: Server, queue: str, node: str, jobs: Sequence[JobRef], lease_ms: int
) -> ExtendResult:
    async with server.client() as client:
        return await client.extend(queue, node, jobs, lease_ms=lease_ms)
