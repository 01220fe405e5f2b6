from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from penstock.blocking import loop_thread
from penstock.buffer import (
    ConsumerConfig,
    FencedError,
    GarbageCollectorConfig,
    InvalidInputError,
    ProducerConfig,
)
from penstock.buffer.sync import Consumer, GarbageCollector, Producer, ShardedConsumer, ShardedProducer
from penstock.errors import Rejected
from penstock.metrics import Registry
from penstock.objects import Blob
from penstock.objects.memory import MemoryStore
from penstock.objects.store import ByteRange


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def producer_on(store: MemoryStore, interval: str = "1ms") -> Producer:
    return Producer(ProducerConfig(store=store, flush_interval=interval), registry=Registry())


def consumer_on(store: MemoryStore, last_acked: int | None = None) -> Consumer:
    return Consumer.open(ConsumerConfig(store=store), last_acked, registry=Registry())


def test_produce_and_consume_without_an_event_loop(store: MemoryStore) -> None:
    with producer_on(store) as producer:
        handle = producer.produce([b"a", b"b"], b"meta")
        outcome = handle.await_durable(10)
        assert (outcome.sequence, handle.watcher.result()) == (0, outcome)
        producer.produce([b"c"])
        producer.flush()
        assert producer.conflict_rate() == 0
        assert handle.ingestion_time_ms > 0
    with consumer_on(store) as consumer:
        assert (consumer.epoch, consumer.acked, len(consumer)) == (1, None, 2)
        for batch in consumer.drain():
            consumer.ack(batch.sequence)
        assert consumer.acked == 1
        consumer.flush()
        assert len(consumer) == 0
    with consumer_on(store) as consumer:
        assert consumer.next_batch() is None
        assert consumer.next_descriptors(5) == []


def test_descriptors_and_ack_through_without_an_event_loop(store: MemoryStore) -> None:
    with producer_on(store) as producer:
        for number in range(3):
            producer.produce([b"%d" % number]).await_durable()
    with consumer_on(store, last_acked=0) as consumer:
        handed = consumer.next_descriptors(5)
        assert [consumer.fetch_descriptor(d).entries for d in handed] == [[b"1"], [b"2"]]
        consumer.ack_through(2)
    assert GarbageCollector(GarbageCollectorConfig(store=store)).collect(dry_run=True).deleted == ()


def test_errors_are_passed_through(store: MemoryStore) -> None:
    with producer_on(store) as producer, pytest.raises(InvalidInputError):
        producer.produce([])
    old = consumer_on(store)
    new = consumer_on(store)
    with pytest.raises(FencedError):
        old.next_batch()
    new.close()
    with pytest.raises(FencedError):
        Consumer(ConsumerConfig(store=store), registry=Registry()).next_batch()


def test_a_timeout_does_not_stop_the_write(store: MemoryStore) -> None:
    with producer_on(store, "1h") as producer:
        handle = producer.produce([b"a"])
        with pytest.raises(TimeoutError):
            handle.await_durable(0.01)
        assert handle.watcher.result() is None
        producer.flush()
        assert handle.await_durable().sequence == 0


def test_threads_may_share_a_producer(store: MemoryStore) -> None:
    with producer_on(store) as producer:

        def work(number: int) -> None:
            for turn in range(20):
                producer.produce([b"%d:%d" % (number, turn)])

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    with consumer_on(store) as consumer:
        records = [record for batch in consumer.drain() for record in batch.entries]
    assert len(records) == len(set(records)) == 80
    for number in range(4):
        mine = [record for record in records if record.startswith(b"%d:" % number)]
        assert mine == [b"%d:%d" % (number, turn) for turn in range(20)]


def test_a_blocking_call_on_the_loop_itself_is_refused_instead_of_hanging(store: MemoryStore) -> None:
    with producer_on(store) as producer:

        async def mistake() -> None:
            producer.produce([b"a"])

        with pytest.raises(Rejected, match="async class"):
            loop_thread().run(mistake())


FORK = """
import os, sys, warnings
warnings.simplefilter("ignore")
from penstock.buffer import ConsumerConfig, ProducerConfig
from penstock.buffer.sync import Consumer, Producer
from penstock.errors import Rejected
from penstock.objects.memory import MemoryStore

store = MemoryStore()
producer = Producer(ProducerConfig(store=store, flush_interval="1ms"))
handle = producer.produce([b"parent"])
handle.await_durable()
pid = os.fork()
if pid == 0:
    try:
        producer.produce([b"child"])
    except Rejected as error:
        assert "forked" in str(error), error
    else:
        os._exit(3)
    with Producer(ProducerConfig(store=store, flush_interval="1ms")) as fresh:
        fresh.produce([b"child"]).await_durable(20)
    os._exit(0)
_, status = os.waitpid(pid, 0)
producer.close()
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_an_object_from_before_a_fork_is_refused_and_a_new_one_works() -> None:
    source = Path(__file__).parents[3] / "src"
    run = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60, cwd=source, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")


def test_sharded_blocking_clients_keep_each_key_in_order_and_resume() -> None:
    store = MemoryStore()
    with ShardedProducer.open(ProducerConfig(store=store, flush_interval="1ms"), 3) as producer:
        assert producer.shards == 3
        for number in range(6):
            producer.produce([b"%d" % number], key=b"one key").await_durable(20)
        producer.produce([b"anywhere"])
        producer.flush()
    with ShardedConsumer.open(ConsumerConfig(store=store)) as consumer:
        assert len(consumer) == 7
        batches = list(consumer.drain())
        for batch in batches:
            consumer.ack(batch)
        positions = consumer.positions()
        consumer.flush()
    keyed = [batch.entries[0] for batch in batches if batch.entries != [b"anywhere"]]
    assert keyed == [b"0", b"1", b"2", b"3", b"4", b"5"]
    with ShardedConsumer.open(ConsumerConfig(store=store), positions) as again:
        assert again.next_batch() is None


def test_the_blocking_fetch_handle_fetches_descriptors() -> None:
    store = MemoryStore()
    with Producer(ProducerConfig(store=store, flush_interval="1ms")) as producer:
        producer.produce([b"a", b"b"])
    with Consumer.open(ConsumerConfig(store=store)) as consumer:
        (descriptor,) = consumer.next_descriptors(10)
        assert consumer.fetch_handle().fetch(descriptor).entries == [b"a", b"b"]
        assert consumer.dead_letters == []
        consumer.ack_through(descriptor.sequence)


class _Interrupted(BaseException):
    """The exception that a signal handler raises."""


def test_an_interrupted_next_batch_delivers_the_same_again(store: MemoryStore) -> None:
    with producer_on(store) as producer:
        producer.produce([b"a"]).await_durable(10)
    gated = _GatedStore(store)
    main = threading.get_ident()

    def interrupt(*_: object) -> None:
        raise _Interrupted

    def poke() -> None:
        gated.asked.wait(10)
        signal.pthread_kill(main, signal.SIGUSR1)

    earlier = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with consumer_on(gated) as consumer:
            threading.Thread(target=poke).start()
            with pytest.raises(_Interrupted):
                consumer.next_batch()
            gated.open = True
            batch = consumer.next_batch()
            assert batch is not None
            assert batch.sequence == 0
    finally:
        signal.signal(signal.SIGUSR1, earlier)


class _GatedStore(MemoryStore):
    """A view of another store whose batches cannot be read until a gate is opened."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__()
        self._entries = store._entries
        self._writes = 1000
        self.asked = threading.Event()
        self.open = False

    async def get(self, key: str, byte_range: ByteRange | None = None) -> Blob:
        while key.endswith(".batch") and not self.open:
            self.asked.set()
            await asyncio.sleep(0.001)
        return await super().get(key, byte_range)
