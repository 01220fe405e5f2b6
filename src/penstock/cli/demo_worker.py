"""The processes of the demo, started by it and killed by it: `python -m penstock.cli.demo_worker`."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import click

from penstock.buffer import ConsumerConfig, Producer, ProducerConfig, WriteHandle
from penstock.buffer.sync import Consumer
from penstock.cli.demo_journal import JournalWriter, Sums, read_journal
from penstock.cli.demo_table import Table

__all__ = ["record", "worker"]

CALLS_PER_S = 50
POLL_S = 0.05
_FILLER = b"durable ingestion through object storage and Spark, without a broker; " * 3


@click.group()
def worker() -> None:
    """Not for people: `penstock demo` starts these."""


def record(producer: int, number: int) -> bytes:
    """Record `number` of a producer: it says who made it, and no two are alike."""
    return b"%d:%d:%b" % (producer, number, _FILLER[: 60 + number % 120])


@worker.command("produce")
@click.option("--store", required=True)
@click.option("--journal", type=click.Path(path_type=Path), required=True)
@click.option("--producer", type=int, required=True)
@click.option("--rate", type=float, required=True, help="Records per second.")
@click.option("--seconds", type=float, required=True)
@click.option("--end", type=int, help="Stop at this number.")
def produce_records(
    store: str, journal: Path, producer: int, rate: float, seconds: float, end: int | None
) -> None:
    """Produce at a steady rate, and journal what is offered and what is acknowledged."""
    asyncio.run(_produce(store, journal, producer, rate, seconds, end))


async def _produce(
    store: str, path: Path, producer_id: int, rate: float, seconds: float, end: int | None
) -> None:
    number = read_journal(path).offered_end  # numbers offered by a killed predecessor are not used again
    count = max(1, round(rate / CALLS_PER_S))
    journal = JournalWriter(path)
    acks: asyncio.Queue[tuple[int, Sums, WriteHandle] | None] = asyncio.Queue()
    started = time.monotonic()
    due = started
    async with asyncio.TaskGroup() as group, Producer(ProducerConfig(store=store)) as producer:
        group.create_task(_journal_acks(journal, acks))
        while time.monotonic() - started < seconds and (end is None or number < end):
            last = number + count if end is None else min(end, number + count)
            records = [record(producer_id, n) for n in range(number, last)]
            journal.offer(number, len(records))
            handle = await producer.produce(records, b"producer=%d" % producer_id)
            acks.put_nowait((number, Sums.of(records), handle))
            number = last
            due += len(records) / rate
            await asyncio.sleep(max(0.0, due - time.monotonic()))
        acks.put_nowait(None)
    journal.close()


async def _journal_acks(
    journal: JournalWriter, acks: asyncio.Queue[tuple[int, Sums, WriteHandle] | None]
) -> None:
    while (item := await acks.get()) is not None:
        first, sums, handle = item
        await handle.watcher.await_durable()
        journal.ack(first, sums)


@worker.command("consume")
@click.option("--store", required=True)
@click.option("--database", type=click.Path(path_type=Path), required=True)
@click.option("--stop-file", type=click.Path(path_type=Path), required=True)
def consume_records(store: str, database: Path, stop_file: Path) -> None:
    """Write rows and position in one transaction, then acknowledge; end when told to and nothing is left."""
    parent = os.getppid()
    table = Table(database)
    # Garbage is collected as often as can be, so that the totals also prove it harmless.
    config = ConsumerConfig(store=store, gc_interval="2s", gc_grace_period="3s")
    with Consumer.open(config, table.position()) as consumer:
        while True:
            ending = stop_file.exists()  # before the look: what comes later was not asked for
            batch = consumer.next_batch()
            if batch is not None:
                table.store(batch.sequence, batch.entries)
                consumer.ack(batch.sequence)
            elif ending or os.getppid() != parent:  # orphaned: nobody will ever tell it to stop
                break
            else:
                time.sleep(POLL_S)
    table.close()


if __name__ == "__main__":
    worker()
