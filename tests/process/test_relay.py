"""A real server's topics into queues: each record once, whatever is lost, killed or run twice."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.process.cli_runner import command, environment, penstock
from tests.process.topics_server import FSYNC, KEY, Server, serving
from tests.servers import free_ports
from tests.unit.buffer.doubles import MANIFEST, ScriptedStore, once

from penstock import errors
from penstock.buffer import Consumer, ConsumerConfig, ProducerConfig
from penstock.buffer.sharded import ShardedConsumer, ShardedProducer
from penstock.clock import SYSTEM_CLOCK
from penstock.ids import mint_ulid
from penstock.objects import MemoryStore, ObjectStore
from penstock.services import Relay, RelayConfig, RelayGap, RelayReport, RelayTaken, TopicChanged
from penstock.topics.client import Client
from penstock.topics.config import Durability, TopicConfig
from penstock.topics.errors import TopicNotFound

DISK = TopicConfig(durability=Durability.DISK)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("relay") / "data") as started:
        yield started


@pytest.fixture
async def client(server: Server) -> AsyncIterator[Client]:
    async with Client(server.url, key=KEY) as opened:
        yield opened


@pytest.fixture
def topic() -> str:
    return f"t-{mint_ulid(SYSTEM_CLOCK.now_ms(), random.Random())}"


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore("relay")


def plan(topic: str, store: ObjectStore, **settings: object) -> RelayConfig:
    queue = ProducerConfig(store=store, flush_interval="20ms")
    return RelayConfig(topic=topic, queue=queue, retry_for="20s", **settings)  # type: ignore[arg-type]


async def relay(client: Client, config: RelayConfig) -> RelayReport:
    return await Relay(client, config).run(once=True)


async def delivered(store: ObjectStore | str, *, ack: bool = False) -> list[bytes]:
    consumer = await Consumer.open(ConsumerConfig(store=store))
    found: list[bytes] = []
    while (batch := await consumer.next_batch()) is not None:
        found += batch.entries
        if ack:
            await consumer.ack(batch.sequence)
    await consumer.close()
    return found


def numbers(records: list[bytes]) -> list[int]:
    return [json.loads(record)["data"] for record in records]


async def fill(client: Client, topic: str, values: range, config: TopicConfig = DISK) -> None:
    for start in range(values.start, values.stop, 500):
        await client.write(topic, range(start, min(start + 500, values.stop)), config=config)


async def test_every_record_is_moved_once_with_all_that_the_topic_says_of_it(
    client: Client, topic: str, store: MemoryStore
) -> None:
    await client.write(topic, [{"a": 1}], tag="x", node="n", config=DISK)
    await fill(client, topic, range(2500))
    report = await relay(client, plan(topic, store))
    assert (report.records, report.through, report.head, report.missed) == (2501, 2501, 2501, 0)
    found = [json.loads(record) for record in await delivered(store)]
    assert [record["$seq"] for record in found] == [*range(1, 2502)]
    assert found[0] == {"$seq": 1, "$ts": found[0]["$ts"], "$tag": "x", "$node": "n", "data": {"a": 1}}
    again = await relay(client, plan(topic, store))
    assert (again.records, again.batches, again.through) == (0, 0, 2501)


async def test_it_goes_on_where_the_queue_says_also_when_everything_was_consumed(
    client: Client, topic: str, store: MemoryStore
) -> None:
    seen: list[int] = []
    for start in (0, 10, 20):
        await fill(client, topic, range(start, start + 10))
        await relay(client, plan(topic, store))
        seen += numbers(await delivered(store, ack=True))
    assert seen == [*range(30)]


async def test_it_follows_until_it_is_stopped(client: Client, topic: str, store: MemoryStore) -> None:
    await client.put_topic(topic, DISK)
    seen = asyncio.Queue[RelayReport]()
    job = Relay(client, plan(topic, store), on_progress=seen.put_nowait)
    running = asyncio.create_task(job.run())
    await seen.get()
    for start in (0, 5):
        await fill(client, topic, range(start, start + 5))
        while (await seen.get()).through < start + 5:
            pass
    job.stop()
    report = await running
    assert (report.records, report.lag) == (10, 0)
    assert numbers(await delivered(store)) == [*range(10)]


async def test_the_first_run_begins_where_it_is_told(client: Client, topic: str, store: MemoryStore) -> None:
    await fill(client, topic, range(10))
    with pytest.raises(errors.InvalidInput, match="ends at 10, before 11"):
        await relay(client, plan(topic, store, start=11))
    assert (await relay(client, plan(topic, store, start="latest"))).records == 0
    await relay(client, plan(topic, store, start=7, value="data"))
    assert await delivered(store) == [b"7", b"8", b"9"]
    await fill(client, topic, range(10, 12))
    assert (await relay(client, plan(topic, store, start=0))).records == 2


async def test_deleted_records_are_passed_over_in_silence(
    client: Client, topic: str, store: MemoryStore
) -> None:
    await fill(client, topic, range(6))
    await client.delete(topic, before_seq=4)
    report = await relay(client, plan(topic, store, start=0))
    assert (report.records, report.missed, report.through) == (3, 0, 6)
    await client.delete(topic, before_seq=7)
    assert (await relay(client, plan(topic, store))).records == 0


async def test_a_gap_fails_is_skipped_or_is_recorded(client: Client, topic: str) -> None:
    await fill(client, topic, range(10), TopicConfig(cap_records=3, durability=Durability.DISK))
    failing, skipping, recording = (MemoryStore(name) for name in ("fail", "skip", "record"))
    with pytest.raises(RelayGap, match=r"records 1 to 7 of .* are gone"):
        await relay(client, plan(topic, failing, start=0))
    assert await delivered(failing) == []
    report = await relay(client, plan(topic, skipping, start=0, on_gap="skip"))
    assert (report.records, report.missed) == (3, 7)
    assert numbers(await delivered(skipping)) == [7, 8, 9]
    report = await relay(client, plan(topic, recording, start=0, on_gap="record"))
    assert (report.records, report.missed, report.batches) == (4, 7, 1)
    told = await delivered(recording)
    assert json.loads(told[0]) == {"gap": {"first": 1, "last": 7, "reason": "cap"}}
    assert numbers(told[1:]) == [7, 8, 9]
    assert (await relay(client, plan(topic, MemoryStore("new")))).missed == 0, "earliest is what is there"


@pytest.mark.parametrize("anew", [2, 5, 8])
async def test_a_topic_that_was_made_anew_is_noticed_when_everything_was_consumed(
    client: Client, topic: str, store: MemoryStore, anew: int
) -> None:
    await fill(client, topic, range(5))
    await relay(client, plan(topic, store))
    assert numbers(await delivered(store, ack=True)) == [*range(5)]
    await client.remove_topic(topic)
    await asyncio.sleep(0.005)  # a record of the same number and the same millisecond would be taken for it
    await fill(client, topic, range(100, 100 + anew))
    with pytest.raises(TopicChanged, match="created again"):
        await relay(client, plan(topic, store, on_gap="skip"))
    assert await delivered(store) == []


@pytest.mark.parametrize("damage", ["zeroed", "truncated", "missing"])
async def test_a_relay_whose_note_is_damaged_continues(
    client: Client, topic: str, store: MemoryStore, damage: str
) -> None:
    await fill(client, topic, range(5))
    await relay(client, plan(topic, store))
    assert numbers(await delivered(store, ack=True)) == [*range(5)]
    [note] = await store.list("ingest/manifest.relay/")
    raw = bytes((await store.get(note.key)).data)
    if damage == "missing":
        await store.delete_many([note.key])
    else:
        await store.put(note.key, bytes(len(raw)) if damage == "zeroed" else raw[: len(raw) // 2])
    await fill(client, topic, range(5, 8))
    await relay(client, plan(topic, store))
    assert numbers(await delivered(store)) == [5, 6, 7]


@pytest.mark.parametrize("anew", [2, 5, 8])
async def test_a_topic_that_was_made_anew_is_noticed(
    client: Client, topic: str, store: MemoryStore, anew: int
) -> None:
    await fill(client, topic, range(5))
    await relay(client, plan(topic, store))
    await client.remove_topic(topic)
    await asyncio.sleep(0.005)  # a record of the same number and the same millisecond would be taken for it
    await fill(client, topic, range(100, 100 + anew))
    with pytest.raises(TopicChanged, match="created again"):
        await relay(client, plan(topic, store, on_gap="skip"))
    assert numbers(await delivered(store)) == [*range(5)]
    await relay(client, plan(topic, store, app="second"))
    assert numbers(await delivered(store))[5:] == [*range(100, 100 + anew)]


async def test_a_topic_whose_numbers_may_start_over_is_refused(
    client: Client, topic: str, store: MemoryStore
) -> None:
    with pytest.raises(TopicNotFound):
        await relay(client, plan(topic, store))
    for weak in (Durability.EPHEMERAL, Durability.MEMORY):
        await client.put_topic(topic, TopicConfig(durability=weak))
        with pytest.raises(errors.Unsupported, match="Use disk or fsync"):
            await relay(client, plan(topic, store))


async def test_of_two_relays_at_once_one_is_refused_and_no_record_is_doubled(
    client: Client, topic: str, store: MemoryStore
) -> None:
    await client.put_topic(topic, DISK)
    jobs = [Relay(client, plan(topic, store)) for _ in range(2)]
    running = [asyncio.create_task(job.run()) for job in jobs]
    count = 0
    while not any(task.done() for task in running):
        await client.write(topic, [count])
        count += 1
    for job in jobs:
        job.stop()
    ends = await asyncio.gather(*running, return_exceptions=True)
    assert {type(end) for end in ends} <= {RelayTaken, RelayReport}
    assert RelayTaken in {type(end) for end in ends}
    await relay(client, plan(topic, store))
    assert numbers(await delivered(store)) == [*range(count)]


FAULTS = {
    "refused": lambda store, hook: setattr(store, "before", hook),
    "applied then lost": lambda store, hook: setattr(store, "after", hook),
}


@pytest.mark.parametrize("when", FAULTS)
async def test_a_fault_at_any_call_of_the_store_neither_loses_nor_doubles(
    client: Client, topic: str, when: str
) -> None:
    await fill(client, topic, range(4))
    error = errors.Unavailable("away") if when == "refused" else errors.OutcomeUnknown("no answer")
    ops = ("get", "put", "cas") if when == "refused" else ("put", "cas")
    for op in ops:
        for skip in range(30):
            store = ScriptedStore(clock=SYSTEM_CLOCK)
            FAULTS[when](store, once(error, op, "ingest", skip=skip, times=2))
            await relay(client, plan(topic, store))
            hit = store.count(op) > skip
            store.before = store.after = lambda op, key: None
            await relay(client, plan(topic, store))
            assert numbers(await delivered(store)) == [*range(4)], (op, skip)
            if not hit:
                break
        else:
            raise AssertionError(f"more than 30 calls of {op}")


async def test_an_append_whose_answer_is_lost_for_good_is_found_and_counted(
    client: Client, topic: str
) -> None:
    await fill(client, topic, range(4))
    store = ScriptedStore(clock=SYSTEM_CLOCK)
    lost = once(errors.OutcomeUnknown("no answer"), "cas", MANIFEST, times=1)
    store.after = lost
    store.before = lambda op, key: (
        errors.Unavailable("away")
        if op == "get" and store.count("cas", MANIFEST) == 1 and next(away, 0)
        else None
    )
    away = iter([1] * 3)
    config = plan(topic, store)
    report = await relay(client, replace(config, queue=replace(config.queue, append_deadline="1ms")))
    assert (report.records, report.through) == (4, 4)
    assert numbers(await delivered(store)) == [*range(4)]


async def test_a_sharded_queue_gets_all_of_it_in_one_shard(
    client: Client, topic: str, store: MemoryStore
) -> None:
    await (await ShardedProducer.open(ProducerConfig(store=store), 4)).close()
    await fill(client, topic, range(10))
    await relay(client, plan(topic, store))
    assert (await relay(client, plan(topic, store))).records == 0
    consumer = await ShardedConsumer.open(ConsumerConfig(store=store))
    batch = await consumer.next_batch()
    assert batch is not None
    assert numbers(batch.entries) == [*range(10)]
    assert await consumer.next_batch() is None
    await consumer.close()


def test_the_command_moves_what_is_there_and_tells_it(server: Server, topic: str, tmp_path: Path) -> None:
    with server.client() as writer:
        writer.write(topic, range(20), config=FSYNC)
    told = server.json("relay", topic, tmp_path / "store", "--once", "--value", "data")
    assert told == {
        "topic": topic,
        "app": f"relay:{topic}",
        "through": 20,
        "head": 20,
        "records": 20,
        "bytes": sum(len(str(n)) for n in range(20)),
        "batches": 1,
        "missed": 0,
        "gaps": [],
        "stopped_by": None,
    }
    assert b"20 of 20" in server.run("relay", topic, tmp_path / "store", "--once")
    assert penstock("buffer", "tail", tmp_path / "store").stdout.count(b"\n") == 20


def test_the_command_makes_the_topic_if_asked_and_tells_how_far_it_is_as_events(
    server: Server, topic: str, tmp_path: Path
) -> None:
    asked = ("relay", topic, tmp_path / "store", "--once", "--create", "--events")
    first = [json.loads(line) for line in server.run(*asked).splitlines()]
    assert [event["event"] for event in first] == ["progress", "stopped"]
    with server.client() as writer:
        assert writer.state(topic).config.durability is Durability.FSYNC
        writer.write(topic, range(20))
    events = [json.loads(line) for line in server.run(*asked).splitlines()]
    assert events[0]["lag"] == 20
    assert (events[-1]["through"], events[-1]["records"], events[-1]["lag"]) == (20, 20, 0)


def test_the_command_stops_at_a_gap_with_a_code_of_its_own(
    server: Server, topic: str, tmp_path: Path
) -> None:
    with server.client() as writer:
        writer.write(topic, range(9), config=TopicConfig(cap_records=2))
    store = tmp_path / "store"
    told = penstock(
        "topics",
        "relay",
        topic,
        store,
        "--once",
        "--after",
        "0",
        "--url",
        server.url,
        code=5,
        TOPICS_API_KEY=KEY,
    )
    assert b"records 1 to 7" in told.stderr
    assert b"hint" not in told.stderr
    gaps = server.json("relay", topic, store, "--once", "--after", "0", "--on-gap", "skip")["gaps"]
    assert gaps == [{"first": 1, "last": 7, "reason": "cap"}]
    server.run("relay", topic, store, "--after", "first", code=2)
    server.run("relay", "absent", store, "--once", code=2)


def test_sigterm_ends_the_command_after_its_batch(server: Server, topic: str, tmp_path: Path) -> None:
    with server.client() as writer:
        writer.write(topic, range(100), config=FSYNC)
        process = start(server, topic, tmp_path / "store")
        wait_for(tmp_path / "store", 100)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=20)
    told = json.loads(out)
    assert process.returncode == 0
    assert (told["through"], told["stopped_by"]) == (100, "SIGTERM")


def test_sigterm_ends_the_command_at_once_before_its_topic_is_there(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes the question, and answers nothing
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        arguments = command("topics", "relay", "t", tmp_path, "--url", url, "--create", "--json")
        process = subprocess.Popen(arguments, env=environment(), stdout=subprocess.PIPE)
        silent.settimeout(60)
        asked, _ = silent.accept()
        with asked:
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert json.loads(out)["stopped_by"] == "SIGTERM"


def start(server: Server, topic: str, store: Path) -> subprocess.Popen[bytes]:
    store.mkdir(exist_ok=True)
    arguments = command(
        "topics", "relay", topic, store, "--url", server.url, "--json", "--flush-interval", "5ms"
    )
    return subprocess.Popen(arguments, env=environment(TOPICS_API_KEY=KEY), stdout=subprocess.PIPE)


def wait_for(store: Path, count: int) -> None:
    deadline = time.monotonic() + 30
    while len(asyncio.run(delivered(str(store)))) < count:
        assert time.monotonic() < deadline
        time.sleep(0.1)


async def test_a_relay_outlives_servers_that_are_killed(topic: str, tmp_path: Path) -> None:
    store, data = MemoryStore("outlives"), tmp_path / "data"
    (port,) = free_ports(1)
    reached = asyncio.Queue[int]()

    async def relayed(count: int) -> None:
        while await reached.get() < count:
            pass

    with contextlib.ExitStack() as running_server:
        server = running_server.enter_context(serving(data, port))
        async with (
            Client(server.url, key=KEY) as writer,
            Client(server.url, key=KEY, retry_deadline="1s") as reader,
        ):
            await fill(writer, topic, range(1000), FSYNC)
            job = Relay(
                reader, plan(topic, store), on_progress=lambda report: reached.put_nowait(report.through)
            )
            running = asyncio.create_task(job.run())
            for start in (1000, 2000):
                await relayed(start)
                server.process.kill()
                await asyncio.sleep(1.5)  # longer than the client tries by itself
                assert not running.done()
                running_server.close()
                server = running_server.enter_context(serving(data, port))
                await fill(writer, topic, range(start, start + 1000))
            await relayed(3000)
            job.stop()
            assert (await running).records == 3000
    assert numbers(await delivered(store)) == [*range(3000)]


def test_killed_relays_neither_lose_nor_double(server: Server, topic: str, tmp_path: Path) -> None:
    rng = random.Random(5)
    store = tmp_path / "store"
    seen: list[int] = []
    count = kills = 0
    with server.client() as writer:
        writer.put_topic(topic, FSYNC)
        deadline = time.monotonic() + 20
        while kills < 8 and time.monotonic() < deadline:
            process = start(server, topic, store)
            # Starting takes a moment: kills fall before, into and after the appends.
            until = time.monotonic() + rng.uniform(0.2, 1.6)
            while time.monotonic() < until:
                writer.write(topic, range(count, count + 50))
                count += 50
                time.sleep(0.005)
            process.kill()
            process.communicate()
            kills += 1
            if kills % 2 and (store / MANIFEST).exists():
                seen += numbers(asyncio.run(delivered(str(store), ack=True)))
    server.json("relay", topic, store, "--once")
    seen += numbers(asyncio.run(delivered(str(store), ack=True)))
    assert kills >= 4
    assert seen == [*range(count)]
