"""Every object of a queue, damaged in every way: reported or complete, and no number twice.

A queue of twelve batches: six were consumed, some were collected, two were set aside. Its objects are those
that the scenario left in a local directory.
"""

from __future__ import annotations

import asyncio
import logging
import random
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.crash.damage import FEW, MANY, Damage, Tally, damages, files_below, replace_file, some_of

from penstock.buffer import (
    Consumer,
    ConsumerConfig,
    Producer,
    ProducerConfig,
    ShardedConsumer,
    ShardedProducer,
    Transaction,
    append_batches,
    store_batch,
)
from penstock.buffer.fsck import audit
from penstock.buffer.inspect import QueueReader
from penstock.buffer.manifest import read_footer
from penstock.clock import SYSTEM_CLOCK
from penstock.errors import PenstockError
from penstock.findings import Severity
from penstock.objects import LocalStore

SECTION = "Queue"
OTHERS = {
    "<folder>/manifest.relay/<id>.json",
    "<folder>/manifest.dead/records/<number>.json",
    "<folder>/manifest.dead/relay/<name>/<number>.json",
    "<folder>/manifest.shards/<shard>.<part>",
}
"""Rows of services that use a queue, and of shards that were consumed."""
START_MS = SYSTEM_CLOCK.now_ms() + 86_400_000
"""Ahead of the times of the files: ages count from the name of a batch, however long the tests take."""
ACKED = 5
"""The application's own position: everything up to this number has been applied."""


class SkippingClock:
    """Time that passes at once: whoever sleeps wakes up later without waiting."""

    def __init__(self) -> None:
        self.passed_s = 0.0

    def now_ms(self) -> int:
        return START_MS + round(self.passed_s * 1000)

    def monotonic(self) -> float:
        return self.passed_s

    async def sleep(self, seconds: float) -> None:
        self.passed_s += seconds
        await asyncio.sleep(0)


@dataclass
class Made:
    """A queue at rest: its files, older copies of them, and what was acknowledged."""

    clock: SkippingClock = field(default_factory=SkippingClock)
    numbers: dict[int, bytes] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    older: list[dict[str, bytes]] = field(default_factory=list)
    sharded: set[bytes] = field(default_factory=set)


@asynccontextmanager
async def opened(root: Path) -> AsyncIterator[LocalStore]:
    store = LocalStore(root)
    try:
        yield store
    finally:
        await store.close()


def consuming(store: LocalStore, **settings: object) -> ConsumerConfig:
    plain: dict[str, object] = {
        "gc_enabled": False,
        "gc_grace_period": "1s",
        "retry_deadline": "1s",
        "prefetch": 0,
    }
    return ConsumerConfig(store=store, **plain | settings)  # type: ignore[arg-type]


async def produce(store: LocalStore, clock: SkippingClock, *records: bytes) -> dict[int, bytes]:
    """Append each record as a batch of its own; returns what was acknowledged under which number."""
    numbers: dict[int, bytes] = {}
    config = ProducerConfig(store=store, flush_interval="1h", append_deadline="1s")
    async with Producer(config, clock, rng=random.Random(len(records))) as producer:
        for record in records:
            handle = await producer.produce([record])
            await producer.flush()
            numbers[(await handle.watcher.await_durable()).sequence] = record
            clock.passed_s += 0.01
    return numbers


async def append_once(
    store: LocalStore, clock: SkippingClock, record: bytes, version: int
) -> dict[int, bytes]:
    config = ProducerConfig(store=store, append_deadline="1s")
    rng = random.Random(version)
    batch = await store_batch(store, config.prefix, [record], clock=clock, rng=rng)
    done = await append_batches(
        config, [batch], Transaction(app="query", version=version), store=store, clock=clock, rng=rng
    )
    clock.passed_s += 0.01
    return {} if done.first is None else {done.first: record}


async def make(root: Path) -> Made:
    made = Made()
    async with opened(root) as store:
        made.numbers |= await produce(store, made.clock, *(b"%d" % n for n in range(5)))
        made.numbers |= await append_once(store, made.clock, b"5", 0)
        made.older.append(files_below(root))
        consumer = await Consumer.open(consuming(store), clock=made.clock, rng=random.Random(1))
        for _ in range(3):
            assert await consumer.next_batch() is not None
        await consumer.ack_through(2)
        made.clock.passed_s += 100
        assert (await consumer.gc.collect()).deleted
        made.older.append(files_below(root))
        made.numbers |= await append_once(store, made.clock, b"6", 1)
        made.numbers |= await produce(store, made.clock, *(b"%d" % n for n in range(7, 10)))
        await consumer.close()
        consumer = await Consumer.open(consuming(store), ACKED, clock=made.clock, rng=random.Random(2))
        await consumer.close()
        made.older.append(files_below(root))
        made.numbers |= await produce(store, made.clock, b"10", b"11")
        bad = await Consumer.open(
            consuming(store, on_bad_batch="skip", manifest_path="other/manifest", data_path_prefix="other"),
            clock=made.clock,
        )
        sharding = ProducerConfig(
            store=store, manifest_path="many/manifest", data_path_prefix="many", flush_interval="1h"
        )
        async with await ShardedProducer.open(sharding, 2, clock=made.clock) as producer:
            for n in range(6):
                await producer.produce([b"s%d" % n], key=b"%d" % n)
            await producer.flush()
        made.sharded = {b"s%d" % n for n in range(6)}
        # A queue with a batch that was set aside.
        other = ProducerConfig(
            store=store, manifest_path="other/manifest", data_path_prefix="other", flush_interval="1h"
        )
        async with Producer(other, made.clock) as single:
            await single.produce([b"bad"])
            await single.flush()
        (hurt,) = (root / "other").glob("*.batch")
        hurt.write_bytes(b"\xff" * 40)
        assert await bad.next_batch() is None
        assert len(bad.dead_letters) == 1
        await bad.close()
    made.files = files_below(root)
    assert made.numbers == {n: b"%d" % n for n in range(12)}
    return made


async def start(root: Path, made: Made) -> tuple[set[bytes], dict[int, bytes]]:
    """A new producer, a new consumer and a collection; returns what is delivered and what is appended."""
    clock = SkippingClock()
    clock.passed_s = made.clock.passed_s + 100
    delivered: set[bytes] = set()
    async with opened(root) as store:
        added = await produce(store, clock, b"new0", b"new1", b"new2")
        consumer = await Consumer.open(consuming(store), ACKED, clock=clock, rng=random.Random(3))
        try:
            while (batch := await consumer.next_batch()) is not None:
                delivered |= set(batch.entries)
            clock.passed_s += 100
            await consumer.gc.collect()
        finally:
            await consumer.close()
    return delivered, added


async def sharded(root: Path, made: Made) -> set[bytes]:
    clock = SkippingClock()
    clock.passed_s = made.clock.passed_s + 100
    names = {"manifest_path": "many/manifest", "data_path_prefix": "many"}
    delivered: set[bytes] = set()
    async with opened(root) as store:
        async with await ShardedProducer.open(
            ProducerConfig(store=store, flush_interval="1h", append_deadline="1s", **names), 1, clock=clock
        ) as producer:
            await producer.produce([b"more"], key=b"1")
            await producer.flush()
        consumer = await ShardedConsumer.open(consuming(store, **names), clock=clock)
        try:
            while (found := await consumer.next_batch()) is not None:
                delivered |= set(found[1].entries if isinstance(found, tuple) else found.entries)
        finally:
            await consumer.close()
    return delivered


async def problems(root: Path) -> bool:
    """What `penstock buffer fsck` says."""
    async with opened(root) as store:
        for folder in ("ingest", "other"):
            reader = QueueReader(store, f"{folder}/manifest", retry_deadline_s=1.0)
            found = await audit(reader, folder, deep=True)
            if any(finding.severity is Severity.PROBLEM for finding in found):
                return True
    return False


def is_unnoticed(made: Made, damage: Damage) -> bool:
    """An older manifest from which nothing has left the queue since: see the table."""
    if not damage.how.startswith("older") or damage.file != "ingest/manifest" or damage.data is None:
        return False
    footer, ledger = read_footer(damage.data), read_footer(made.files["ingest/manifest.ledger"])
    return footer.next_sequence >= ledger.next_sequence and footer.epoch >= ledger.epoch


async def check(
    root: Path, made: Made, damage: Damage, caplog: pytest.LogCaptureFixture
) -> tuple[str, str | None]:
    caplog.clear()
    reported = False
    try:
        reported = await problems(root)
        is_sharded = damage.file.startswith("many")
        result = await sharded(root, made) if is_sharded else await start(root, made)
    except PenstockError:
        return "refused", None
    reported = reported or any(one.levelno >= logging.WARNING for one in caplog.records)
    if isinstance(result, set):
        missing = made.sharded - result
    else:
        delivered, added = result
        again = added.keys() & made.numbers.keys()
        if again and not (is_unnoticed(made, damage) and reported):
            return "wrong", f"numbers {sorted(again)} are assigned again"
        missing = {made.numbers[n] for n in range(ACKED + 1, 12)} - delivered
        missing |= set(added.values()) - delivered
    if missing and not reported:
        return "wrong", f"{sorted(missing)} are gone without a word"
    return ("lost and reported" if missing else "reported" if reported else "complete"), None


@pytest.mark.parametrize("parts", [FEW, pytest.param(MANY, marks=pytest.mark.long)], ids=["few", "many"])
@pytest.mark.timeout(600)
async def test_damage_to_any_object_of_a_queue_is_reported_and_no_number_is_assigned_twice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, parts: tuple[int, ...]
) -> None:
    work = tmp_path / "work"
    made = await make(work)
    assert not await problems(work)
    tally = Tally(SECTION)
    for file in some_of(SECTION, made.files, 2 if parts is FEW else len(made.files)):
        raw = made.files[file]
        older = [copies[file] for copies in made.older if file in copies]
        for damage in damages(file, raw, older, parts):
            shutil.rmtree(work)
            for name, data in made.files.items():
                (work / name).parent.mkdir(parents=True, exist_ok=True)
                (work / name).write_bytes(data)
            replace_file(work, damage)
            tally.note(damage, *await check(work, made, damage, caplog))
    tally.finish(but=OTHERS)
