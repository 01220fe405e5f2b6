"""`penstock topics watch`: what happens in some topics, as it happens."""

from __future__ import annotations

import sys
from typing import Literal

import click
import msgspec

from penstock.cli.failure import ExitCode
from penstock.cli.topics.diff import line_of, readable_of, tell_gap
from penstock.cli.topics.target import Server, run, server_options
from penstock.topics import WatchEvent, parse_match

__all__ = ["watch"]


@click.command()
@click.argument("topics", nargs=-1, required=True)
@server_options
@click.option("--from-start", is_flag=True, help="Also what is there already; else only what comes.")
@click.option("-n", "--limit", type=click.IntRange(min=1), metavar="N", help="Stop after N records.")
@click.option("--raw", is_flag=True, help="Only the data of the records, one per line.")
@click.option("--tag", metavar="TAG", help="Only records with this tag; a * at its end stands for anything.")
@click.option(
    "--node", "nodes", multiple=True, metavar="NAME", help="Leave out what NAME wrote; may be repeated."
)
@click.option("--fail-on-gap", is_flag=True, help="Stop with exit code 1 where records are gone.")
def watch(
    topics: tuple[str, ...],
    url: str,
    key: str | None,
    timeout: str,
    retry_for: str,
    as_json: bool,
    from_start: bool,
    limit: int | None,
    raw: bool,
    tag: str | None,
    nodes: tuple[str, ...],
    fail_on_gap: bool,
) -> int:
    """Print the records of TOPICS as they are written: topic, sequence, time, node, tag, data.

    A topic that ends in * stands for all that begin so, also those that appear later; quote it for the
    shell. It goes on until it is interrupted or every topic is gone, and comes back by itself when the
    server was away. A record that decoders may refuse is reported by its sequence on standard error.
    """
    if raw and as_json:
        raise click.UsageError("Give --raw or --json, not both.")
    form = "raw" if raw else "json" if as_json else "text"
    server = Server(url=url, key=key, timeout=timeout, retry_for=retry_for)
    start: int | Literal["tail"] = 0 if from_start else "tail"
    return run(_print(server, dict.fromkeys(topics, start), form, limit, tag, nodes, fail_on_gap))


async def _print(
    server: Server,
    starts: dict[str, int | Literal["tail"]],
    form: str,
    limit: int | None,
    tag: str | None,
    nodes: tuple[str, ...],
    fail_on_gap: bool,
) -> int:
    match = None if tag is None else parse_match(tag)
    async with server.client() as client:
        async for event in client.watch(starts, node=nodes, include_tags=True, match=match):
            if event.kind == "gap" and event.tombstone is not None:
                tell_gap(event.topic, event.tombstone, form)
                if fail_on_gap:
                    return ExitCode.PROBLEM
            shown = _show(event, form, limit)
            if limit is not None:
                limit -= shown
                if limit <= 0:
                    break
    return ExitCode.OK


def _show(event: WatchEvent, form: str, limit: int | None) -> int:
    """Print the records of an event, and how many that were."""
    if event.kind in ("deleted", "not_followed", "put_off"):
        said = event.message or f"{event.topic} was deleted"
        if event.kind == "put_off":
            said = f"{event.topic} is sent later: {said}"
        click.echo(f"note: {said}", err=True)
    fragments = event.fragments if limit is None else event.fragments[:limit]
    output = sys.stdout.buffer
    for fragment in readable_of(event.topic, fragments):
        output.write(_line(event.topic, fragment, form))
    output.flush()
    return len(fragments)


def _line(topic: str, fragment: bytes, form: str) -> bytes:
    if form == "json":
        return b'{"topic":%b,"record":%b}\n' % (msgspec.json.encode(topic), fragment)
    line = line_of(fragment, form)
    return line if form == "raw" else topic.encode() + b"\t" + line
