"""`penstock topics stat`: one topic, or the server itself."""

from __future__ import annotations

import dataclasses

import click

from penstock.cli.display import print_json, print_pairs, time_text
from penstock.cli.failure import ExitCode
from penstock.cli.topics.put import config_pairs
from penstock.cli.topics.target import Server, run, server_options
from penstock.topics import Health, NotReady, TopicState
from penstock.units import format_duration, format_size

__all__ = ["stat"]


@click.command()
@click.argument("topic", required=False)
@server_options
def stat(topic: str | None, url: str, key: str | None, timeout: str, retry_for: str, as_json: bool) -> int:
    """Show TOPIC, or without one the server: is it up and ready, and what has it got.

    Asking does not count as reading. Exits with 3 if the server is not ready.
    """
    server = Server(url=url, key=key, timeout=timeout, retry_for=retry_for)
    if topic is None:
        return _show_server(server, as_json)
    state = run(_state(server, topic))
    if as_json:
        print_json(dataclasses.asdict(state) | {"config": state.config})
    else:
        print_pairs([*_state_pairs(state), *config_pairs(state.config)], state.topic)
    return ExitCode.OK


async def _state(server: Server, topic: str) -> TopicState:
    async with server.client() as client:
        return await client.state(topic, touch=False)


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
    health, waiting, metrics = run(_ask(server))
    if as_json:
        print_json({"url": server.url, "health": health, "ready": waiting is None, "metrics": metrics})
    else:
        print_pairs(_server_pairs(health, waiting, metrics), server.url)
    return ExitCode.OK if waiting is None else ExitCode.UNAVAILABLE


async def _ask(server: Server) -> tuple[Health, NotReady | None, dict[str, object]]:
    async with server.client() as client:
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
