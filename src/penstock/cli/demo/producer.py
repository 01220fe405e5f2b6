"""The demo's producers: the stream of clicks, the journal of acknowledgements, and the process.

Every event follows from its number, and can be rebuilt from its row in a table. A journal has one line per
event below, each written in one write, so that a kill leaves whole lines:

    offer FIRST COUNT                    before the records are handed to the buffer
    ack   FIRST COUNT BYTES CHECKSUM     after they were acknowledged as durable

`penstock demo` starts and kills the process: `python -m penstock.cli.demo.producer`.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import click
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from penstock.buffer import Producer, ProducerConfig, WriteHandle
from penstock.storage import data_modes

BAD_EVERY: Final = 1000
BAD_AT: Final = 500
"""Events whose number modulo `BAD_EVERY` has this value do not decode."""
DAYS: Final = 3
COLUMNS: Final = ("producer", "number", "user", "url", "at")

_PAGES: Final = (
    b"/", b"/search", b"/cart", b"/login", b"/help", b"/product/1", b"/product/2", b"/product/3",
    b"/product/4", b"/product/5", b"/product/6", b"/product/7",
)  # fmt: skip
_USERS: Final = 5000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_DAY_MS: Final = 86_400_000
CHECKSUM_END = 1 << 64
CALLS_PER_S = 50
HELD_FROM = 0.75
"""After this share of the events, producers wait for the demo's kills..."""
HELD_CALL_S = 1.0
"""...except for one call per interval, so that a call is always in progress."""


def is_bad(number: int) -> bool:
    """Return whether the event with this number does not decode."""
    return number % BAD_EVERY == BAD_AT


def event(producer: int, number: int, end: int, since_ms: int) -> bytes:
    """Return event `number` of a producer's `end` events, spread over `DAYS` days from `since_ms`."""
    draw = (number * 2_654_435_761 + producer * 40_503) & 0xFFFF_FFFF
    # The smaller of two random values: some pages are far more popular than others.
    page = _PAGES[min((draw >> 8) % len(_PAGES), (draw >> 16) % len(_PAGES))]
    at = _EPOCH + timedelta(milliseconds=since_ms + DAYS * _DAY_MS * number // end)
    moment = at.isoformat(timespec="milliseconds").removesuffix("+00:00").encode()
    if is_bad(number):
        return _bad_event(producer, number, draw % _USERS, page, moment)
    return b'{"producer":%d,"number":%d,"user":"user-%04d","url":"%b","at":"%bZ"}' % (
        producer, number, draw % _USERS, page, moment,
    )  # fmt: skip


def _bad_event(producer: int, number: int, user: int, page: bytes, moment: bytes) -> bytes:
    """Return a bad event: truncated, with a wrong type, or without a field, but with its producer."""
    head = b'{"producer":%d,"number":%d,' % (producer, number)
    kind = number // BAD_EVERY % 3
    if kind == 0:
        return head + b'"user":"user-%04d","ur' % user
    if kind == 1:
        return head + b'"user":"user-%04d","url":"%b","at":"half past nine"}' % (user, page)
    return head + b'"url":"%b","at":"%bZ"}' % (page, moment)


def rebuild(rows: pa.Table) -> pa.ChunkedArray:
    """Return the bytes of every event, rebuilt from the columns `COLUMNS` of a table."""
    moment = rows.column("at").cast(pa.timestamp("ms", "UTC"))
    return pc.binary_join_element_wise(
        '{"producer":',
        rows.column("producer").cast(pa.string()),
        ',"number":',
        rows.column("number").cast(pa.string()),
        ',"user":"',
        rows.column("user").cast(pa.string()),
        '","url":"',
        rows.column("url").cast(pa.string()),
        '","at":"',
        pc.strftime(moment, format="%Y-%m-%dT%H:%M:%S"),
        'Z"}',
        "",
        null_handling="emit_null",
    ).cast(pa.binary())


def checksum_of(record: bytes) -> int:
    """Return the checksum of one record. Sums of checksums are modulo 2^64."""
    return int(xxhash.xxh3_64_intdigest(record))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """The count, size and checksum sum of records: equal sums mean equal records."""

    records: int = 0
    size_bytes: int = 0
    checksum: int = 0

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            records=self.records + other.records,
            size_bytes=self.size_bytes + other.size_bytes,
            checksum=(self.checksum + other.checksum) % CHECKSUM_END,
        )

    @classmethod
    def of(cls, records: Sequence[bytes]) -> Sums:
        return cls(
            records=len(records),
            size_bytes=sum(map(len, records)),
            checksum=sum(map(checksum_of, records)) % CHECKSUM_END,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """The contents of a producer's journal."""

    offered_end: int
    """The number after the last offered record."""
    acked: Sums
    intervals: tuple[tuple[int, int], ...]
    """Acknowledged numbers as half-open ranges, ascending and disjoint."""


def read_journal(path: Path) -> Journal:
    """Read the journal at `path`; a missing file is an empty journal."""
    return JournalReader(path).read()


class JournalReader:
    """Follows a journal: each call reads only the new lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._offered_end = 0
        self._acked = Sums()
        self._ranges: list[tuple[int, int]] = []

    def read(self) -> Journal:
        """Return the current journal without an incomplete last line."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                added = file.read()
        except FileNotFoundError:
            added = b""
        whole = added[: added.rfind(b"\n") + 1]
        self._position += len(whole)
        for line in whole.decode("ascii").splitlines():
            self._take(line)
        self._ranges = _joined(self._ranges)
        return Journal(offered_end=self._offered_end, acked=self._acked, intervals=tuple(self._ranges))

    def _take(self, line: str) -> None:
        kind, *numbers = line.split()
        first, count, *sums = map(int, numbers)
        if kind == "offer":
            self._offered_end = max(self._offered_end, first + count)
        else:
            self._acked += Sums(records=count, size_bytes=sums[0], checksum=sums[1])
            self._ranges.append((first, first + count))


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for first, end in sorted(ranges):
        if joined and joined[-1][1] == first:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((first, end))
    return joined


class JournalWriter:
    """Appends lines, each in a single write."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._file = data_modes().new_file(str(path), flags)

    def offer(self, first: int, count: int) -> None:
        os.write(self._file, f"offer {first} {count}\n".encode())

    def ack(self, first: int, sums: Sums) -> None:
        line = f"ack {first} {sums.records} {sums.size_bytes} {sums.checksum}\n"
        os.write(self._file, line.encode())

    def close(self) -> None:
        os.close(self._file)


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
    """Produce events for `penstock demo`, with a journal of offered and acknowledged records."""
    asyncio.run(_produce(store, journal, release, producer, records, rate, since_ms))


async def _produce(
    store: str, path: Path, release: Path, me: int, records: int, rate: float, since_ms: int
) -> None:
    parent = os.getppid()
    number = read_journal(path).offered_end  # never reuse numbers that a killed predecessor offered
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
