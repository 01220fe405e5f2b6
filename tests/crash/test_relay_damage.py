"""Every object of a queue that a relay fills, damaged in every way: each record once, or reported.

The topic is whole; the queue is what went back. Half of it was consumed before.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.crash.damage import FEW, MANY, Tally, damages, files_below, name_of, names_in, replace_file
from tests.process.topics_server import KEY, Server, serving

from penstock.buffer import Consumer, ConsumerConfig, ProducerConfig
from penstock.errors import PenstockError
from penstock.services import Relay, RelayConfig
from penstock.topics.client import Client
from penstock.topics.config import Durability, TopicConfig

pytestmark = [pytest.mark.crash, pytest.mark.timeout(600)]

SECTION = "Queue"
OWN = {
    "<folder>/manifest",
    "<folder>/manifest.ledger",
    "<folder>/manifest.txn",
    "<folder>/manifest.relay/<id>.json",
    "<folder>/<id>.batch",
}
DISK = TopicConfig(durability=Durability.DISK)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("relay") / "data") as started:
        yield started


async def relay(client: Client, topic: str, root: Path) -> None:
    queue = ProducerConfig(store=str(root), flush_interval="1ms", append_deadline="2s")
    await Relay(client, RelayConfig(topic=topic, queue=queue, retry_for="1s")).run(once=True)


async def consumed(root: Path, most: int | None = None) -> list[int]:
    """The records of the next batches, which are acknowledged."""
    config = ConsumerConfig(store=str(root), gc_enabled=False, retry_deadline="1s")
    found: list[int] = []
    async with await Consumer.open(config) as consumer:
        while (most is None or len(found) < most) and (batch := await consumer.next_batch()) is not None:
            found += [json.loads(entry)["data"] for entry in batch.entries]
            await consumer.ack(batch.sequence)
    return found


async def make(client: Client, topic: str, root: Path) -> tuple[list[dict[str, bytes]], list[int]]:
    """Eight records in four batches, of which two were consumed; copies of the queue on the way."""
    older, seen = [], []
    for first in range(0, 8, 2):
        await client.write(topic, range(first, first + 2), config=DISK)
        await relay(client, topic, root)
        if first < 4:
            seen += await consumed(root, most=2)
        older.append(files_below(root))
    return older, seen


async def check(
    client: Client, topic: str, root: Path, seen: list[int], caplog: pytest.LogCaptureFixture
) -> tuple[str, str | None]:
    caplog.clear()
    try:
        await relay(client, topic, root)
        found = Counter(seen + await consumed(root))
    except PenstockError as error:
        return "refused", None if str(error) else "the error says nothing"
    reported = any(one.levelno >= logging.WARNING for one in caplog.records)
    missing = sorted(set(range(10)) - found.keys())
    twice = sorted(record for record, times in found.items() if times > 1)
    if (missing or twice) and not reported:
        return "wrong", f"records {missing} are gone and {twice} are there twice without a word"
    return ("lost or twice, reported" if missing or twice else "reported" if reported else "complete"), None


@pytest.mark.parametrize("parts", [FEW, pytest.param(MANY, marks=pytest.mark.long)], ids=["few", "many"])
async def test_damage_to_any_object_of_a_relayed_queue_is_reported(
    tmp_path: Path, server: Server, caplog: pytest.LogCaptureFixture, parts: tuple[int, ...]
) -> None:
    root, made, topic = tmp_path / "root", tmp_path / "made", f"relayed-{len(parts)}"
    tally = Tally(SECTION)
    async with Client(server.url, key=KEY) as client:
        older, seen = await make(client, topic, root)
        shutil.copytree(root, made)
        await client.write(topic, range(8, 10))
        files = {name: raw for name, raw in files_below(root).items() if name_of(SECTION, name) in OWN}
        for file, raw in files.items():
            copies = [copy[file] for copy in older if file in copy]
            for damage in damages(file, raw, copies, parts):
                shutil.rmtree(root)
                shutil.copytree(made, root)
                replace_file(root, damage)
                tally.note(damage, *await check(client, topic, root, seen, caplog))
    tally.finish(but=names_in(SECTION).keys() - OWN)
