"""Dead letters go back into the queue once, wherever a redrive is interrupted."""

from __future__ import annotations

import asyncio
import datetime
import logging
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.buffer import Consumer, ConsumerConfig, Producer, ProducerConfig
from penstock.buffer.sharded import ShardedProducer
from penstock.errors import Conflict, Corrupt, InvalidInput, OutcomeUnknown
from penstock.objects import Data, MemoryStore, Version
from penstock.spark.pipeline.redrive import Redrive, RedriveDriver, Wanted, choose, lay_out, reasons_of
from penstock.spark.pipeline.spec import PipelineSpec, read_spec
from penstock.spark.tables.spec import TableSpec

NOON = datetime.datetime(2026, 5, 1, 12, tzinfo=datetime.UTC)
WRITES = ("the plan", "the identity", "the batch", "the manifest", "the book", "the end")


class Killed(BaseException):
    """The process was killed."""


class MortalStore(MemoryStore):
    """A store that dies at one of its writes, before or after it is applied."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[str] = []
        self.dies_at: tuple[int, bool] | None = None
        self.answer: BaseException = Killed()

    async def put(self, key: str, data: Data) -> Version:
        self._die(key, applied=False)
        version = await super().put(key, data)
        self._die(key, applied=True)
        return version

    async def put_if_absent(self, key: str, data: Data) -> Version:
        self._die(key, applied=False)
        version = await super().put_if_absent(key, data)
        self._die(key, applied=True)
        return version

    async def put_if_match(self, key: str, data: Data, version: Version) -> Version:
        self._die(key, applied=False)
        stored = await super().put_if_match(key, data, version)
        self._die(key, applied=True)
        return stored

    def _die(self, key: str, *, applied: bool) -> None:
        if not applied:
            self.written.append(key)
        if self.dies_at == (len(self.written) - 1, applied):
            raise self.answer


class Bench:
    """Letters in memory, and one store for the queue and the ledger."""

    def __init__(self, letters: pa.Table) -> None:
        self.store = MortalStore()
        self.letters = letters
        asyncio.run(self._produce())
        self.store.written.clear()
        self.spec = spec()

    async def _produce(self) -> None:
        async with Producer(ProducerConfig(store=self.store)) as producer:
            await producer.produce([b"first"], b"")

    def read(self, table: TableSpec, columns: tuple[str, ...], within: tuple[int, int] | None) -> pa.Table:
        return self.letters.select(list(columns))

    def driver(self) -> RedriveDriver:
        return RedriveDriver(self.spec, self.store, self.store, read=self.read)

    def run(self, wanted: Wanted | None = None) -> Redrive:
        return asyncio.run(self.driver().run(wanted or Wanted()))

    def queued(self) -> list[bytes]:
        """Return every record in the queue after the first."""

        async def work() -> list[bytes]:
            found: list[bytes] = []
            async with await Consumer.open(ConsumerConfig(store=self.store, gc_enabled=False)) as consumer:
                while (batch := await consumer.next_batch()) is not None:
                    found += batch.entries
            return found[1:]

        return asyncio.run(work())


def spec() -> PipelineSpec:
    return read_spec(
        {
            "name": "clicks",
            "source": {"buffer": {"store": "queue"}},
            "decode": {"format": "json", "schema": "user string"},
            "sink": {"delta": {"path": "table"}},
        },
        base=Path("/nowhere"),
    )


def letters(
    *places: tuple[int, int, int], reason: str = "is empty", pipeline: str = "clicks", metadata: bytes = b"m"
) -> pa.Table:
    count = len(places)
    return pa.table(
        {
            "pipeline": pa.array([pipeline] * count, pa.string()),
            "shard": pa.array([place[0] for place in places], pa.int32()),
            "sequence": pa.array([place[1] for place in places], pa.int64()),
            "index": pa.array([place[2] for place in places], pa.int32()),
            "ingestion_time": pa.array([NOON] * count, pa.timestamp("us", "UTC")),
            "metadata": pa.array([metadata] * count, pa.binary()),
            "value": pa.array([b"%d-%d-%d" % place for place in places], pa.binary()),
            "reason": pa.array([reason] * count, pa.string()),
            "at": pa.array([NOON] * count, pa.timestamp("us", "UTC")),
        }
    )


def test_letters_are_appended_in_order_and_never_again() -> None:
    bench = Bench(letters((0, 2, 1), (0, 1, 0)))
    done = bench.run()
    assert done.done is not None
    assert (done.done.number, done.done.records, done.done.first) == (1, 2, 1)
    assert bench.queued() == [b"0-1-0", b"0-2-1"]
    assert bench.run() == Redrive()
    bench.letters = pa.concat_tables([bench.letters, letters((0, 3, 0))])
    again = bench.run()
    assert again.done is not None
    assert again.done.number == 2
    assert bench.queued() == [b"0-1-0", b"0-2-1", b"0-3-0"]


def test_only_chosen_letters_are_redriven_and_they_are_recorded() -> None:
    bench = Bench(letters((0, 1, 0), (0, 1, 1), (0, 2, 0)))
    done = bench.run(Wanted(positions=frozenset({(0, 1, 1), (0, 9, 9)})))
    assert (done.found, done.left) == (1, 0)
    assert bench.queued() == [b"0-1-1"]
    plans, finished = asyncio.run(bench.driver().plans())
    assert ([plan.letters for plan in plans.values()], finished) == ([[(0, 1, 1)]], {1})
    bench.run()
    assert bench.queued() == [b"0-1-1", b"0-1-0", b"0-2-0"]


@pytest.mark.parametrize("applied", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("write", range(len(WRITES)), ids=WRITES)
def test_a_redrive_that_is_killed_is_finished_by_the_next(write: int, applied: bool) -> None:
    bench = Bench(letters((0, 1, 0), (0, 1, 1), (0, 4, 2)))
    bench.store.dies_at = (write, applied)
    with pytest.raises(Killed):
        bench.run()
    bench.store.dies_at = None
    bench.letters = pa.concat_tables([bench.letters, letters((0, 5, 0))])
    result = bench.run()
    begun = write > 0 or applied
    ended = write == len(WRITES) - 1 and applied
    assert [earlier.records for earlier in result.finished] == ([3] if begun and not ended else [])
    assert Counter(bench.queued()) == Counter([b"0-1-0", b"0-1-1", b"0-4-2", b"0-5-0"])
    assert bench.run() == Redrive()


def test_the_crash_test_covers_every_write_of_a_redrive() -> None:
    bench = Bench(letters((0, 1, 0)))
    bench.run()
    assert len(bench.store.written) == len(WRITES)


def test_an_interrupted_redrive_keeps_its_letters_for_any_next_selection() -> None:
    bench = Bench(letters((0, 1, 0), (0, 2, 0)))
    bench.store.dies_at = (0, True)
    with pytest.raises(Killed):
        bench.run(Wanted(limit=1))
    bench.store.dies_at = None
    result = bench.run(Wanted(reason="no such reason"))
    assert [earlier.records for earlier in result.finished] == [1]
    assert result.done is None
    assert bench.queued() == [b"0-1-0"]


def test_the_plan_is_read_after_a_lost_response() -> None:
    bench = Bench(letters((0, 1, 0)))
    bench.store.dies_at, bench.store.answer = (0, True), OutcomeUnknown("no answer")
    assert bench.run().done is not None
    assert bench.queued() == [b"0-1-0"]


def test_the_second_of_two_concurrent_redrives_has_no_effect() -> None:
    bench = Bench(letters((0, 1, 0)))

    async def both() -> list[Redrive | BaseException]:
        drivers = [bench.driver().run(Wanted()) for _ in range(2)]
        return await asyncio.gather(*drivers, return_exceptions=True)

    results = asyncio.run(both())
    assert bench.queued() == [b"0-1-0"]
    refused = [result for result in results if isinstance(result, BaseException)]
    assert all(isinstance(result, Conflict) for result in refused)


def test_a_slow_redrive_that_was_overtaken_adds_nothing() -> None:
    bench = Bench(letters((0, 1, 0)))

    async def slow() -> None:
        driver = bench.driver()
        plan = await driver._write_plan(1, bench.letters)
        await bench.driver().run(Wanted())
        bench.letters = pa.concat_tables([bench.letters, letters((0, 2, 0))])
        await bench.driver().run(Wanted())
        await driver._finish(1, plan, resumed=False)

    asyncio.run(slow())
    assert bench.queued() == [b"0-1-0", b"0-2-0"]


def test_letters_that_left_their_table_are_reported_and_not_forgotten() -> None:
    bench = Bench(letters((0, 1, 0), (0, 2, 0)))
    bench.store.dies_at = (0, True)
    with pytest.raises(Killed):
        bench.run()
    bench.store.dies_at = None
    kept, bench.letters = bench.letters, letters((0, 1, 0))
    with pytest.raises(Corrupt, match="1 of the 2 letters of redrive 1"):
        bench.run()
    bench.letters = kept
    bench.run()
    assert bench.queued() == [b"0-1-0", b"0-2-0"]


@pytest.mark.parametrize("lost", [("00000001.json",), ("00000001.json", "00000001.done.json")])
def test_a_redrive_whose_letters_are_lost_does_not_swallow_the_next(
    lost: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(letters((0, 1, 0)))
    bench.run()
    for name in lost:
        asyncio.run(bench.store.delete_many([f"redrive/{name}"]))
    bench.letters = pa.concat_tables([bench.letters, letters((0, 2, 0))])
    done = bench.run().done
    assert done is not None
    assert done.number == 2
    assert bench.queued() == [b"0-1-0", b"0-1-0", b"0-2-0"]
    [report] = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert "has lost redrive/00000001.json" in report


def test_an_interrupted_redrive_is_not_finished_under_another_identity() -> None:
    bench = Bench(letters((0, 1, 0)))
    bench.run()
    bench.letters = pa.concat_tables([bench.letters, letters((0, 2, 0))])
    asyncio.run(bench.store.delete_many(["redrive/00000001.done.json"]))
    bench.run()
    asyncio.run(bench.store.delete_many(["redrive/00000002.done.json"]))
    asyncio.run(bench.store.delete_many(["redrive/identity.json"]))
    with pytest.raises(Corrupt, match=r"identity\.json .* is missing"):
        bench.run()
    assert bench.queued() == [b"0-1-0", b"0-2-0"]


def test_a_preview_changes_nothing_and_lists_interrupted_redrives() -> None:
    bench = Bench(letters((0, 1, 0), (0, 2, 0)))
    bench.store.dies_at = (0, True)
    with pytest.raises(Killed):
        bench.run(Wanted(limit=1))
    bench.store.dies_at = None
    before = len(bench.store.written)
    told = asyncio.run(bench.driver().preview(Wanted()))
    assert (told.found, told.unfinished, told.reasons) == (1, (1,), {"is empty": 1})
    assert len(bench.store.written) == before


def test_a_sharded_queue_gets_all_of_a_redrive_in_one_shard() -> None:
    bench = Bench(letters((0, 1, 0), (1, 1, 0)))

    async def shards() -> None:
        async with await ShardedProducer.open(ProducerConfig(store=bench.store), 2):
            pass

    asyncio.run(shards())
    result = bench.run()
    assert result.done is not None
    assert result.done.shard in (0, 1)
    assert bench.run() == Redrive()


def test_a_pipeline_without_dead_letters_has_nothing_to_redrive() -> None:
    store = MemoryStore()
    plain = read_spec(
        {
            "name": "clicks",
            "source": {"buffer": {"store": "queue"}},
            "on_error": "skip",
            "sink": {"delta": {"path": "table"}},
        }
    )
    with pytest.raises(InvalidInput, match="keeps no dead letters"):
        RedriveDriver(plain, store, store)


def test_gaps_and_other_pipelines_are_skipped_and_a_position_counts_once() -> None:
    heads = pa.concat_tables(
        [letters((0, 1, -1), (0, 2, 0), (0, 2, 0)), letters((0, 3, 0), pipeline="orders")]
    )
    chosen = choose(heads, "clicks", [], Wanted())
    assert chosen.select(["sequence", "index"]).to_pylist() == [{"sequence": 2, "index": 0}]


def test_letters_are_chosen_by_reason_sequence_time_and_number() -> None:
    heads = letters((0, 1, 0), (0, 2, 0), (0, 3, 0))
    heads = pa.concat_tables([heads, letters((0, 4, 0), reason="has no user")])
    noon_ms = round(NOON.timestamp() * 1000)

    def sequences(wanted: Wanted, taken: list[tuple[int, int, int]] | None = None) -> list[int]:
        return [row["sequence"] for row in choose(heads, "clicks", taken or [], wanted).to_pylist()]

    assert sequences(Wanted(reason="NO USER")) == [4]
    assert sequences(Wanted(sequences=(2, 3))) == [2, 3]
    assert sequences(Wanted(limit=2)) == [1, 2]
    assert sequences(Wanted(limit=2), [(0, 1, 0)]) == [2, 3]
    assert sequences(Wanted(since_ms=noon_ms)) == [1, 2, 3, 4]
    assert sequences(Wanted(since_ms=noon_ms + 1)) == []
    assert reasons_of(heads) == {"is empty": 3, "has no user": 1}


def test_records_keep_their_metadata_across_the_cuts_between_batches() -> None:
    table = pa.concat_tables(
        [
            letters((0, 1, 0), (0, 1, 1), metadata=b"a"),
            letters((0, 2, 0), (0, 2, 1), (0, 2, 2), metadata=b"b"),
        ]
    )
    size = 5 + 8
    batches = lay_out(table, 2 * size, 0)
    noon_ms = round(NOON.timestamp() * 1000)
    told = [
        [(item.start_index, item.payload, item.ingestion_time_ms) for item in batch.metadata]
        for batch in batches
    ]
    assert told == [[(0, b"a", noon_ms)], [(0, b"b", noon_ms)], [(0, b"b", noon_ms)]]
    assert [len(batch.values) for batch in batches] == [2, 2, 1]
    (whole,) = lay_out(table, 1 << 20, 0)
    assert [(item.start_index, item.payload) for item in whole.metadata] == [(0, b"a"), (2, b"b")]
