"""`penstock buffer produce`: lines in, durable batches out, and an account of every record."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import click

from penstock.buffer import BufferError as QueueError
from penstock.buffer import Producer, ProducerConfig, ShardedProducer, WriteHandle, read_layout, shard_of
from penstock.cli.buffer.ending import Ending, report_ending
from penstock.cli.buffer.framing import FRAMINGS, Framing
from penstock.cli.buffer.source import open_source, read_chunks
from penstock.cli.buffer.tally import Tally
from penstock.cli.buffer.target import Target, queue_options, run
from penstock.cli.display import Progress
from penstock.errors import ConfigError, PenstockError
from penstock.objects import open_store
from penstock.units import format_count, format_size

__all__ = ["produce"]

CALL_BYTES_MAX = 8 * 1024 * 1024
"""Records of one call are in memory together; large ones are handed over a few at a time."""


@click.command()
@queue_options
@click.option("--file", "path", default="-", metavar="FILE", help="What to read; - is standard input.")
@click.option(
    "--delimiter",
    type=click.Choice(list(FRAMINGS)),
    default="newline",
    show_default=True,
    help="How the input is cut into records; length-prefixed is u32 little-endian, then the record.",
)
@click.option("--metadata", default="", metavar="TEXT", help="Stored with every call, for the consumer.")
@click.option("--compression", type=click.Choice(["none", "zstd"]), help="How batches are stored.")
@click.option(
    "--batch-records",
    type=click.IntRange(min=1),
    default=1000,
    show_default=True,
    help="Records per call at most; each call adds an item of metadata to the manifest.",
)
@click.option("--shards", type=click.IntRange(min=1), help="Make the queue sharded (the first time).")
@click.option("--key", metavar="TEXT", help="Sharded: all records go to the shard of this key.")
@click.option(
    "--key-separator",
    metavar="TEXT",
    help="Sharded: a record's key is what stands before TEXT in it (the record is stored whole).",
)
def produce(
    store: str | None,
    manifest: str | None,
    prefix: str | None,
    config: str | None,
    store_options: tuple[str, ...],
    as_json: bool,
    path: str,
    delimiter: str,
    metadata: str,
    compression: str | None,
    batch_records: int,
    shards: int | None,
    key: str | None,
    key_separator: str | None,
) -> int:
    """Store the lines of a file, or of standard input, in the queue at STORE.

    Ends when the input ends. Ctrl-C or SIGTERM stops reading, waits until what was accepted is durable,
    and reports. Reading stops at the first failure. Exits with 0 only if every record is durable.
    """
    if key is not None and key_separator is not None:
        raise click.UsageError("Give --key or --key-separator, not both.")
    if key_separator == "":
        raise click.UsageError("--key-separator must not be empty.")
    target = Target.of(store, config=config, manifest=manifest, prefix=prefix, store_options=store_options)
    keys = _Keys(
        fixed=None if key is None else key.encode(),
        separator=None if key_separator is None else key_separator.encode(),
    )
    job = _Job(
        descriptor=open_source(path),
        framing=FRAMINGS[delimiter](),
        metadata=metadata.encode(),
        call_records_max=batch_records,
        shards=shards,
        keys=keys,
    )
    with Progress() as progress:
        ending = run(_produce(target, compression, job, progress))
        elapsed_s = progress.elapsed_s
    return report_ending(ending, elapsed_s, as_json)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Keys:
    fixed: bytes | None
    separator: bytes | None

    @property
    def given(self) -> bool:
        return self.fixed is not None or self.separator is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    descriptor: int
    framing: Framing
    metadata: bytes
    call_records_max: int
    shards: int | None
    keys: _Keys


async def _produce(target: Target, compression: str | None, job: _Job, progress: Progress) -> Ending:
    stop = asyncio.Event()
    caught: list[signal.Signals] = []
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        caught.append(number)
        stop.set()
        if len(caught) > 1:  # asked twice: do not insist on finishing
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    tally = Tally()
    async with target.open(ProducerConfig, existing=False, batch_compression=compression) as config:
        try:
            producer = await _open(config, job)
        except PenstockError:
            click.echo("no record was accepted: the queue could not be opened", err=True)
            raise
        input_error = await _pump(producer, job, tally, stop, progress)
        try:
            await producer.close()
        except QueueError as error:
            tally.error = tally.error or error
        tally.settle_all()
    return Ending(
        tally=tally,
        signal=caught[0] if caught else None,
        input_error=input_error,
        unread_bytes=job.framing.pending,
    )


async def _open(config: ProducerConfig, job: _Job) -> Producer | ShardedProducer:
    stored = await read_layout(open_store(config.store), config.manifest_key)
    if stored is not None or job.shards is not None:
        return await ShardedProducer.open(config, job.shards)
    if job.keys.given:
        raise ConfigError(f"{config.manifest_path} is not sharded: keys need --shards N the first time")
    async with AsyncExitStack() as stack:
        producer = await stack.enter_async_context(Producer(config))
        stack.pop_all()
    return producer


async def _pump(
    producer: Producer | ShardedProducer, job: _Job, tally: Tally, stop: asyncio.Event, progress: Progress
) -> PenstockError | None:
    """Read until the end, a signal or a failure. Returns what was wrong with the input, if anything."""
    try:
        async for chunk in read_chunks(job.descriptor, stop):
            await _hand_over(producer, job, job.framing.feed(chunk), tally)
            tally.settle()
            progress.show(
                f"accepted {format_count(tally.accepted)}  durable {format_count(tally.durable)}  "
                f"{format_size(tally.durable_bytes)}"
            )
            if tally.error is not None:
                return None
        if not stop.is_set():
            await _hand_over(producer, job, job.framing.finish(), tally)
    except QueueError as error:
        tally.error = tally.error or error
    except PenstockError as error:
        return error
    return None


async def _hand_over(
    producer: Producer | ShardedProducer, job: _Job, records: list[bytes], tally: Tally
) -> None:
    if not records:
        return
    if isinstance(producer, ShardedProducer) and job.keys.separator is not None:
        await _hand_over_by_key(producer, job, records, tally)
        return
    for call in _calls(records, job.call_records_max):
        if isinstance(producer, ShardedProducer):
            handle = await producer.produce(call, job.metadata, key=job.keys.fixed)
        else:
            handle = await producer.produce(call, job.metadata)
        _accept(tally, handle, call)


async def _hand_over_by_key(producer: ShardedProducer, job: _Job, records: list[bytes], tally: Tally) -> None:
    """Records of one shard go together, so that keys do not cost a call each."""
    assert job.keys.separator is not None
    piles: dict[int, list[bytes]] = {}
    keys: dict[int, bytes] = {}
    for record in records:
        key = record.partition(job.keys.separator)[0]
        shard = shard_of(key, producer.shards)
        piles.setdefault(shard, []).append(record)
        keys[shard] = key
    first = tally.accepted
    for shard, pile in piles.items():
        for call in _calls(pile, job.call_records_max):
            handle = await producer.produce(call, job.metadata, key=keys[shard])
            _accept(tally, handle, call, first)


def _calls(records: list[bytes], count_max: int) -> list[list[bytes]]:
    """Cut into calls by count and by size."""
    calls: list[list[bytes]] = []
    size = 0
    for record in records:
        if not calls or len(calls[-1]) >= count_max or size + len(record) > CALL_BYTES_MAX:
            calls.append([])
            size = 0
        calls[-1].append(record)
        size += len(record)
    return calls


def _accept(tally: Tally, handle: WriteHandle, call: Sequence[bytes], first: int | None = None) -> None:
    tally.accept(handle, len(call), sum(map(len, call)), first)
