"""`penstock topics extend`: jobs take longer."""

from __future__ import annotations

from collections.abc import Sequence

import click

from penstock.cli.display import time_text
from penstock.cli.topics.jobs import job_arguments, milliseconds, node_option, report
from penstock.cli.topics.target import Server, run, server_options
from penstock.topics import ExtendResult, JobRef, counted

__all__ = ["extend"]


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
