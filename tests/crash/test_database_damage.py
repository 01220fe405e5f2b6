"""Every file of a fed database, damaged in every way: reported or complete, never silent.

The files are SlateDB's. What it notices, an open or a read reports; what it does not notice, the position in
the queue shows, because rows and position are one write.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest
from tests.crash import test_position_damage as series
from tests.crash.damage import FEW, MANY, Damage, Tally, damages, files_below, names_in, replace_file, some_of

from penstock.buffer import ConsumerConfig, Producer, ProducerConfig
from penstock.errors import PenstockError, Unavailable
from penstock.services import Feed, FeedConfig
from penstock.services.vector_feed import FedVectors
from penstock.vector import Vector, VectorConfig, VectorStore
from penstock.vector.records import UPSERT_METADATA, encode_upserts

SECTION = "Databases"


class Reading(Protocol):
    async def __call__(self, root: Path, *, open_timeout: str = ...) -> set[int]:
        """Feed until the queue is empty, and return the records in the database."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A database, by its name in the table, and how it is fed and read."""

    name: str
    produce: Callable[[Path, Sequence[int]], Awaitable[None]]
    fed: Reading


async def produce_vectors(root: Path, records: Sequence[int]) -> None:
    async with Producer(ProducerConfig(store=str(root / "queue"), flush_interval="1ms")) as producer:
        for record in records:
            data = encode_upserts([Vector(str(record), [record, 1.0])])
            handle = await producer.produce([data], UPSERT_METADATA)
            await handle.watcher.await_durable()


async def fed_vectors(root: Path, *, open_timeout: str = "60s") -> set[int]:
    config = VectorConfig(store=f"file://{root}/database", dimensions=2, open_timeout=open_timeout)
    store = await VectorStore.open(config)
    try:
        queue = ConsumerConfig(store=str(root / "queue"), gc_enabled=False)
        await Feed(FeedConfig(queue=queue), FedVectors(store)).run(once=True)
        return {int(hit.id) for hit in await store.search([0, 0], k=1000)}
    finally:
        await store.close()


SERIES = Kind("timeseries", series.produce, series.fed)
VECTORS = Kind("vectors", produce_vectors, fed_vectors)
KINDS = (SERIES, VECTORS)


async def make(kind: Kind, root: Path) -> list[dict[str, bytes]]:
    """Eight records in the database and four more in the queue; copies of the files on the way."""
    older = []
    for first in (0, 3, 6):
        await kind.produce(root, range(first, min(first + 3, 8)))
        assert await kind.fed(root) == set(range(min(first + 3, 8)))
        older.append(files_below(root / "database"))
    await kind.produce(root, range(8, 12))
    return older


async def check(
    kind: Kind, root: Path, damage: Damage, caplog: pytest.LogCaptureFixture
) -> tuple[str, str | None]:
    caplog.clear()
    try:
        await kind.produce(root, range(12, 14))
        missing = set(range(14)) - await asyncio.wait_for(kind.fed(root, open_timeout="2s"), 20)
    except PenstockError as error:
        return "refused", None if str(error) else "the error says nothing"
    reported = any(one.levelno >= logging.WARNING for one in caplog.records)
    if missing and not reported:
        return "wrong", f"records {sorted(missing)} are gone without a word"
    return ("lost and reported" if missing else "reported" if reported else "complete"), None


@pytest.mark.parametrize("parts", [FEW, pytest.param(MANY, marks=pytest.mark.long)], ids=["few", "many"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.timeout(600)
async def test_damage_to_any_file_of_a_fed_database_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: Kind, parts: tuple[int, ...]
) -> None:
    root, made = tmp_path / "root", tmp_path / "made"
    older = await make(kind, root)
    shutil.copytree(root, made)
    files = files_below(root / "database")
    tally = Tally(SECTION)
    for file in some_of(SECTION, files, 1 if parts is FEW else len(files)):
        copies = [copy[file] for copy in older if file in copy]
        for damage in damages(file, files[file], copies, parts):
            shutil.rmtree(root)
            shutil.copytree(made, root)
            replace_file(root / "database", damage)
            tally.note(damage, *await check(kind, root, damage, caplog))
    tally.finish(but=[name for name in names_in(SECTION) if not name.startswith(f"{kind.name}/")])


@pytest.mark.parametrize(
    "kind",
    [pytest.param(SERIES, id="timeseries"), pytest.param(VECTORS, marks=pytest.mark.long, id="vectors")],
)
async def test_an_open_ends_when_a_file_has_no_bytes(tmp_path: Path, kind: Kind) -> None:
    await make(kind, tmp_path)
    empty = min((tmp_path / "database" / kind.name / "compacted").iterdir())
    empty.write_bytes(b"")
    with pytest.raises(Unavailable, match="has no bytes"):
        await asyncio.wait_for(kind.fed(tmp_path, open_timeout="2s"), 20)
