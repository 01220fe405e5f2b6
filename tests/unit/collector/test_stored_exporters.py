"""Files named by place, queues that get each bundle once, and exporters for testing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.collector_doubles import Bundle, MemoryStore

from penstock import otlp
from penstock.buffer import Consumer, ConsumerConfig
from penstock.collector.buffer_export import BufferExportWorker, QueueExporter, record_of
from penstock.collector.dead_letters import DeadLetters
from penstock.collector.export_worker import OwnSource
from penstock.collector.exporters import make_exporter
from penstock.collector.outcome import Verdict
from penstock.collector.payload import ArrowPayload, Place, RawPayload
from penstock.collector.pipeline import directory_identity
from penstock.collector.settings import (
    BufferSettings,
    DebugSettings,
    FileSettings,
    FlakySettings,
    NoopSettings,
    ParquetSettings,
)
from penstock.errors import Corrupt, LimitExceeded, NotFound, Unavailable
from penstock.metrics import Registry
from penstock.otlp.schema import Signal
from penstock.storage.fs import OsFileSystem
from penstock.testing import ManualClock
from penstock.testing.otlp_kit import telemetry

DATA = telemetry(Signal.TRACES, items=12)
BATCH = otlp.decode(DATA, Signal.TRACES).batch
PLACE = Place("01ARZ-core0", 3, 7)


def names(path: Path) -> list[str]:
    return sorted(str(found.relative_to(path)) for found in path.rglob("*") if found.is_file())


@pytest.mark.parametrize(
    "payload", [RawPayload(DATA, Signal.TRACES, PLACE), ArrowPayload(BATCH, Signal.TRACES, PLACE)]
)
async def test_a_repeated_bundle_replaces_its_file(tmp_path: Path, payload: RawPayload) -> None:
    exporter = make_exporter("out", ParquetSettings(path=str(tmp_path)))
    await exporter.start()
    for _ in range(3):
        assert (await exporter.send(payload)).verdict is Verdict.ACK
    assert names(tmp_path) == ["traces/01ARZ-core0-seg0000000000000003-00000007.parquet"]
    assert pq.read_table(tmp_path / names(tmp_path)[0]).num_rows == 12


async def test_parquet_for_spark_has_hex_ids_and_microseconds(tmp_path: Path) -> None:
    exporter = make_exporter("out", ParquetSettings(path=str(tmp_path), spark=True))
    await exporter.start()
    await exporter.send(ArrowPayload(BATCH, Signal.TRACES, PLACE))
    table = pq.read_table(tmp_path / names(tmp_path)[0])
    assert table.schema.field("trace_id").type == pa.string()
    assert table.schema.field("start_time").type == pa.timestamp("us", tz="UTC")


@pytest.mark.parametrize("file_format", ["otlp", "json", "arrow"])
async def test_files_in_other_formats_have_the_same_contents(tmp_path: Path, file_format: str) -> None:
    exporter = make_exporter("out", FileSettings(path=str(tmp_path), format=file_format))  # type: ignore[arg-type]
    await exporter.start()
    await exporter.send(RawPayload(DATA, Signal.TRACES, PLACE))
    data = (tmp_path / names(tmp_path)[0]).read_bytes()
    if file_format == "otlp":
        assert data == DATA
    elif file_format == "json":
        assert len(json.loads(data)["resourceSpans"]) == 10
    else:
        assert pa.ipc.open_file(data).read_all().num_rows == 12


async def test_incomplete_files_of_a_crash_are_removed_at_the_start(tmp_path: Path) -> None:
    (tmp_path / ".staging").mkdir()
    (tmp_path / ".staging" / "half").write_bytes(b"half")
    await make_exporter("out", FileSettings(path=str(tmp_path))).start()
    assert names(tmp_path) == []


async def test_directories_that_were_removed_are_created_again(tmp_path: Path) -> None:
    exporter = make_exporter("out", FileSettings(path=str(tmp_path / "files")))
    letters = DeadLetters(str(tmp_path / "dead"))
    await exporter.start()
    payload = RawPayload(DATA, Signal.TRACES, PLACE)
    for _ in range(2):
        while (await exporter.send(payload)).verdict is Verdict.RETRY:
            pass
        with contextlib.suppress(NotFound):
            letters.keep("out", payload, "no", 1)
        letters.keep("out", payload, "no", 1)
        assert len(names(tmp_path)) == 3
        shutil.rmtree(tmp_path / "files")
        shutil.rmtree(tmp_path / "dead")


async def test_a_failed_write_is_retried(tmp_path: Path) -> None:
    exporter = make_exporter("out", FileSettings(path=str(tmp_path)))
    await exporter.start()
    (tmp_path / "traces").write_text("a file where a directory should be")
    outcome = await exporter.send(RawPayload(DATA, Signal.TRACES, PLACE))
    assert (outcome.verdict, outcome.is_down) == (Verdict.RETRY, True)


async def test_a_bundle_that_cannot_be_converted_to_columns_is_refused(tmp_path: Path) -> None:
    exporter = make_exporter("out", ParquetSettings(path=str(tmp_path)))
    await exporter.start()
    assert (await exporter.send(RawPayload(b"\x0a\x01\xff", Signal.TRACES, PLACE))).verdict is Verdict.REJECT


async def test_exporters_for_testing() -> None:
    payload = RawPayload(DATA, Signal.TRACES, PLACE)
    assert (await make_exporter("n", NoopSettings()).send(payload)).verdict is Verdict.ACK
    assert (
        await make_exporter("d", DebugSettings(verbosity="detailed")).send(payload)
    ).verdict is Verdict.ACK
    flaky = make_exporter("f", FlakySettings(failure_rate=0.5, reject_rate=0.2, retry_after="3s"))
    seen = {(await flaky.send(payload)).verdict for _ in range(40)}
    assert seen == set(Verdict)


# --- queues -----------------------------------------------------------------------------------------------


def settings(tmp_path: Path, **changes: object) -> BufferSettings:
    return BufferSettings(store=f"file://{tmp_path}/queue", **changes)  # type: ignore[arg-type]


def worker(
    store: MemoryStore, config: BufferSettings, tmp_path: Path, app: str = "app"
) -> BufferExportWorker:
    return BufferExportWorker(
        "out",
        OwnSource(store, "out"),
        config,
        app=app,
        dead_letters=DeadLetters(str(tmp_path / "dead")),
        origin="01ARZ-core0",
        clock=ManualClock(),
        rng=random.Random(),
        registry=Registry(),
    )


async def records(config: BufferSettings, signal: str) -> list[bytes]:
    consumer = await Consumer.open(
        ConsumerConfig(
            store=config.store,
            manifest_path=config.manifest_path.replace("{signal}", signal),
            data_path_prefix=config.data_path_prefix.replace("{signal}", signal),
        ),
        last_acked=None,
    )
    found: list[bytes] = []
    while (batch := await consumer.next_batch()) is not None:
        found += [bytes(entry) for entry in batch.entries]
        await consumer.ack(batch.sequence)
    await consumer.close()
    return found


async def filled(count: int) -> MemoryStore:
    store = MemoryStore()
    for number in range(count):
        await store.ingest_raw(telemetry(Signal.TRACES, items=1, seed=number), "traces")
        await store.ingest_raw(telemetry(Signal.LOGS, items=1, seed=number), "logs")
    return store


async def run_dry(carrier: BufferExportWorker) -> None:
    carrier.stop()
    await carrier.run()


async def test_each_bundle_is_a_record_in_the_queue_of_its_signal(tmp_path: Path) -> None:
    store, config = await filled(6), settings(tmp_path, format="otlp")
    await run_dry(worker(store, config, tmp_path))
    assert store.outcomes("ack") == 12
    assert await records(config, "traces") == [telemetry(Signal.TRACES, items=1, seed=n) for n in range(6)]
    assert len(await records(config, "logs")) == 6


async def test_bundles_whose_acks_were_lost_are_not_appended_again(tmp_path: Path) -> None:
    store, config = await filled(3), settings(tmp_path, format="otlp")
    await run_dry(worker(store, config, tmp_path))
    await store.ingest_raw(telemetry(Signal.TRACES, items=1, seed=99), "traces")
    store.pending.clear()
    store.pending.extend(store.stored)
    await run_dry(worker(store, config, tmp_path))
    assert len(await records(config, "traces")) == 4


async def test_another_directory_starts_over(tmp_path: Path) -> None:
    config = settings(tmp_path, format="otlp")
    await run_dry(worker(await filled(2), config, tmp_path, "first"))
    await run_dry(worker(await filled(2), config, tmp_path, "second"))
    assert len(await records(config, "traces")) == 4


async def test_nothing_is_appended_while_an_older_bundle_is_unacked_and_unleased(tmp_path: Path) -> None:
    """Otherwise the position would pass it, and it would count as appended when it arrives."""

    class Straying(MemoryStore):
        late: Bundle | None = None
        calls = 0

        def subscribers(self) -> list[Any]:
            self.calls += 1
            if self.late is not None and self.calls > 2:
                self.pending.append(self.late)
                self.late = None
            deferred = int(self.late is not None or bool(self.pending))
            return [SimpleNamespace(name="out", deferred=deferred)]

    store, config = Straying(), settings(tmp_path, format="otlp")
    for number in range(3):
        await store.ingest_raw(telemetry(Signal.TRACES, items=1, seed=number), "traces")
    store.late = store.pending.popleft()
    await run_dry(worker(store, config, tmp_path))
    assert await records(config, "traces") == [telemetry(Signal.TRACES, items=1, seed=n) for n in range(3)]


async def test_an_unavailable_store_is_retried_and_gets_each_bundle_once(tmp_path: Path) -> None:
    store, config = await filled(3), settings(tmp_path, format="otlp")
    carrier = worker(store, config, tmp_path)
    tries = 0
    append = carrier._append

    async def away(*arguments: object) -> None:
        nonlocal tries
        tries += 1
        if tries == 2:
            raise Unavailable("away")
        await append(*arguments)  # type: ignore[arg-type]
        if tries == 4:
            raise Unavailable("the answer was lost")

    carrier._append = away  # type: ignore[method-assign, assignment]
    running = asyncio.create_task(carrier.run())
    clock = carrier._clock
    assert isinstance(clock, ManualClock)
    while store.outcomes("ack") < 6:
        await clock.advance(1)
        await asyncio.sleep(0.01)
    await run_dry(carrier)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert len(await records(config, "traces")) == 3
    assert len(await records(config, "logs")) == 3


async def test_a_bundle_that_cannot_be_encoded_is_a_dead_letter_and_others_follow(
    tmp_path: Path,
) -> None:
    store, config = MemoryStore(), settings(tmp_path)
    await store.ingest_raw(b"\x0a\x01\xff", "traces")
    await store.ingest_raw(DATA, "traces")
    await run_dry(worker(store, config, tmp_path))
    assert (store.outcomes("reject"), store.outcomes("ack")) == (1, 1)
    [record] = await records(config, "traces")
    assert pa.ipc.open_stream(record).read_all().num_rows == 12
    assert len(list(DeadLetters(str(tmp_path / "dead")).letters())) == 1


async def test_a_request_beyond_the_item_limit_does_not_stop_a_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def capped(payload: RawPayload, record_format: str) -> bytes:
        if len(payload.otlp()) == 4:
            raise LimitExceeded("more than a million items")
        return record_of(payload, record_format)

    store, config = MemoryStore(), settings(tmp_path)
    monkeypatch.setattr("penstock.collector.buffer_export.record_of", capped)
    await store.ingest_raw(b"\x0a\x0201", "traces")
    await store.ingest_raw(DATA, "traces")
    await run_dry(worker(store, config, tmp_path))
    assert (store.outcomes("reject"), store.outcomes("ack")) == (1, 1)
    exporter = QueueExporter(config)
    assert (await exporter.send(RawPayload(b"\x0a\x0201", Signal.TRACES))).verdict is Verdict.REJECT


async def test_the_plain_queue_exporter_appends_and_waits(tmp_path: Path) -> None:
    config = settings(tmp_path)
    exporter = QueueExporter(config)
    await exporter.start()
    assert (await exporter.send(RawPayload(DATA, Signal.TRACES))).verdict is Verdict.ACK
    assert (await exporter.send(RawPayload(b"\x0a\x01\xff", Signal.TRACES))).verdict is Verdict.REJECT
    await exporter.close()
    assert len(await records(config, "traces")) == 1


def test_a_directory_keeps_its_identity_and_a_new_one_gets_another(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    fs = OsFileSystem()
    first = directory_identity(fs, str(tmp_path / "a"))
    assert directory_identity(fs, str(tmp_path / "a")) == first
    assert directory_identity(fs, str(tmp_path / "b")) != first
    (tmp_path / "a" / "collector.id").write_text("what?")
    with pytest.raises(Corrupt):
        directory_identity(fs, str(tmp_path / "a"))


def test_a_missing_identity_of_a_directory_with_segments_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = directory_identity(OsFileSystem(), str(tmp_path))
    assert not caplog.records
    (tmp_path / "collector.id").unlink()
    segments = tmp_path / "core_0" / "segments"
    segments.mkdir(parents=True)
    (segments / "seg-0000000000.arrow").write_bytes(b"data")
    assert directory_identity(OsFileSystem(), str(tmp_path)) != first
    [report] = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert report.startswith(f"{tmp_path / 'collector.id'} is missing")
