"""`penstock topics put`, `ls`, `stat` and `delete`: topics, how they keep records, and what is in them."""

from __future__ import annotations

import dataclasses
import sys

import click
import msgspec

from penstock.cli.failure import ExitCode
from penstock.cli.options import milliseconds, size_bytes
from penstock.cli.output import print_json, print_pairs, print_table, time_text
from penstock.cli.topics.client import Server, server_options
from penstock.topics import (
    Client,
    DeleteResult,
    Durability,
    Health,
    NotReady,
    Predicate,
    PutResult,
    RemoveResult,
    TopicConfig,
    TopicNotFound,
    TopicState,
    TopicSummary,
    pluralise,
)
from penstock.units import format_duration, format_size


@click.command()
@click.argument("topic")
@server_options
@click.option(
    "--keep", is_flag=True, help="Keep what is not given here, instead of setting it to its default."
)
@click.option(
    "--type", "kind", type=click.Choice(["log", "queue"]), help="What it is; cannot be changed later."
)
@click.option(
    "--durability",
    type=click.Choice([name.value for name in Durability]),
    help="What an ack means [default: disk].",
)
@click.option("--ttl", metavar="DURATION", help="Records older than this expire; 0s never.")
@click.option("--cap-records", type=click.IntRange(min=0), metavar="N", help="Records at most; 0 is no cap.")
@click.option("--cap-bytes", metavar="SIZE", help="Bytes of records at most; 0 is no cap.")
@click.option(
    "--discard", type=click.Choice(["old", "reject"]), help="At a cap: evict the oldest, or refuse."
)
@click.option(
    "--priority",
    type=click.IntRange(min=-1000, max=1000),
    metavar="N",
    help="How urgent it is, -1000 to 1000; unless given, it rises while somebody reads.",
)
@click.option("--idempotency-window", metavar="DURATION", help="How long keys are remembered [default: 2m].")
@click.option("--lease", metavar="DURATION", help="Queue: how long a worker holds a job [default: 30s].")
@click.option(
    "--max-deliveries",
    type=click.IntRange(min=0),
    metavar="N",
    help="Queue: how often a job is handed out before it goes to the dead letters; 0 is no limit.",
)
@click.option("--dead-letter", metavar="TOPIC", help="Queue: where jobs go that nobody could finish.")
@click.option("--claim-jitter", metavar="DURATION", help="Queue: gather claims this long and deal fairly.")
@click.option(
    "--leases-durable/--no-leases-durable", default=None, help="Queue: whether leases outlive the process."
)
@click.option("--dedupe-node/--no-dedupe-node", default=None, help="Whether readers skip what they wrote.")
def put(
    topic: str,
    server: Server,
    as_json: bool,
    keep: bool,
    **settings: str | int | bool | None,
) -> int:
    """Create TOPIC, or replace its config: what is not given here goes to its default, unless --keep.

    A tighter cap or lifetime takes effect at once.
    """
    changes = _changes(settings)
    result = server.run(lambda client: _put(client, topic, changes, keep))
    if as_json:
        print_json({"topic": result.topic, "created": result.created, "config": result.config})
    else:
        print_pairs(config_pairs(result.config), f"{result.topic}: {'created' if result.created else 'set'}")
    return ExitCode.OK


async def _put(client: Client, topic: str, changes: dict[str, object], keep: bool) -> PutResult:
    config = TopicConfig()
    if keep:
        try:
            config = (await client.state(topic, touch=False)).config
        except TopicNotFound:
            pass
    return await client.put_topic(topic, msgspec.structs.replace(config, **changes))


def _changes(given: dict[str, str | int | bool | None]) -> dict[str, object]:
    """The fields of a config that the options name."""
    changes: dict[str, object] = {name: value for name, value in given.items() if value is not None}
    if "kind" in changes:
        changes["type"] = changes.pop("kind")
    if "durability" in changes:
        durability = Durability(str(changes["durability"]))
        changes |= {"durability": durability, "durable": durability is Durability.FSYNC}
    for option, name in (
        ("ttl", "ttl_ms"),
        ("idempotency_window", "idempotency_window_ms"),
        ("lease", "lease_ms"),
        ("claim_jitter", "claim_jitter_ms"),
    ):
        if option in changes:
            changes[name] = milliseconds(f"--{option.replace('_', '-')}", str(changes.pop(option)))
    if "cap_bytes" in changes:
        changes["cap_bytes"] = size_bytes("--cap-bytes", str(changes["cap_bytes"]))
    return changes


def config_pairs(config: TopicConfig) -> list[tuple[str, str]]:
    """A config for people."""
    pairs = [
        ("type", config.type),
        ("durability", "-" if config.durability is None else config.durability.value),
        ("ttl", format_duration(config.ttl_ms / 1000) if config.ttl_ms else "none"),
        ("cap", _cap(config)),
        ("priority", "automatic" if config.priority is None else str(config.priority)),
        ("idempotency window", format_duration(config.idempotency_window_ms / 1000)),
        ("dedupe by node", "yes" if config.dedupe_node else "no"),
    ]
    if config.type == "queue":
        deliveries = str(config.max_deliveries) if config.max_deliveries else "unlimited"
        pairs += [
            ("lease", format_duration(config.lease_ms / 1000)),
            ("deliveries", deliveries),
            ("dead letters", config.dead_letter or "none"),
            ("leases", "outlive the process" if config.leases_durable else "end with the process"),
        ]
    return pairs


def _cap(config: TopicConfig) -> str:
    parts = [pluralise(config.cap_records, "record")] if config.cap_records else []
    parts += [format_size(config.cap_bytes)] if config.cap_bytes else []
    then = "then the oldest go" if config.discard == "old" else "then writes are refused"
    return f"{' or '.join(parts)}, {then}" if parts else "none"


@click.command()
@click.argument("prefix", default="")
@server_options
def ls(prefix: str, server: Server, as_json: bool) -> int:
    """List the topics whose names begin with PREFIX and that the key may see."""
    found = server.run(lambda client: _list_topics(client, prefix))
    if as_json:
        print_json({"topics": found})
    elif found:
        headers = ("topic", "records", "bytes", "earliest", "head", "durable", "priority")
        print_table(headers, [_topic_row(summary) for summary in found], right=(1, 2, 3, 4, 6))
    else:
        click.echo("no topics" + (f" that begin with {prefix}" if prefix else ""), err=True)
    return ExitCode.OK


async def _list_topics(client: Client, prefix: str) -> list[TopicSummary]:
    return [summary async for summary in client.topics(prefix)]


def _topic_row(summary: TopicSummary) -> tuple[str, ...]:
    return (
        summary.topic,
        f"{summary.count:,}",
        format_size(summary.bytes),
        str(summary.earliest_seq),
        str(summary.head_seq),
        "yes" if summary.durable else "no",
        str(summary.effective_priority),
    )


@click.command()
@click.argument("topic", required=False)
@server_options
def stat(topic: str | None, server: Server, as_json: bool) -> int:
    """Show TOPIC, or without one the server: is it up and ready, and what has it got.

    Asking does not count as reading. Exits with 3 if the server is not ready.
    """
    if topic is None:
        return _show_server(server, as_json)
    name = topic
    state = server.run(lambda client: client.state(name, touch=False))
    if as_json:
        print_json(dataclasses.asdict(state) | {"config": state.config})
    else:
        print_pairs([*_state_pairs(state), *config_pairs(state.config)], state.topic)
    return ExitCode.OK


def _state_pairs(state: TopicState) -> list[tuple[str, str]]:
    queue = state.queue
    jobs = [] if queue is None else [("jobs", f"{queue.ready:,} ready, {queue.in_flight:,} held")]
    dead = [] if queue is None else [("dead-lettered", f"{queue.dead_lettered:,}")]
    return [
        *jobs,
        *dead,
        ("records", f"{state.count:,}, {format_size(state.bytes)}"),
        ("earliest", str(state.earliest_seq) if state.count else "- (empty)"),
        ("head", str(state.head_seq)),
        ("last write", "-" if state.last_write_ms is None else time_text(state.last_write_ms)),
        ("last read", "-" if state.last_read_ms is None else time_text(state.last_read_ms)),
        ("effective priority", str(state.effective_priority)),
    ]


def _show_server(server: Server, as_json: bool) -> int:
    health, waiting, metrics = server.run(_ask)
    if as_json:
        print_json({"url": server.url, "health": health, "ready": waiting is None, "metrics": metrics})
    else:
        print_pairs(_server_pairs(health, waiting, metrics), server.url)
    return ExitCode.OK if waiting is None else ExitCode.UNAVAILABLE


async def _ask(client: Client) -> tuple[Health, NotReady | None, dict[str, object]]:
    health = await client.health()
    waiting: NotReady | None = None
    try:
        await client.ready()
    except NotReady as error:
        waiting = error
    return health, waiting, await client.metrics()


def _server_pairs(
    health: Health, waiting: NotReady | None, metrics: dict[str, object]
) -> list[tuple[str, str]]:
    def number(name: str) -> int:
        value = metrics.get(name)
        return value if isinstance(value, int) else 0

    wal = metrics.get("wal")
    fsyncs = wal.get("fsyncs") if isinstance(wal, dict) else None
    return [
        ("status", f"{health.status}, " + ("ready" if waiting is None else f"not ready: {waiting}")),
        ("version", health.version or "-"),
        ("up for", format_duration(health.uptime_ms / 1000)),
        ("topics", f"{number('topics'):,}"),
        ("records", f"{number('records_live'):,}, {format_size(number('bytes_live'))}"),
        ("log syncs", "-" if not isinstance(fsyncs, int) else f"{fsyncs:,}"),
    ]


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
    server: Server,
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
    if whole:
        if not yes and not if_empty:
            _confirm(topic)
        _print_removed(server.run(lambda client: client.remove_topic(topic, if_empty=if_empty)), as_json)
        return ExitCode.OK
    match = _predicate(tag, tag_prefix)
    _print_deleted(server.run(lambda client: client.delete(topic, before_seq=before, match=match)), as_json)
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


def _print_deleted(result: DeleteResult, as_json: bool) -> None:
    if as_json:
        print_json(dataclasses.asdict(result))
        return
    click.echo(
        f"deleted {pluralise(result.deleted, 'record')} of {result.topic}; "
        f"{result.count:,} left, {format_size(result.bytes)}"
    )


def _print_removed(result: RemoveResult, as_json: bool) -> None:
    if as_json:
        print_json(dataclasses.asdict(result))
        return
    routers = f", and the routers {', '.join(result.routers_removed)}" if result.routers_removed else ""
    there = f"removed {result.topic}{routers}" if result.deleted else f"there was no topic {result.topic}"
    click.echo(there)
