"""`penstock topics delete`: records by position or tag, or a whole topic."""

from __future__ import annotations

import dataclasses
import sys

import click

from penstock.cli.display import print_json
from penstock.cli.failure import ExitCode
from penstock.cli.topics.target import Server, run, server_options
from penstock.topics import DeleteResult, Predicate, RemoveResult, counted
from penstock.units import format_size

__all__ = ["delete"]


@click.command()
@click.argument("topic")
@server_options
@click.option("--before", type=click.IntRange(min=0), metavar="SEQ", help="Every record before this one.")
@click.option("--tag", metavar="TEXT", help="Every record with this tag.")
@click.option("--tag-prefix", metavar="TEXT", help="Every record whose tag begins so.")
@click.option("--topic", "whole", is_flag=True, help="The topic itself, with all its records.")
@click.option("--if-empty", is_flag=True, help="With --topic: only if it holds no record.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask before --topic.")
def delete(
    topic: str,
    url: str,
    key: str | None,
    timeout: str,
    retry_for: str,
    as_json: bool,
    before: int | None,
    tag: str | None,
    tag_prefix: str | None,
    whole: bool,
    if_empty: bool,
    yes: bool,
) -> int:
    """Delete records of TOPIC for good: those before a sequence, those with a tag, or those that are both.

    Readers see no gap where records were deleted.
    """
    _check_selection(before, tag, tag_prefix, whole=whole, if_empty=if_empty)
    server = Server(url=url, key=key, timeout=timeout, retry_for=retry_for)
    if whole:
        if not yes and not if_empty:
            _confirm(topic)
        _tell_removed(run(_remove(server, topic, if_empty)), as_json)
        return ExitCode.OK
    _tell_deleted(run(_delete(server, topic, before, _predicate(tag, tag_prefix))), as_json)
    return ExitCode.OK


def _confirm(topic: str) -> None:
    if not sys.stdin.isatty():
        raise click.UsageError(f"{topic} would go with all its records, and nobody can be asked: give --yes.")
    click.confirm(f"Remove {topic} with all its records?", abort=True, err=True)


def _check_selection(
    before: int | None, tag: str | None, tag_prefix: str | None, *, whole: bool, if_empty: bool
) -> None:
    selects = before is not None or tag is not None or tag_prefix is not None
    if whole and selects:
        raise click.UsageError("--topic removes everything: give it without --before, --tag or --tag-prefix.")
    if not whole and not selects:
        raise click.UsageError("Say what to delete: --before, --tag, --tag-prefix, or --topic for all of it.")
    if tag is not None and tag_prefix is not None:
        raise click.UsageError("Give --tag or --tag-prefix, not both.")
    if if_empty and not whole:
        raise click.UsageError("--if-empty goes with --topic.")


def _predicate(tag: str | None, tag_prefix: str | None) -> Predicate | None:
    if tag_prefix is not None:
        return Predicate(value=tag_prefix, is_prefix=True)
    return None if tag is None else Predicate(value=tag)


async def _delete(
    server: Server, topic: str, before_seq: int | None, match: Predicate | None
) -> DeleteResult:
    async with server.client() as client:
        return await client.delete(topic, before_seq=before_seq, match=match)


async def _remove(server: Server, topic: str, if_empty: bool) -> RemoveResult:
    async with server.client() as client:
        return await client.remove_topic(topic, if_empty=if_empty)


def _tell_deleted(result: DeleteResult, as_json: bool) -> None:
    if as_json:
        print_json(dataclasses.asdict(result))
        return
    click.echo(
        f"deleted {counted(result.deleted, 'record')} of {result.topic}; "
        f"{result.count:,} left, {format_size(result.bytes)}"
    )


def _tell_removed(result: RemoveResult, as_json: bool) -> None:
    if as_json:
        print_json(dataclasses.asdict(result))
        return
    routers = f", and the routers {', '.join(result.routers_removed)}" if result.routers_removed else ""
    there = f"removed {result.topic}{routers}" if result.deleted else f"there was no topic {result.topic}"
    click.echo(there)
