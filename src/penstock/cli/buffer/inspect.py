"""`penstock buffer stat`, `tail` and `dump`: inspect a queue, without fencing or acknowledging anything."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import msgspec

from penstock.buffer import (
    FOOTER_BYTES,
    MANIFEST_VERSION,
    BatchDescriptor,
    BatchMissing,
    CompressionType,
    ConsumedBatch,
    ConsumerConfig,
    Entry,
    Manifest,
    Metadata,
    QueueSurvey,
    decode_batch,
    decode_manifest,
    find_tag,
    survey,
)
from penstock.cli.base import Output, command
from penstock.cli.buffer.target import (
    Queue,
    QueueOptions,
    Target,
    queue_command,
    queue_options,
    queues_of,
)
from penstock.cli.failure import ExitCode, report
from penstock.cli.output import print_json, print_pairs, print_table, time_text
from penstock.clock import SYSTEM_CLOCK
from penstock.errors import InvalidInput, NotFound, PenstockError
from penstock.units import format_duration, format_size

Surveys = list[tuple[int | None, QueueSurvey]]
POLL_S = 0.25
ENTRIES_PER_READ = 100


@queue_command()
async def stat(target: Target, out: Output) -> None:
    """Show the state of the queue at STORE, and of every shard if it is sharded.

    Reads only. Acknowledged batches are removed from the manifest a hundred at a time, so up to 99 of them
    may still be shown for a consumer that keeps up.
    """
    url, surveys = await _survey(target)
    out.show(_survey_object(url, surveys), lambda: _print_surveys(url, surveys))


def _print_surveys(url: str, surveys: Surveys) -> None:
    if len(surveys) == 1:
        print_pairs(_survey_pairs(surveys[0][1]), f"{surveys[0][1].manifest} in {url}")
    else:
        click.echo(click.style(f"{len(surveys)} queues in {url}", bold=True))
        _print_shards(surveys)


async def _survey(target: Target) -> tuple[str, Surveys]:
    async with target.open(ConsumerConfig) as config:
        queues = await queues_of(config)
        return queues[0].store.url, [(queue.shard, await _survey_one(queue)) for queue in queues]


async def _survey_one(queue: Queue) -> QueueSurvey:
    grace_ms = int(queue.config.gc_grace_period_s * 1000)
    return await survey(queue.reader, queue.prefix, now_ms=SYSTEM_CLOCK.now_ms(), grace_ms=grace_ms)


def _survey_object(url: str, surveys: Surveys) -> dict[str, object]:
    queues = [{"shard": shard, **dataclasses.asdict(found)} for shard, found in surveys]
    totals = {
        name: sum(getattr(found, name) for _, found in surveys)
        for name in ("queue_length", "data_objects", "data_bytes", "unreferenced_objects", "dead_letters")
    }
    lags = [found.ingestion_lag_ms for _, found in surveys if found.ingestion_lag_ms is not None]
    return {"store": url, "queues": queues, "total": {**totals, "ingestion_lag_ms": max(lags, default=None)}}


def _survey_pairs(found: QueueSurvey) -> list[tuple[str, str]]:
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


def _start(ctx: click.Context, option: click.Parameter, text: str) -> int | str:
    if text in ("earliest", "latest"):
        return text
    if text.isascii() and text.isdigit():
        return int(text)
    raise click.BadParameter(f"{text!r} is neither earliest, latest nor a sequence number")


@queue_command()
@click.option(
    "--from",
    "start",
    callback=_start,
    default="earliest",
    show_default=True,
    metavar="earliest|latest|SEQ",
    help="Where to begin.",
)
@click.option("--follow", "-f", is_flag=True, help="Wait for more records; Ctrl-C ends the command.")
@click.option("--limit", "-n", type=click.IntRange(min=0), help="Stop after this many records.")
@click.option("--raw", "form", flag_value="raw", help="Print only the records, one per line, unchanged.")
@click.option("--hex", "form", flag_value="hex", help="Print records in hexadecimal.")
async def tail(
    target: Target, out: Output, start: int | str, follow: bool, limit: int | None, form: str | None
) -> int:
    """Print the records in the queue at STORE: sequence:index, ingestion time, metadata, record.

    Reads next to a running consumer, without a trace. Consumed records are no longer in the queue. With
    --json, each record is printed as an object on its own line.
    """
    if out.is_json and form is not None:
        raise click.UsageError(f"Give --json or --{form}, not both.")
    form = "json" if out.is_json else form or "text"
    left = _Budget(limit)
    async with target.open(ConsumerConfig) as config:
        queues = await queues_of(config, required=not follow)
        positions = {queue.shard: await _first_position(queue, start) for queue in queues}
        missing = 0
        while not left.spent:
            found = False
            for queue in queues:
                for descriptor in await queue.reader.entries(positions[queue.shard], ENTRIES_PER_READ):
                    if left.spent:
                        break
                    found = True
                    missing += not await _print_batch(queue, descriptor, form, left)
                    positions[queue.shard] = descriptor.sequence
            if found:
                continue
            if not follow:
                break
            await asyncio.sleep(POLL_S)
    return ExitCode.PROBLEM if missing else ExitCode.OK


@dataclass(slots=True)
class _Budget:
    left: int | None

    @property
    def spent(self) -> bool:
        return self.left is not None and self.left <= 0

    def take(self) -> None:
        if self.left is not None:
            self.left -= 1


async def _first_position(queue: Queue, start: int | str) -> int | None:
    """Return the sequence after which to start."""
    if start == "earliest":
        return None
    if start == "latest":
        index = await queue.reader.index()
        return index.footer.next_sequence - 1 if index.footer.next_sequence else None
    return int(start) - 1 if int(start) > 0 else None


async def _print_batch(queue: Queue, descriptor: BatchDescriptor, form: str, left: _Budget) -> bool:
    """Print one batch. Return False if it is in the queue but its object is missing."""
    try:
        batch = await queue.reader.fetch(descriptor)
    except BatchMissing as error:
        queued = {location for _, location in (await queue.reader.index()).locations()}
        if descriptor.location not in queued:
            click.echo(f"sequence {descriptor.sequence} was consumed meanwhile; skipped", err=True)
            return True
        click.echo(f"error: {error}", err=True)
        return False
    output = sys.stdout.buffer
    for line in _record_lines(batch, queue.shard, form):
        if left.spent:
            break
        output.write(line + b"\n")
        left.take()
    output.flush()
    return True


def _record_lines(batch: ConsumedBatch, shard: int | None, form: str) -> Iterator[bytes]:
    metas = sorted(batch.metadata, key=lambda meta: meta.start_index)
    place = -1
    for number, record in enumerate(batch.entries):
        while place + 1 < len(metas) and metas[place + 1].start_index <= number:
            place += 1
        meta = metas[place] if place >= 0 else None
        if form == "raw":
            yield record
        elif form == "json":
            yield msgspec.json.encode(_record_object(batch, shard, number, record, meta))
        else:
            yield _record_text(batch, shard, number, record, meta, form)


def _record_text(
    batch: ConsumedBatch, shard: int | None, number: int, record: bytes, meta: Metadata | None, form: str
) -> bytes:
    at = f"{batch.sequence}:{number}" if shard is None else f"{shard:04d}/{batch.sequence}:{number}"
    when = time_text(meta.ingestion_time_ms) if meta else "-"
    payload = _readable(meta.payload) if meta and meta.payload else "-"
    body = record.hex() if form == "hex" else _readable(record)
    return f"{at}\t{when}\t{payload}\t{body}".encode()


def _record_object(
    batch: ConsumedBatch, shard: int | None, number: int, record: bytes, meta: Metadata | None
) -> dict[str, object]:
    shown: dict[str, object] = {"sequence": batch.sequence, "index": number}
    if shard is not None:
        shown["shard"] = shard
    shown["ingestion_time_ms"] = meta.ingestion_time_ms if meta else None
    shown["metadata_base64"] = base64.b64encode(meta.payload if meta else b"").decode()
    shown["record_base64"] = base64.b64encode(record).decode()
    return shown


def _readable(data: bytes) -> str:
    """Return the text, with characters escaped that could affect a terminal or a column."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return repr(data)[2:-1]
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@command()
@click.option("--batch", metavar="KEY|SEQ", help="Dump this batch instead of the manifest.")
@click.option("--shard", type=click.IntRange(min=0), help="The shard, if the queue is sharded.")
@queue_options
def dump(queue: QueueOptions, out: Output, batch: str | None, shard: int | None) -> int:
    """Print the manifest of the queue at STORE, or a local manifest file, as JSON.

    With --batch, print a batch, given by its sequence or key, with its records in base64. Any error ends
    with exit code 1.
    """
    try:
        if queue.store is not None and os.path.isfile(queue.store):
            print_json(_dump_file(queue.store, batch))
        else:
            print_json(asyncio.run(_dump(queue.target(), batch, shard)))
    except PenstockError as error:
        report(error)
        return ExitCode.PROBLEM
    return ExitCode.OK


def _dump_file(path: str, batch: str | None) -> dict[str, object]:
    if batch is not None:
        raise InvalidInput(f"{path} is a file; --batch needs the store that the batch is in")
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise NotFound(f"{path} cannot be read: {error.strerror}") from error
    return _manifest_object(decode_manifest(raw))


async def _dump(target: Target, batch: str | None, shard: int | None) -> dict[str, object]:
    async with target.open(ConsumerConfig) as config:
        if batch is not None and not batch.isdigit():
            plain = await queues_of(config, required=False)
            return await _batch_object(plain[0], batch, None)
        queue = _choose(await queues_of(config), shard)
        if batch is None:
            return _manifest_object(decode_manifest((await queue.reader.require()).raw))
        return await _queued_batch(queue, int(batch))


def _choose(queues: list[Queue], shard: int | None) -> Queue:
    chosen = [queue for queue in queues if queue.shard == shard]
    if chosen:
        return chosen[0]
    shards = sum(queue.shard is not None for queue in queues)
    if shard is None:
        raise InvalidInput(f"the queue has {shards} shards: choose one with --shard 0 to {shards - 1}")
    if not shards:
        raise InvalidInput("the queue is not sharded: leave --shard out")
    raise InvalidInput(f"there is no shard {shard}: the queue has 0 to {shards - 1}")


async def _queued_batch(queue: Queue, sequence: int) -> dict[str, object]:
    index = await queue.reader.index()
    if not index.first <= sequence < index.footer.next_sequence:
        range_text = f"{index.first} to {index.footer.next_sequence - 1}" if len(index) else "no batches"
        raise NotFound(f"sequence {sequence} is not in the queue, which holds {range_text}")
    return await _batch_object(queue, index[sequence - index.first].location, sequence)


async def _batch_object(queue: Queue, location: str, sequence: int | None) -> dict[str, object]:
    try:
        data = (await queue.store.get(location)).data
    except NotFound as error:
        raise NotFound(f"there is no batch {location} in {queue.store.url}") from error
    block = decode_batch(data, bytes_max=queue.config.batch_bytes_max)
    return {
        "sequence": sequence,
        "location": location,
        "object_bytes": len(data),
        "compression": CompressionType(data[len(data) - FOOTER_BYTES]).name.lower(),
        "record_count": len(block),
        "records": [base64.b64encode(record).decode() for record in block.to_list()],
    }


def _manifest_object(found: Manifest) -> dict[str, object]:
    """Return the manifest as other tools of the format print it; `transaction` only if there is one."""
    return {
        "version": MANIFEST_VERSION,
        "epoch": found.footer.epoch,
        "next_sequence": found.footer.next_sequence,
        "entries": [
            {
                "sequence": entry.sequence,
                "location": entry.location,
                "metadata": [
                    {
                        "start_index": meta.start_index,
                        "ingestion_time_ms": meta.ingestion_time_ms,
                        "payload_base64": base64.b64encode(meta.payload).decode(),
                    }
                    for meta in entry.metadata
                ],
                **_transaction_object(entry),
            }
            for entry in found.entries
        ],
    }


def _transaction_object(entry: Entry) -> dict[str, object]:
    tag = find_tag(entry.tail)
    return {} if tag is None else {"transaction": {"app": tag.app, "version": tag.version}}
