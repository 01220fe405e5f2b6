"""`penstock topics ls`: the topics of a server."""

from __future__ import annotations

import click

from penstock.cli.display import print_json, print_table
from penstock.cli.failure import ExitCode
from penstock.cli.topics.target import Server, run, server_options
from penstock.topics import TopicSummary
from penstock.units import format_size

__all__ = ["ls"]


@click.command()
@click.argument("prefix", default="")
@server_options
def ls(prefix: str, url: str, key: str | None, timeout: str, retry_for: str, as_json: bool) -> int:
    """List the topics whose names begin with PREFIX and that the key may see."""
    found = run(_list(Server(url=url, key=key, timeout=timeout, retry_for=retry_for), prefix))
    if as_json:
        print_json({"topics": found})
    elif found:
        headers = ("topic", "records", "bytes", "earliest", "head", "durable", "priority")
        print_table(headers, [_row(summary) for summary in found], right=(1, 2, 3, 4, 6))
    else:
        click.echo("no topics" + (f" that begin with {prefix}" if prefix else ""), err=True)
    return ExitCode.OK


async def _list(server: Server, prefix: str) -> list[TopicSummary]:
    async with server.client() as client:
        return [summary async for summary in client.topics(prefix)]


def _row(summary: TopicSummary) -> tuple[str, ...]:
    return (
        summary.topic,
        f"{summary.count:,}",
        format_size(summary.bytes),
        str(summary.earliest_seq),
        str(summary.head_seq),
        "yes" if summary.durable else "no",
        str(summary.effective_priority),
    )
