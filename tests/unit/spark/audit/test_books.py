"""The durable state of a pipeline, with tables and a ledger that the real code wrote."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest
import yaml
from tests.console_books import QUERY, deliver, pipeline_settings

from penstock.buffer import Producer, ProducerConfig
from penstock.cli.pipeline_file import read_pipeline
from penstock.errors import Corrupt, NotFound
from penstock.objects import StoreConfig, open_store
from penstock.spark.audit.books import PipelineBooks
from penstock.spark.pipeline.ledger import BatchLine, Ledger, encode_lines
from penstock.spark.tables.delta_commits import DeltaCommit, commit_in, search


def line(batch: int, width: int = 2) -> BatchLine:
    return BatchLine(
        batch=batch,
        start={0: batch * width, 1: batch},
        end={0: (batch + 1) * width, 1: batch + 1},
        read=width,
        rows={"lake": width},
        at_ms=batch,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A queue of six batches, of which four are delivered as two micro-batches."""
    root = tmp_path_factory.mktemp("books")
    (root / "pipeline.yaml").write_text(yaml.safe_dump(pipeline_settings(str(root / "queue"))))

    async def fill() -> None:
        async with Producer(ProducerConfig(store=str(root / "queue"))) as producer:
            for number in range(6):
                bad = b"<not json>" if number % 2 else b'{"n":"x"}'
                await producer.produce([json.dumps({"n": number}).encode(), bad], b"")
                await producer.flush()

    asyncio.run(fill())
    deliver(read_pipeline(root / "pipeline.yaml"), leave=2)
    return root


@pytest.fixture
def books(folder: Path) -> PipelineBooks:
    return PipelineBooks(folder / "pipeline.yaml")


def test_progress_lists_the_last_micro_batches_checkpoint_and_sinks(books: PipelineBooks) -> None:
    reading = books.read(1)
    assert (reading.query, reading.planned, reading.done) == (QUERY, 1, 1)
    (last,) = reading.batches
    assert (last.batch, last.end, last.read, last.dead) == (1, {0: 4}, 4, 2)
    assert [(sink.name, sink.last, sink.error) for sink in reading.sinks] == [
        ("lake", 1, None),
        ("dead letters", 1, None),
    ]


def test_a_pipeline_that_never_ran_has_no_progress(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(pipeline_settings(str(tmp_path / "queue"))))
    fresh = PipelineBooks(tmp_path / "p.yaml")
    reading = fresh.read(10)
    assert (reading.query, reading.batches, reading.planned) == (None, [], None)
    assert fresh.find(0, 0) is None
    assert fresh.commits(0) == []


def test_a_sequence_is_found_in_its_micro_batch_and_table_version(books: PipelineBooks) -> None:
    found = books.find(0, 3)
    assert found is not None
    assert found.batch == 1
    assert books.find(0, 4) is None
    assert books.micro_batch(0) is not None
    assert books.micro_batch(7) is None
    (commit,) = books.commits(1)
    assert (commit.has_it, commit.version, commit.rows) == (True, 2, 2)
    (behind,) = books.commits(5)
    assert behind.has_it is False


def test_dead_letters_come_in_pages(books: PipelineBooks) -> None:
    page = books.letters(None, 3)
    assert page is not None
    assert [(one.sequence, one.index) for one in page.letters] == [(0, 1), (1, 1), (2, 1)]
    assert (page.total, page.left, page.following) == (4, 4, (0, 2, 1))
    rest = books.letters(page.following, 3)
    assert rest is not None
    assert ([one.sequence for one in rest.letters], rest.following) == ([3], None)
    letter = books.letter(0, 1, 1)
    assert letter is not None
    assert letter.value == b"<not json>"
    assert books.letter(0, 1, 0) is None


def test_the_audit_balances(books: PipelineBooks) -> None:
    report = books.audit()
    (account,) = report.balance.sinks
    assert (account.produced, account.delivered, account.dead, account.in_flight) == (12, 4, 4, 4)
    assert report.balanced


def test_ten_thousand_micro_batches_are_searched_in_a_few_reads(tmp_path: Path) -> None:
    async def write() -> None:
        store = open_store(StoreConfig(url=str(tmp_path)))
        for start in range(0, 10_000, 1000):
            raw = encode_lines([line(batch) for batch in range(start, start + 1000)])
            await store.put(f"q/{start:012}.jsonl", raw)
        await store.close()

    asyncio.run(write())
    ledger = Ledger(StoreConfig(url=str(tmp_path)))
    began = time.monotonic()
    for sequence in (0, 1, 9_999, 10_000, 19_999):
        found = ledger.find("q", 0, sequence)
        assert found is not None
        assert found.batch == sequence // 2
    assert ledger.find("q", 0, 20_000) is None
    assert ledger.find("q", 1, 4321) == line(4321)
    assert [one.batch for one in ledger.last("q", 1500)] == list(range(8500, 10_000))
    assert ledger.line("q", 7777) == line(7777)
    assert ledger.line("q", 10_000) is None
    assert time.monotonic() - began < 5.0
    ledger.close()


async def test_a_table_version_is_found_by_binary_search() -> None:
    """Every third entry is from another writer, and the log begins at 40."""
    asked: list[int] = []

    async def entry(version: int) -> DeltaCommit | None:
        asked.append(version)
        if version < 40:
            raise NotFound("cleaned up")
        if version % 3 == 0:
            return None
        return DeltaCommit(version=version, micro_batch=version * 2, rows=1, at_ms=None)

    for version in range(40, 3000):
        found = await search(version * 2, 3000, entry)
        assert (found is None) is (version % 3 == 0)
        assert found is None or found.version == version
    assert len(asked) / 2960 < 40
    assert await search(20, 3000, entry) is None
    assert await search(81, 3000, entry) is None
    assert await search(9999, 3000, entry) is None
    assert await search(1, -1, entry) is None


def test_a_damaged_dead_letter_file_is_reported_as_corrupt(folder: Path) -> None:
    file = next((folder / "lake_dead_letters").glob("*.parquet"))
    whole = file.read_bytes()
    file.write_bytes(b"no parquet")
    try:
        fresh = PipelineBooks(folder / "pipeline.yaml")
        with pytest.raises(Corrupt, match="cannot be read"):
            fresh.letters(None, 10)
        with pytest.raises(Corrupt, match="cannot be read"):
            fresh.letter(0, 0, 1)
    finally:
        file.write_bytes(whole)


def test_an_entry_of_a_table_s_log_is_read_by_its_commit_info() -> None:
    other = b'{"add":{"path":"x","stats":"\\"commitInfo\\""}}\n'
    info = b'{"commitInfo":{"penstock.app":"a","penstock.version":"3","penstock.rows":"7","timestamp":5}}\n'
    found = commit_in(other + info, "a", 9)
    assert found == DeltaCommit(version=9, micro_batch=3, rows=7, at_ms=5)
    assert commit_in(info, "b", 9) is None
    assert commit_in(other, "a", 9) is None
    for damaged in (b'"commitInfo" nope', b'{"commitInfo":{"penstock.app":"a"}}', b'["commitInfo"]'):
        with pytest.raises((ValueError, KeyError, AttributeError)):
            commit_in(damaged, "a", 9)
