"""`penstock topics router`: routers, which copy the records of one topic into another."""

from __future__ import annotations

import dataclasses

import click

from penstock.cli.base import Output
from penstock.cli.output import print_pairs, print_table
from penstock.cli.topics.client import topics_command
from penstock.topics import (
    Client,
    RouterConfig,
    RouterPut,
    RouterState,
    RouterSummary,
    canonical,
    parse_match,
)


@topics_command()
@click.argument("name")
@click.argument("source")
@click.argument("dest")
@click.option("--tag", "match", help="Copy only records with this tag; a * at its end matches any suffix.")
@click.option("--drop-node", is_flag=True, help="Do not copy the node.")
@click.option("--drop-tag", is_flag=True, help="Do not copy the tag.")
@click.option("--exactly-once", is_flag=True, help="Record the origin of each copy; copy each record once.")
@click.option(
    "--allow-cycle", is_flag=True, help="Let records return to a topic they have passed, within 8 hops."
)
@click.option("--no-create", is_flag=True, help="Fail if DEST does not exist.")
async def put(
    client: Client,
    out: Output,
    name: str,
    source: str,
    dest: str,
    match: str | None,
    drop_node: bool,
    drop_tag: bool,
    exactly_once: bool,
    allow_cycle: bool,
    no_create: bool,
) -> None:
    """Create the router NAME, which copies records written to SOURCE from now on into DEST.

    An existing router keeps its position and takes the new flags.
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
    result = await client.put_router(name, config)
    title = f"{'created' if result.created else 'changed'} {result.router}"
    out.show(_document(result), lambda: print_pairs(_pairs(result.config), title))


@topics_command()
@click.argument("prefix", default="")
@click.option("--source", help="Only routers that copy from this topic.")
@click.option("--dest", help="Only routers that copy into this topic.")
async def ls(client: Client, out: Output, prefix: str, source: str | None, dest: str | None) -> None:
    """List the routers that the key may see and whose names begin with PREFIX."""
    found = [summary async for summary in client.routers(prefix, source=source, dest=dest)]
    out.show({"routers": found}, lambda: _print_routers(found, prefix))


def _print_routers(found: list[RouterSummary], prefix: str) -> None:
    if found:
        headers = ("router", "source", "dest", "guarantee", "copied")
        print_table(headers, [_row(summary) for summary in found], right=(4,))
    else:
        click.echo("no routers" + (f" that begin with {prefix}" if prefix else ""), err=True)


def _row(summary: RouterSummary) -> tuple[str, ...]:
    guarantee = summary.guarantee.replace("_", " ")
    return (summary.router, summary.source, summary.dest, guarantee, f"{summary.forwarded_total:,}")


@topics_command()
@click.argument("name")
async def stat(client: Client, out: Output, name: str) -> None:
    """Show the router NAME, after it has copied the records that exist now."""
    state = await client.router(name)
    pairs = [*_pairs(state.config), ("copied", f"{state.forwarded_total:,}")]
    out.show(_document(state), lambda: print_pairs(pairs, state.router))


@topics_command()
@click.argument("name")
async def delete(client: Client, out: Output, name: str) -> None:
    """Delete the router NAME. The records that it has copied stay."""
    result = await client.remove_router(name)
    out.show(
        dataclasses.asdict(result),
        f"removed {name}" if result.deleted else f"there was no router {name}",
    )


router = click.Group(
    "router",
    help="Copy the records of one topic into another.",
    commands={"put": put, "ls": ls, "stat": stat, "delete": delete},
)


def _document(answer: RouterPut | RouterState) -> dict[str, object]:
    """Return the router as a JSON object, with the filter in the server's notation."""
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
