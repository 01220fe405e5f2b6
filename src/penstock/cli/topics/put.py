"""`penstock topics put`: create a topic, or give it a config."""

from __future__ import annotations

import click
import msgspec

from penstock.cli.display import print_json, print_pairs
from penstock.cli.failure import ExitCode
from penstock.cli.topics.target import Server, run, server_options
from penstock.errors import ConfigError
from penstock.topics import Durability, PutResult, TopicConfig, TopicNotFound, counted
from penstock.units import format_duration, format_size, parse_duration, parse_size

__all__ = ["config_pairs", "put"]


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
    url: str,
    key: str | None,
    timeout: str,
    retry_for: str,
    as_json: bool,
    keep: bool,
    **settings: str | int | bool | None,
) -> int:
    """Create TOPIC, or replace its config: what is not given here goes to its default, unless --keep.

    A tighter cap or lifetime takes effect at once.
    """
    server = Server(url=url, key=key, timeout=timeout, retry_for=retry_for)
    result = run(_put(server, topic, _changes(settings), keep))
    if as_json:
        print_json({"topic": result.topic, "created": result.created, "config": result.config})
    else:
        print_pairs(config_pairs(result.config), f"{result.topic}: {'created' if result.created else 'set'}")
    return ExitCode.OK


async def _put(server: Server, topic: str, changes: dict[str, object], keep: bool) -> PutResult:
    async with server.client() as client:
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
            changes[name] = _milliseconds(f"--{option.replace('_', '-')}", str(changes.pop(option)))
    if "cap_bytes" in changes:
        changes["cap_bytes"] = _size("--cap-bytes", str(changes["cap_bytes"]))
    return changes


def _milliseconds(option: str, text: str) -> int:
    try:
        return round(parse_duration(text) * 1000)
    except ConfigError as error:
        raise click.BadParameter(str(error), param_hint=f"'{option}'") from error


def _size(option: str, text: str) -> int:
    try:
        return parse_size(text)
    except ConfigError as error:
        raise click.BadParameter(str(error), param_hint=f"'{option}'") from error


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
    parts = [counted(config.cap_records, "record")] if config.cap_records else []
    parts += [format_size(config.cap_bytes)] if config.cap_bytes else []
    then = "then the oldest go" if config.discard == "old" else "then writes are refused"
    return f"{' or '.join(parts)}, {then}" if parts else "none"
