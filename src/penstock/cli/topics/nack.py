"""`penstock topics nack`: jobs go back."""

from __future__ import annotations

from collections.abc import Sequence

import click

from penstock.cli.topics.jobs import job_arguments, milliseconds, node_option, report
from penstock.cli.topics.target import Server, run, server_options
from penstock.topics import JobRef, NackResult, counted

__all__ = ["nack"]


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
