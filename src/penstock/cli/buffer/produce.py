"""`penstock buffer produce`: store lines as durable batches, and account for every record."""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import click

from penstock.buffer import BufferError as QueueError
from penstock.buffer import Producer, ProducerConfig, ShardedProducer, WriteHandle, read_layout, shard_of
from penstock.cli.base import Output
from penstock.cli.buffer.target import Target, queue_command
from penstock.cli.failure import ExitCode, exit_code, report
from penstock.cli.input import FRAMINGS, Framing, read_chunks, source_option
from penstock.cli.output import Progress, print_pairs
from penstock.cli.signals import LoopStop, signal_code
from penstock.errors import ConfigError, OutcomeUnknown, PenstockError
from penstock.objects import open_store
from penstock.units import format_count, format_duration, format_size

CALL_BYTES_MAX = 8 * 1024 * 1024
"""The records of one call are in memory together, so large records are passed a few at a time."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """The number of accepted, durable and failed records, and the sequences of the durable ones."""

    accepted: int = 0
    accepted_bytes: int = 0
    durable: int = 0
    durable_bytes: int = 0
    failed: int = 0
    unknown: int = 0
    """Failed records that may nevertheless be in the queue."""
    first_failed: int | None = None
    """The position in the input of the first record that may not be durable."""
    error: PenstockError | None = None
    sequences: dict[str, tuple[int, int]] = field(default_factory=dict)
    """The lowest and highest sequence in each folder of batches; each shard has one folder."""
    _pending: deque[tuple[WriteHandle, int, int, int]] = field(default_factory=deque)

    def accept(self, handle: WriteHandle, count: int, size: int, first: int | None = None) -> None:
        """Add an accepted call; `first` is the position of its first record in the input."""
        number = self.accepted if first is None else first
        self._pending.append((handle, number, count, size))
        self.accepted += count
        self.accepted_bytes += size

    def settle(self) -> None:
        """Count the calls whose outcomes are known, in order; stop at the first pending one."""
        while self._pending and self._pending[0][0].watcher.result() is not None:
            self._count(*self._pending.popleft())

    def settle_all(self) -> None:
        """Count all calls whose outcomes are known, in any order; keep the others pending."""
        waiting = list(self._pending)
        self._pending.clear()
        for call in waiting:
            if call[0].watcher.result() is None:
                self._pending.append(call)
            else:
                self._count(*call)

    def _count(self, handle: WriteHandle, first: int, count: int, size: int) -> None:
        outcome = handle.watcher.result()
        assert outcome is not None
        if outcome.error is not None:
            self.failed += count
            self.unknown += count if isinstance(outcome.error, OutcomeUnknown) else 0
            self.first_failed = first if self.first_failed is None else min(self.first_failed, first)
            # An unknown outcome needs the most care, so report that one.
            if self.error is None or isinstance(outcome.error, OutcomeUnknown):
                self.error = outcome.error
            return
        self.durable += count
        self.durable_bytes += size
        assert outcome.location is not None
        assert outcome.sequence is not None
        folder = outcome.location.rpartition("/")[0]
        low, high = self.sequences.get(folder, (outcome.sequence, outcome.sequence))
        self.sequences[folder] = min(low, outcome.sequence), max(high, outcome.sequence)

    @property
    def complete(self) -> bool:
        """Whether every accepted record is durable."""
        return self.durable == self.accepted


@queue_command()
@source_option
@click.option(
    "--delimiter",
    type=click.Choice(list(FRAMINGS)),
    default="newline",
    show_default=True,
    help="How records are separated; length-prefixed is u32 little-endian, then the record.",
)
@click.option("--metadata", default="", metavar="TEXT", help="Metadata of every call, for the consumer.")
@click.option("--compression", type=click.Choice(["none", "zstd"]), help="The compression of batches.")
@click.option(
    "--batch-records",
    type=click.IntRange(min=1),
    default=1000,
    show_default=True,
    help="Maximum records per call; each call adds a metadata item to the manifest.",
)
@click.option("--shards", type=click.IntRange(min=1), help="Create the queue with this many shards.")
@click.option("--key", metavar="TEXT", help="Sharded: send all records to the shard of this key.")
@click.option(
    "--key-separator",
    metavar="TEXT",
    help="Sharded: the key of a record is the part before TEXT (the whole record is stored).",
)
async def produce(
    target: Target,
    out: Output,
    source: int,
    delimiter: str,
    metadata: str,
    compression: str | None,
    batch_records: int,
    shards: int | None,
    key: str | None,
    key_separator: str | None,
) -> int:
    """Store the lines of a file, or of standard input, in the queue at STORE.

    Ends with the input. Ctrl-C or SIGTERM stops reading, waits until every accepted record is durable, and
    reports. The first failure also stops reading. Exits with 0 only if every record is durable.
    """
    if key is not None and key_separator is not None:
        raise click.UsageError("Give --key or --key-separator, not both.")
    if key_separator == "":
        raise click.UsageError("--key-separator must not be empty.")
    job = _Input(
        descriptor=source,
        framing=FRAMINGS[delimiter](),
        metadata=metadata.encode(),
        call_records_max=batch_records,
        shards=shards,
        keys=_Keys(
            fixed=None if key is None else key.encode(),
            separator=None if key_separator is None else key_separator.encode(),
        ),
    )
    with Progress() as progress:
        ending = await _produce(target, compression, job, progress)
        elapsed_s = progress.elapsed_s
    out.show(_document(ending, elapsed_s), lambda: print_pairs(_account(ending.tally, elapsed_s)))
    return _report_failure(ending)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Keys:
    fixed: bytes | None
    separator: bytes | None

    @property
    def given(self) -> bool:
        return self.fixed is not None or self.separator is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Input:
    descriptor: int
    framing: Framing
    metadata: bytes
    call_records_max: int
    shards: int | None
    keys: _Keys


async def _produce(target: Target, compression: str | None, job: _Input, progress: Progress) -> Ending:
    stop = asyncio.Event()
    stopping = LoopStop(stop.set)
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
        signal=stopping.first,
        input_error=input_error,
        unread_bytes=job.framing.pending,
    )


async def _open(config: ProducerConfig, job: _Input) -> Producer | ShardedProducer:
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
    producer: Producer | ShardedProducer, job: _Input, tally: Tally, stop: asyncio.Event, progress: Progress
) -> PenstockError | None:
    """Read until the end, a signal or a failure. Return the error of the input, if any."""
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
    producer: Producer | ShardedProducer, job: _Input, records: list[bytes], tally: Tally
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


async def _hand_over_by_key(
    producer: ShardedProducer, job: _Input, records: list[bytes], tally: Tally
) -> None:
    """Group the records by shard, so that not every key needs its own call."""
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
    """Split records into calls by count and size."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The result, and what stopped reading: a signal, an error, or neither at the end of the input."""

    tally: Tally
    signal: signal.Signals | None
    input_error: PenstockError | None
    unread_bytes: int


def _document(ending: Ending, elapsed_s: float) -> dict[str, object]:
    tally = ending.tally
    return {
        "accepted": tally.accepted,
        "durable": tally.durable,
        "durable_bytes": tally.durable_bytes,
        "not_durable": tally.accepted - tally.durable - tally.unknown,
        "unknown": tally.unknown,
        "first_not_durable": tally.first_failed,
        "sequences": [
            {"folder": folder, "first": low, "last": high}
            for folder, (low, high) in sorted(tally.sequences.items())
        ],
        "seconds": round(elapsed_s, 3),
        "records_per_second": round(_rate(tally, elapsed_s), 1),
        "stopped_by": None if ending.signal is None else ending.signal.name,
    }


def _rate(tally: Tally, elapsed_s: float) -> float:
    return tally.durable / elapsed_s if elapsed_s > 0 else 0.0


def _account(tally: Tally, elapsed_s: float) -> list[tuple[str, str]]:
    lines = [
        ("accepted", f"{tally.accepted:,} records, {format_size(tally.accepted_bytes)}"),
        ("durable", f"{tally.durable:,} records, {format_size(tally.durable_bytes)}"),
    ]
    for folder, (low, high) in sorted(tally.sequences.items()):
        place = f" in {folder}" if len(tally.sequences) > 1 else ""
        numbers = f"{low}-{high}" if low < high else f"{low}"
        lines.append(("sequences", f"{numbers}{place}"))
    lines.append(
        (
            "rate",
            f"{format_count(round(_rate(tally, elapsed_s)))} records/s over {format_duration(elapsed_s)}",
        )
    )
    return lines


def _report_failure(ending: Ending) -> int:
    """Report the records that are not durable, with the reason. Return the exit code."""
    tally = ending.tally
    if ending.signal is not None:
        click.echo(f"stopped by {ending.signal.name}: the input was not read to its end", err=True)
        if ending.unread_bytes:
            click.echo(f"{ending.unread_bytes} bytes of an unfinished record were not accepted", err=True)
    if tally.error is not None or not tally.complete:
        return _report_loss(tally)
    if ending.input_error is not None:
        report(ending.input_error)
        return exit_code(ending.input_error)
    if ending.signal is not None:
        return signal_code(ending.signal)
    return ExitCode.OK


def _report_loss(tally: Tally) -> int:
    lost = tally.accepted - tally.durable
    click.echo(f"{lost:,} of {tally.accepted:,} accepted records are not durable", err=True)
    if tally.first_failed is not None:
        click.echo(
            f"all records before number {tally.first_failed:,} of the input (counted from 0) are", err=True
        )
    if tally.unknown:
        click.echo(f"of the others, {tally.unknown:,} may be in the queue", err=True)
    if tally.error is not None:
        report(tally.error)
    return ExitCode.OUTCOME_UNKNOWN if tally.unknown else ExitCode.PROBLEM
