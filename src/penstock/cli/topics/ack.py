"""`penstock topics ack`: jobs are done."""

from __future__ import annotations

from collections.abc import Sequence

import click

from penstock.cli.topics.jobs import job_arguments, node_option, report
from penstock.cli.topics.target import Server, run, server_options
from penstock.topics import AckResult, JobRef, counted

__all__ = ["ack"]


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
