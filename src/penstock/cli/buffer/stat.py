"""`penstock buffer stat`: how long a queue is, how far behind its consumer is, and what lies around it."""

from __future__ import annotations

import dataclasses

import click

from penstock.buffer import ConsumerConfig, QueueSurvey, survey
from penstock.cli.buffer.target import Queue, Target, queue_options, queues_of, run
from penstock.cli.display import print_json, print_pairs, print_table, time_text
from penstock.cli.failure import ExitCode
from penstock.clock import SYSTEM_CLOCK
from penstock.units import format_duration, format_size

__all__ = ["stat"]

Surveys = list[tuple[int | None, QueueSurvey]]


@click.command()
@queue_options
def stat(
    store: str | None,
    manifest: str | None,
    prefix: str | None,
    config: str | None,
    store_options: tuple[str, ...],
    as_json: bool,
) -> int:
    """Show the state of the queue at STORE, of every shard if it is sharded.

    Reads only. Acknowledged batches leave the manifest a hundred at a time, so a consumer that keeps up
    may still show up to 99 of them.
    """
    target = Target.of(store, config=config, manifest=manifest, prefix=prefix, store_options=store_options)
    url, surveys = run(_survey(target))
    if as_json:
        print_json(_object(url, surveys))
    elif len(surveys) == 1:
        print_pairs(_pairs(surveys[0][1]), f"{surveys[0][1].manifest} in {url}")
    else:
        click.echo(click.style(f"{len(surveys)} queues in {url}", bold=True))
        _print_shards(surveys)
    return ExitCode.OK


async def _survey(target: Target) -> tuple[str, Surveys]:
    async with target.open(ConsumerConfig) as config:
        queues = await queues_of(config)
        return queues[0].store.url, [(queue.shard, await _survey_one(queue)) for queue in queues]


async def _survey_one(queue: Queue) -> QueueSurvey:
    grace_ms = int(queue.config.gc_grace_period_s * 1000)
    return await survey(queue.reader, queue.prefix, now_ms=SYSTEM_CLOCK.now_ms(), grace_ms=grace_ms)


def _object(url: str, surveys: Surveys) -> dict[str, object]:
    queues = [{"shard": shard, **dataclasses.asdict(found)} for shard, found in surveys]
    totals = {
        name: sum(getattr(found, name) for _, found in surveys)
        for name in ("queue_length", "data_objects", "data_bytes", "unreferenced_objects", "dead_letters")
    }
    lags = [found.ingestion_lag_ms for _, found in surveys if found.ingestion_lag_ms is not None]
    return {"store": url, "queues": queues, "total": {**totals, "ingestion_lag_ms": max(lags, default=None)}}


def _pairs(found: QueueSurvey) -> list[tuple[str, str]]:
    return [
        ("queue length", f"{found.queue_length:,} {'batch' if found.queue_length == 1 else 'batches'}"),
        ("first sequence", str(found.first_sequence) if found.queue_length else "- (empty)"),
        ("next sequence", str(found.next_sequence)),
        ("epoch", f"{found.epoch}" + ("" if found.epoch else " (no consumer yet)")),
        ("manifest", format_size(found.manifest_bytes)),
        ("oldest entry", _age(found.oldest_entry_age_ms)),
        ("newest entry", _age(found.newest_entry_age_ms)),
        ("ingestion lag", _age(found.ingestion_lag_ms, "behind")),
        ("data objects", f"{found.data_objects:,}, {format_size(found.data_bytes)}"),
        ("unreferenced", f"{found.unreferenced_objects:,}, {format_size(found.unreferenced_bytes)}"),
        ("  collectable", f"{found.collectable_objects:,} past the grace period"),
        ("foreign objects", f"{found.foreign_objects:,}"),
        ("dead letters", f"{found.dead_letters:,}"),
        ("floor", "none" if found.floor_ms is None else time_text(found.floor_ms)),
        ("sealed floor", "none" if found.sealed_ms is None else time_text(found.sealed_ms)),
    ]


def _print_shards(surveys: Surveys) -> None:
    headers = (
        "shard",
        "length",
        "first",
        "next",
        "epoch",
        "manifest",
        "lag",
        "objects",
        "bytes",
        "unused",
        "dead",
    )
    rows = [
        (
            "-" if shard is None else f"{shard:04d}",
            f"{found.queue_length:,}",
            str(found.first_sequence),
            str(found.next_sequence),
            str(found.epoch),
            format_size(found.manifest_bytes),
            _age(found.ingestion_lag_ms, ""),
            f"{found.data_objects:,}",
            format_size(found.data_bytes),
            f"{found.unreferenced_objects:,}",
            f"{found.dead_letters:,}",
        )
        for shard, found in surveys
    ]
    lags = [found.ingestion_lag_ms for _, found in surveys if found.ingestion_lag_ms is not None]
    total = (
        "total",
        f"{sum(found.queue_length for _, found in surveys):,}",
        "",
        "",
        "",
        format_size(sum(found.manifest_bytes for _, found in surveys)),
        _age(max(lags, default=None), ""),
        f"{sum(found.data_objects for _, found in surveys):,}",
        format_size(sum(found.data_bytes for _, found in surveys)),
        f"{sum(found.unreferenced_objects for _, found in surveys):,}",
        f"{sum(found.dead_letters for _, found in surveys):,}",
    )
    print_table(headers, [*rows, total], right=range(1, len(headers)))


def _age(age_ms: int | None, suffix: str = "old") -> str:
    return "-" if age_ms is None else f"{format_duration(age_ms / 1000)} {suffix}".rstrip()
