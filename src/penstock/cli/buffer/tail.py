"""`penstock buffer tail`: records as they stand in the queue. Nothing is fenced, nothing is acknowledged."""

from __future__ import annotations

import asyncio
import base64
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import click
import msgspec

from penstock.buffer import BatchDescriptor, BatchMissing, ConsumedBatch, ConsumerConfig, Metadata
from penstock.cli.buffer.target import Queue, Target, queue_options, queues_of, run
from penstock.cli.display import time_text
from penstock.cli.failure import ExitCode

__all__ = ["tail"]

POLL_S = 0.25
ENTRIES_PER_READ = 100


def _start(ctx: click.Context, option: click.Parameter, text: str) -> int | str:
    if text in ("earliest", "latest"):
        return text
    if text.isascii() and text.isdigit():
        return int(text)
    raise click.BadParameter(f"{text!r} is neither earliest, latest nor a sequence number")


@click.command()
@queue_options
@click.option(
    "--from",
    "start",
    callback=_start,
    default="earliest",
    show_default=True,
    metavar="earliest|latest|SEQ",
    help="Where to begin.",
)
@click.option("--follow", "-f", is_flag=True, help="Wait for more; Ctrl-C ends it.")
@click.option("--limit", "-n", type=click.IntRange(min=0), help="Stop after this many records.")
@click.option("--raw", "form", flag_value="raw", help="Only the records, one per line, as they are.")
@click.option("--hex", "form", flag_value="hex", help="Records in hexadecimal.")
def tail(
    store: str | None,
    manifest: str | None,
    prefix: str | None,
    config: str | None,
    store_options: tuple[str, ...],
    as_json: bool,
    start: int | str,
    follow: bool,
    limit: int | None,
    form: str | None,
) -> int:
    """Print the records in the queue at STORE: sequence:index, time taken in, metadata, record.

    Reads beside a running consumer and leaves no trace. What was consumed is no longer in the queue.
    With --json there is one object per line.
    """
    if as_json and form is not None:
        raise click.UsageError(f"Give --json or --{form}, not both.")
    target = Target.of(store, config=config, manifest=manifest, prefix=prefix, store_options=store_options)
    return run(_tail(target, start, follow, limit, "json" if as_json else form or "text"))


async def _tail(target: Target, start: int | str, follow: bool, limit: int | None, form: str) -> int:
    left = _Budget(limit)
    async with target.open(ConsumerConfig) as config:
        queues = await queues_of(config, required=not follow)
        positions = {queue.shard: await _before(queue, start) for queue in queues}
        missing = 0
        while not left.spent:
            found = False
            for queue in queues:
                for descriptor in await queue.reader.entries(positions[queue.shard], ENTRIES_PER_READ):
                    if left.spent:
                        break
                    found = True
                    missing += not await _show(queue, descriptor, form, left)
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


async def _before(queue: Queue, start: int | str) -> int | None:
    """The sequence after which to begin."""
    if start == "earliest":
        return None
    if start == "latest":
        index = await queue.reader.index()
        return index.footer.next_sequence - 1 if index.footer.next_sequence else None
    return int(start) - 1 if int(start) > 0 else None


async def _show(queue: Queue, descriptor: BatchDescriptor, form: str, left: _Budget) -> bool:
    """Print one batch. False if it is in the queue but cannot be found."""
    try:
        batch = await queue.reader.fetch(descriptor)
    except BatchMissing as error:
        queued = {location for _, location in (await queue.reader.index()).locations()}
        if descriptor.location not in queued:
            click.echo(f"sequence {descriptor.sequence} was consumed while it was read; skipped", err=True)
            return True
        click.echo(f"error: {error}", err=True)
        return False
    output = sys.stdout.buffer
    for line in _lines(batch, queue.shard, form):
        if left.spent:
            break
        output.write(line + b"\n")
        left.take()
    output.flush()
    return True


def _lines(batch: ConsumedBatch, shard: int | None, form: str) -> Iterator[bytes]:
    metas = sorted(batch.metadata, key=lambda meta: meta.start_index)
    place = -1
    for number, record in enumerate(batch.entries):
        while place + 1 < len(metas) and metas[place + 1].start_index <= number:
            place += 1
        meta = metas[place] if place >= 0 else None
        if form == "raw":
            yield record
        elif form == "json":
            yield msgspec.json.encode(_object(batch, shard, number, record, meta))
        else:
            yield _text(batch, shard, number, record, meta, form)


def _text(
    batch: ConsumedBatch, shard: int | None, number: int, record: bytes, meta: Metadata | None, form: str
) -> bytes:
    at = f"{batch.sequence}:{number}" if shard is None else f"{shard:04d}/{batch.sequence}:{number}"
    when = time_text(meta.ingestion_time_ms) if meta else "-"
    payload = _readable(meta.payload) if meta and meta.payload else "-"
    body = record.hex() if form == "hex" else _readable(record)
    return f"{at}\t{when}\t{payload}\t{body}".encode()


def _object(
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
    """Text as it is; anything that would disturb a terminal or a column escaped."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return repr(data)[2:-1]
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
