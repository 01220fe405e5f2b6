"""`penstock topics claim`: take jobs of a queue."""

from __future__ import annotations

import click

from penstock.cli.display import print_table, time_text
from penstock.cli.failure import ExitCode
from penstock.cli.topics.jobs import milliseconds, node_option
from penstock.cli.topics.target import Server, run, server_options
from penstock.topics import ClaimedJob, ClaimResult

__all__ = ["claim"]


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
        print_table(headers, [_row(job) for job in result.jobs()], right=(1,))
    else:
        click.echo(f"nothing to do in {queue}", err=True)
    return ExitCode.OK


async def _claim(server: Server, queue: str, node: str, most: int, lease_ms: int | None) -> ClaimResult:
    async with server.client() as client:
        return await client.claim(queue, node, max=most, lease_ms=lease_ms)


def _row(job: ClaimedJob) -> tuple[str, ...]:
    return (
        f"{job.seq}:{job.lease_id}",
        str(job.deliveries),
        time_text(job.deadline_ms),
        bytes(job.data).decode("utf-8", "replace"),
    )
