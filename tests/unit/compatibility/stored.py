"""Directories as a version of today writes them, with what must be found in them later.

    python -m tests.unit.compatibility.stored NAME

adds `tests/golden/stored/NAME`: an archive for each kind of data, and `expected.json`. Archives are only
ever added, one set for each version whose data must open.
"""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa

from penstock.buffer import (
    CompressionType,
    ConsumerConfig,
    ProducerConfig,
    Transaction,
    append_batches,
    last_version,
    store_batch,
)
from penstock.buffer.sync import Consumer, Producer, ShardedConsumer, ShardedProducer
from penstock.coordinator import Durability
from penstock.objects import StoreConfig, open_store
from penstock.quiver import Quiver, QuiverConfig
from penstock.spark.pipeline.ledger import BatchLine, Ledger
from penstock.timeseries import Labels, Samples, Series
from penstock.timeseries.sync import TimeSeries
from penstock.topics import Engine, EngineConfig, NewRecord, Predicate, RouterConfig, TopicConfig
from penstock.vector import Vector, VectorConfig
from penstock.vector.sync import VectorStore

GOLDEN: Final = Path(__file__).parents[2] / "golden" / "stored"
T0_MS: Final = 1_750_000_000_000

Found = dict[str, Any]
"""What a reader finds: plain values, so that it can be kept as JSON."""


def write_buffer(root: Path) -> None:
    """A queue with a consumed part, both codecs and a transaction, and a queue of two shards."""
    queue = str(root / "queue")
    for compression in CompressionType:
        with Producer(ProducerConfig(store=queue, batch_compression=compression)) as producer:
            for number in range(3):
                records = [b"%s %d" % (compression.name.encode(), index) for index in range(number + 1)]
                producer.produce(records, b"about %d" % number).await_durable(30)
                producer.flush()
    with Consumer.open(ConsumerConfig(store=queue)) as consumer:
        batch = consumer.next_batch()
        assert batch is not None
        consumer.ack(batch.sequence)

    async def append() -> None:
        store = open_store(StoreConfig(url=queue))
        stored = await store_batch(store, "ingest", [b"by a transaction"], metadata=b"")
        await append_batches(ProducerConfig(store=queue), [stored], Transaction(app="writer", version=7))

    asyncio.run(append())
    sharded = str(root / "sharded")
    with ShardedProducer.open(ProducerConfig(store=sharded), shards=2) as producers:
        for key in (b"a", b"b", b"c", b"d"):
            producers.produce([b"of " + key], key=key).await_durable(30)


def read_buffer(root: Path) -> Found:
    queue = str(root / "queue")
    with Consumer.open(ConsumerConfig(store=queue), last_acked=0) as consumer:
        batches = [
            [
                batch.sequence,
                [entry.decode() for entry in batch.entries],
                [part.payload.decode() for part in batch.metadata],
            ]
            for batch in consumer.drain()
        ]
    with ShardedConsumer.open(ConsumerConfig(store=str(root / "sharded"))) as consumers:
        records = sorted(entry.decode() for batch in consumers.drain() for entry in batch.entries)
    version = asyncio.run(last_version(ProducerConfig(store=queue), "writer"))
    return {"batches": batches, "version": version, "records of two shards": records}


def write_topics(root: Path) -> None:
    """Topics with deletions, a router, and a queue with a lease; a part in segments and a part in the log."""

    async def run() -> None:
        async with await Engine.open(_engine(root)) as engine:
            await engine.put_topic("copies", _topic({"durability": "fsync"}))
            await engine.put_router("copy", RouterConfig(source="log-fsync", dest="copies"))
            for durability in ("disk", "fsync"):
                name = f"log-{durability}"
                await engine.put_topic(name, _topic({"durability": durability}))
                await engine.write(name, [_record(number) for number in range(1, 11)])
            await engine.delete("log-fsync", before_seq=3)
            await engine.delete("log-fsync", match=Predicate(value="odd"))
            await engine.put_topic(
                "jobs", _topic({"type": "queue", "durability": "fsync", "leases_durable": True})
            )
            await engine.write("jobs", [_record(number) for number in range(1, 5)])
            claimed = await engine.claim("jobs", "worker", max=2, lease_ms=600_000)
            await engine.ack(
                "jobs", "worker", [claimed.seqs[0]], [job.lease_id for job in claimed.jobs()][:1]
            )
            await engine.checkpoint()
            await engine.write("log-disk", [_record(11)])
            await engine.write("log-fsync", [_record(11)])

    asyncio.run(run())


def _engine(root: Path) -> EngineConfig:
    return EngineConfig(data_dir=str(root / "data"), cold_dir=str(root / "cold"))


def _topic(values: Mapping[str, object]) -> TopicConfig:
    return msgspec.convert(values, TopicConfig)


def _record(number: int) -> NewRecord:
    tag = "odd" if number % 2 else "even"
    return NewRecord(data=msgspec.Raw(b'{"number":%d}' % number), tag=tag, node="n1")


def read_topics(root: Path) -> Found:
    async def run() -> Found:
        async with await Engine.open(_engine(root)) as engine:
            assert not engine.problems, engine.problems
            found: Found = {}
            for name in ("copies", "log-disk", "log-fsync"):
                page = await engine.diff(name, from_seq=0, limit=100)
                found[name] = [[record.seq, bytes(record.data).decode()] for record in page.records()]
                found[f"next of {name}"] = (await engine.write(name, [_record(12)])).last_seq
            queue = engine.state("jobs").queue
            assert queue is not None
            found["jobs"] = [queue.ready + queue.in_flight, engine.state("jobs").head_seq]
            return found

    return asyncio.run(run())


def write_quiver(root: Path) -> None:
    """Segments, a log that is not in a segment yet, and two subscribers at different places."""
    with Quiver.open(root / "quiver", QuiverConfig()) as quiver:
        for name in ("first", "second"):
            quiver.register(name)
            quiver.activate(name)
        for number in range(3):
            quiver.ingest(_rows(number), signal="logs")
            quiver.flush()
        bundle = quiver.next_bundle("first", timeout=10)
        assert bundle is not None
        bundle.ack()
        quiver.ingest(_rows(3), signal="logs")
        quiver.maintain()


def _rows(number: int) -> pa.RecordBatch:
    return pa.record_batch({"number": [number] * 3, "text": ["a", "b", None]})


def read_quiver(root: Path) -> Found:
    with Quiver.open(root / "quiver", QuiverConfig()) as quiver:
        quiver.flush()
        found: Found = {}
        for name in ("first", "second"):
            quiver.activate(name)
            numbers: list[int] = []
            while (bundle := quiver.next_bundle(name, timeout=0)) is not None:
                numbers += bundle.batch.column("number").to_pylist()
                bundle.ack()
            found[name] = numbers
        return found


def write_timeseries(root: Path) -> None:
    with TimeSeries.open(str(root / "metrics")) as database:
        for host in ("a", "b"):
            samples = Samples.of([(T0_MS + 1000 * step, float(step)) for step in range(10)])
            labels = Labels.of({"__name__": "load", "host": host})
            database.write([Series(labels=labels, samples=samples)]).wait(Durability.DURABLE, timeout_s=30)


def read_timeseries(root: Path) -> Found:
    with TimeSeries.open(str(root / "metrics")) as database:
        answer = database.query("sum by (host) (load)", T0_MS + 9000)
        return {
            "names": sorted(database.label_names([], start_ms=T0_MS, end_ms=T0_MS + 10_000)),
            "load": sorted([str(series.labels), series.values.tolist()] for series in answer.series),
        }


def write_vector(root: Path) -> None:
    with VectorStore.open(_vectors(root)) as store:
        store.upsert([Vector("a", [1, 0]), Vector("b", [0, 1]), Vector("c", [1, 1])])
        store.flush()
        store.delete(["c"])
        store.flush()


def _vectors(root: Path) -> VectorConfig:
    return VectorConfig(store=f"file://{root / 'vectors'}", dimensions=2)


def read_vector(root: Path) -> Found:
    with VectorStore.open(_vectors(root)) as store:
        return {"near": [hit.id for hit in store.search([1, 0], k=3)]}


def write_ledger(root: Path) -> None:
    ledger = Ledger(StoreConfig(url=str(root / "ledger")))
    for number in range(3):
        ledger.write(
            "clicks",
            BatchLine(
                batch=number,
                start={0: number * 10},
                end={0: number * 10 + 10},
                read=10,
                dead=1,
                rows={"delta": 9},
                one_to_one={"delta": True},
                at_ms=T0_MS + number,
            ),
        )


def read_ledger(root: Path) -> Found:
    lines = Ledger(StoreConfig(url=str(root / "ledger"))).lines("clicks")
    return {"lines": [msgspec.to_builtins(line, str_keys=True) for line in lines]}


KINDS: Final[Mapping[str, tuple[Callable[[Path], None], Callable[[Path], Found]]]] = {
    "buffer": (write_buffer, read_buffer),
    "topics": (write_topics, read_topics),
    "quiver": (write_quiver, read_quiver),
    "timeseries": (write_timeseries, read_timeseries),
    "vector": (write_vector, read_vector),
    "ledger": (write_ledger, read_ledger),
}


def pack(folder: Path) -> bytes:
    """The folder as a compressed archive, without owners, times and files that are only allocated."""

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if info.name.endswith(".tmp"):
            return None
        info.uid = info.gid = info.mtime = 0
        info.uname = info.gname = ""
        return info

    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        archive.add(folder, arcname=".", filter=plain)
    return gzip.compress(raw.getvalue(), mtime=0)


def unpack(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")


def add(name: str) -> None:
    """Write a new set of archives. Raises `FileExistsError` if there is one of that name."""
    target = GOLDEN / name
    target.mkdir(parents=True)
    expected: dict[str, Found] = {}
    for kind, (write, read) in KINDS.items():
        with tempfile.TemporaryDirectory() as place:
            written, copy = Path(place, "written"), Path(place, "copy")
            write(written)
            (target / f"{kind}.tar.gz").write_bytes(pack(written))
            unpack(target / f"{kind}.tar.gz", copy)
            expected[kind] = read(copy)
    text = json.dumps(expected, indent=1, sort_keys=True, ensure_ascii=False)
    (target / "expected.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    add(sys.argv[1])
