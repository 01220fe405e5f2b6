"""`penstock topics router`: copy what is written to a topic into another one."""

from __future__ import annotations

import dataclasses

import click

from penstock.cli.failure import ExitCode
from penstock.cli.output import print_json, print_pairs, print_table
from penstock.cli.topics.client import Server, server_options
from penstock.topics import (
    Client,
    RouterConfig,
    RouterPut,
    RouterState,
    RouterSummary,
    canonical,
    parse_match,
)


@click.group()
def router() -> None:
    """Copy what is written to a topic into another one."""


@router.command()
@click.argument("name")
@click.argument("source")
@click.argument("dest")
@click.option("--tag", "match", help="Copy only records with this tag; with a * at its end, with such tags.")
@click.option("--drop-node", is_flag=True, help="Copies have no origin.")
@click.option("--drop-tag", is_flag=True, help="Copies have no tag.")
@click.option("--exactly-once", is_flag=True, help="Copies say where they come from; none is made twice.")
@click.option(
    "--allow-cycle", is_flag=True, help="Records may come back to where they were, 8 times at most."
)
@click.option("--no-create", is_flag=True, help="Fail if DEST is not there.")
@server_options
def put(
    name: str,
    source: str,
    dest: str,
    match: str | None,
    drop_node: bool,
    drop_tag: bool,
    exactly_once: bool,
    allow_cycle: bool,
    no_create: bool,
    server: Server,
    as_json: bool,
) -> int:
    """Have the router NAME copy what is written to SOURCE from now on into DEST.

    A router that is there keeps its place and takes over the flags.
    """
    config = RouterConfig(
        source=source,
        dest=dest,
        preserve_node=not drop_node,
        preserve_tag=not drop_tag,
        create_dest=not no_create,
        filter=None if match is None else parse_match(match),
        allow_cycle=allow_cycle,
        guarantee="exactly_once" if exactly_once else "at_least_once",
    )
    result = server.run(lambda client: client.put_router(name, config))
    if as_json:
        print_json(_members(result))
    else:
        done = "created" if result.created else "changed"
        print_pairs(_pairs(result.config), f"{done} {result.router}")
    return ExitCode.OK


@router.command()
@click.argument("prefix", default="")
@click.option("--source", help="Only routers that begin at this topic.")
@click.option("--dest", help="Only routers that end at this topic.")
@server_options
def ls(
    prefix: str,
    source: str | None,
    dest: str | None,
    server: Server,
    as_json: bool,
) -> int:
    """List the routers whose names begin with PREFIX and that the key may see."""
    found = server.run(lambda client: _list(client, prefix, source, dest))
    if as_json:
        print_json({"routers": found})
    elif found:
        headers = ("router", "source", "dest", "guarantee", "copied")
        print_table(headers, [_row(summary) for summary in found], right=(4,))
    else:
        click.echo("no routers" + (f" that begin with {prefix}" if prefix else ""), err=True)
    return ExitCode.OK


async def _list(client: Client, prefix: str, source: str | None, dest: str | None) -> list[RouterSummary]:
    return [summary async for summary in client.routers(prefix, source=source, dest=dest)]


def _row(summary: RouterSummary) -> tuple[str, ...]:
    guarantee = summary.guarantee.replace("_", " ")
    return (summary.router, summary.source, summary.dest, guarantee, f"{summary.forwarded_total:,}")


@router.command()
@click.argument("name")
@server_options
def stat(name: str, server: Server, as_json: bool) -> int:
    """Show the router NAME, after it has copied what there is."""
    state = server.run(lambda client: client.router(name))
    if as_json:
        print_json(_members(state))
    else:
        print_pairs([*_pairs(state.config), ("copied", f"{state.forwarded_total:,}")], state.router)
    return ExitCode.OK


@router.command()
@click.argument("name")
@server_options
def delete(name: str, server: Server, as_json: bool) -> int:
    """Delete the router NAME. What it copied stays."""
    result = server.run(lambda client: client.remove_router(name))
    if as_json:
        print_json(dataclasses.asdict(result))
    else:
        click.echo(f"removed {name}" if result.deleted else f"there was no router {name}")
    return ExitCode.OK


def _members(answer: RouterPut | RouterState) -> dict[str, object]:
    """As it is shown to machines: the filter as the server spells it."""
    match = answer.config.filter
    config = dataclasses.asdict(answer.config) | {"filter": None if match is None else canonical(match)}
    return dataclasses.asdict(answer) | {"config": config}


def _pairs(config: RouterConfig) -> list[tuple[str, str]]:
    kept = [
        what for what, is_kept in (("node", config.preserve_node), ("tag", config.preserve_tag)) if is_kept
    ]
    return [
        ("source", config.source),
        ("dest", config.dest),
        ("filter", "all records" if config.filter is None else canonical(config.filter)[2]),
        ("keeps", " and ".join(kept) or "neither node nor tag"),
        ("guarantee", config.guarantee.replace("_", " ")),
        ("cycles", "allowed" if config.allow_cycle else "refused"),
    ]
