"""`penstock topics put`, `ls`, `stat` and `delete`: topics, their configuration and their contents."""

from __future__ import annotations

import dataclasses
import sys

import click
import msgspec

from penstock.cli.base import Output, command, given_values, milliseconds, size_bytes
from penstock.cli.failure import ExitCode
from penstock.cli.output import print_pairs, print_table, time_text
from penstock.cli.topics.client import Server, server_options, topics_command
from penstock.topics import (
    Client,
    DeleteResult,
    Durability,
    Health,
    NotReady,
    Predicate,
    RemoveResult,
    TopicConfig,
    TopicNotFound,
    TopicState,
    TopicSummary,
    pluralise,
)
from penstock.units import format_duration, format_size


@topics_command()
@click.argument("topic")
@click.option("--keep", is_flag=True, help="Keep settings that are not given, instead of resetting them.")
@click.option(
    "--type", "type", type=click.Choice(["log", "queue"]), help="The kind of topic; cannot be changed later."
)
@click.option(
    "--durability",
    type=click.Choice([name.value for name in Durability]),
    help="What an acknowledgement guarantees [default: disk].",
)
@click.option(
    "--ttl", "ttl_ms", callback=milliseconds, metavar="DURATION",
    help="Records older than this expire; 0s never.",
)  # fmt: skip
@click.option(
    "--cap-records", type=click.IntRange(min=0), metavar="N", help="Maximum records; 0 means no cap."
)
@click.option("--cap-bytes", callback=size_bytes, metavar="SIZE", help="Maximum bytes; 0 means no cap.")
@click.option(
    "--discard", type=click.Choice(["old", "reject"]), help="At a cap: evict the oldest, or refuse writes."
)
@click.option(
    "--priority",
    type=click.IntRange(min=-1000, max=1000),
    metavar="N",
    help="Delivery priority, -1000 to 1000; by default it rises while the topic is being read.",
)
@click.option(
    "--idempotency-window", "idempotency_window_ms", callback=milliseconds, metavar="DURATION",
    help="How long idempotency keys are remembered [default: 2m].",
)  # fmt: skip
@click.option(
    "--lease", "lease_ms", callback=milliseconds, metavar="DURATION",
    help="Queue: how long a worker holds a job [default: 30s].",
)  # fmt: skip
@click.option(
    "--max-deliveries",
    type=click.IntRange(min=0),
    metavar="N",
    help="Queue: deliveries of a job before it becomes a dead letter; 0 means no limit.",
)
@click.option("--dead-letter", metavar="TOPIC", help="Queue: the topic for dead letters.")
@click.option(
    "--claim-jitter", "claim_jitter_ms", callback=milliseconds, metavar="DURATION",
    help="Queue: collect claims for this long, then share the jobs evenly.",
)  # fmt: skip
@click.option(
    "--leases-durable/--no-leases-durable", default=None, help="Queue: whether leases survive a restart."
)
@click.option(
    "--dedupe-node/--no-dedupe-node", default=None, help="Whether readers skip the records they wrote."
)
async def put(
    client: Client, out: Output, topic: str, keep: bool, durability: str | None, **settings: object
) -> None:
    """Create TOPIC, or replace its configuration. Settings that are not given are reset, unless --keep.

    A lower cap or a shorter lifetime applies immediately.
    """
    changes = given_values(settings)
    if durability is not None:
        level = Durability(durability)
        changes |= {"durability": level, "durable": level is Durability.FSYNC}
    config = TopicConfig()
    if keep:
        try:
            config = (await client.state(topic, touch=False)).config
        except TopicNotFound:
            pass
    result = await client.put_topic(topic, msgspec.structs.replace(config, **changes))
    title = f"{result.topic}: {'created' if result.created else 'updated'}"
    out.show(
        {"topic": result.topic, "created": result.created, "config": result.config},
        lambda: print_pairs(config_pairs(result.config), title),
    )


def config_pairs(config: TopicConfig) -> list[tuple[str, str]]:
    """Return a topic's configuration as names and values for display."""
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
            ("leases", "survive a restart" if config.leases_durable else "end with the process"),
        ]
    return pairs


def _cap(config: TopicConfig) -> str:
    parts = [pluralise(config.cap_records, "record")] if config.cap_records else []
    parts += [format_size(config.cap_bytes)] if config.cap_bytes else []
    then = "then the oldest are evicted" if config.discard == "old" else "then writes are refused"
    return f"{' or '.join(parts)}, {then}" if parts else "none"


@topics_command()
@click.argument("prefix", default="")
async def ls(client: Client, out: Output, prefix: str) -> None:
    """List the topics that the key may see and whose names begin with PREFIX."""
    found = [summary async for summary in client.topics(prefix)]
    out.show({"topics": found}, lambda: _print_topics(found, prefix))


def _print_topics(found: list[TopicSummary], prefix: str) -> None:
    if found:
        headers = ("topic", "records", "bytes", "earliest", "head", "durable", "priority")
        print_table(headers, [_topic_row(summary) for summary in found], right=(1, 2, 3, 4, 6))
    else:
        click.echo("no topics" + (f" that begin with {prefix}" if prefix else ""), err=True)


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


@topics_command()
@click.argument("topic", required=False)
async def stat(client: Client, out: Output, topic: str | None) -> int:
    """Show the state of TOPIC, or without TOPIC that of the server.

    This does not count as reading the topic. Exits with 3 if the server is not ready.
    """
    if topic is None:
        return await _show_server(client, out)
    state = await client.state(topic, touch=False)
    out.show(
        dataclasses.asdict(state) | {"config": state.config},
        lambda: print_pairs([*_state_pairs(state), *config_pairs(state.config)], state.topic),
    )
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


async def _show_server(client: Client, out: Output) -> int:
    health = await client.health()
    waiting: NotReady | None = None
    try:
        await client.ready()
    except NotReady as error:
        waiting = error
    metrics = await client.metrics()
    out.show(
        {"url": client.url, "health": health, "ready": waiting is None, "metrics": metrics},
        lambda: print_pairs(_server_pairs(health, waiting, metrics), client.url),
    )
    return ExitCode.OK if waiting is None else ExitCode.UNAVAILABLE


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


@command()
@click.argument("topic")
@click.option("--before", type=click.IntRange(min=0), metavar="SEQ", help="Records before this sequence.")
@click.option("--tag", metavar="TEXT", help="Records with this tag.")
@click.option("--tag-prefix", metavar="TEXT", help="Records whose tag begins with TEXT.")
@click.option("--topic", "whole", is_flag=True, help="The topic itself, with all its records.")
@click.option("--if-empty", is_flag=True, help="With --topic: only if it holds no record.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask before --topic.")
@server_options
def delete(
    topic: str,
    server: Server,
    out: Output,
    before: int | None,
    tag: str | None,
    tag_prefix: str | None,
    whole: bool,
    if_empty: bool,
    yes: bool,
) -> None:
    """Permanently delete records of TOPIC: those before a sequence, with a tag, or matching both.

    Readers see no gap where records were deleted.
    """
    _check_selection(before, tag, tag_prefix, whole=whole, if_empty=if_empty)
    if not whole:
        match = _predicate(tag, tag_prefix)
        deleted = server.run(lambda client: client.delete(topic, before_seq=before, match=match))
        out.show(dataclasses.asdict(deleted), _deleted_text(deleted))
        return
    # Not a coroutine: on an event loop, Ctrl-C would not end the prompt.
    if not yes and not if_empty:
        _confirm(topic)
    removed = server.run(lambda client: client.remove_topic(topic, if_empty=if_empty))
    out.show(dataclasses.asdict(removed), _removed_text(removed))


def _confirm(topic: str) -> None:
    if not sys.stdin.isatty():
        raise click.UsageError(
            f"This removes {topic} with all its records. There is no terminal to confirm that: give --yes."
        )
    click.confirm(f"Remove {topic} with all its records?", abort=True, err=True)


def _check_selection(
    before: int | None, tag: str | None, tag_prefix: str | None, *, whole: bool, if_empty: bool
) -> None:
    selects = before is not None or tag is not None or tag_prefix is not None
    if whole and selects:
        raise click.UsageError("--topic removes everything: give it without --before, --tag or --tag-prefix.")
    if not whole and not selects:
        raise click.UsageError("Select records with --before, --tag or --tag-prefix, or give --topic.")
    if tag is not None and tag_prefix is not None:
        raise click.UsageError("Give --tag or --tag-prefix, not both.")
    if if_empty and not whole:
        raise click.UsageError("--if-empty goes with --topic.")


def _predicate(tag: str | None, tag_prefix: str | None) -> Predicate | None:
    if tag_prefix is not None:
        return Predicate(value=tag_prefix, is_prefix=True)
    return None if tag is None else Predicate(value=tag)


def _deleted_text(result: DeleteResult) -> str:
    return (
        f"deleted {pluralise(result.deleted, 'record')} of {result.topic}; "
        f"{result.count:,} left, {format_size(result.bytes)}"
    )


def _removed_text(result: RemoveResult) -> str:
    routers = f", and the routers {', '.join(result.routers_removed)}" if result.routers_removed else ""
    return f"removed {result.topic}{routers}" if result.deleted else f"there was no topic {result.topic}"
