"""The producers of the demo, started by it and killed by it: `python -m penstock.cli.demo_worker`."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import click

from penstock.buffer import Producer, ProducerConfig, WriteHandle
from penstock.cli.demo_clicks import event
from penstock.cli.demo_journal import JournalWriter, Sums, read_journal

__all__ = ["produce_events"]

CALLS_PER_S = 50
HELD_FROM = 0.75
"""What comes after this part of the events waits until the demo has done its kills..."""
HELD_CALL_S = 1.0
"""...but for a call now and then, so that there is always something under way."""


@click.command()
@click.option("--store", required=True)
@click.option("--journal", type=click.Path(path_type=Path), required=True)
@click.option("--release", type=click.Path(path_type=Path), required=True)
@click.option("--producer", type=int, required=True)
@click.option("--records", type=int, required=True)
@click.option("--rate", type=float, required=True, help="Events per second.")
@click.option("--since-ms", type=int, required=True)
def produce_events(
    store: str, journal: Path, release: Path, producer: int, records: int, rate: float, since_ms: int
) -> None:
    """Not for people: `penstock demo` starts these. Journals what is offered and what is acknowledged."""
    asyncio.run(_produce(store, journal, release, producer, records, rate, since_ms))


async def _produce(
    store: str, path: Path, release: Path, me: int, records: int, rate: float, since_ms: int
) -> None:
    parent = os.getppid()
    number = read_journal(path).offered_end  # numbers offered by a killed predecessor are not used again
    count = max(1, round(rate / CALLS_PER_S))
    journal = JournalWriter(path)
    acks: asyncio.Queue[tuple[int, Sums, WriteHandle] | None] = asyncio.Queue()
    due = time.monotonic()
    async with asyncio.TaskGroup() as group, Producer(ProducerConfig(store=store)) as producer:
        group.create_task(_journal_acks(journal, acks))
        while number < records and os.getppid() == parent:
            last = min(records, number + count)
            events = [event(me, n, records, since_ms) for n in range(number, last)]
            journal.offer(number, len(events))
            handle = await producer.produce(events, b"producer=%d" % me)
            acks.put_nowait((number, Sums.of(events), handle))
            held = number >= HELD_FROM * records and not os.access(release, os.F_OK)
            due = max(due, time.monotonic() - 1.0) + (HELD_CALL_S if held else len(events) / rate)
            number = last
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


if __name__ == "__main__":
    produce_events()
