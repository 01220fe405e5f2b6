"""Who may use Penstock's files: modes under a permissive umask, and locks that another process holds."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from tests.unit.quiver.engine_doubles import config as quiver_config
from tests.unit.quiver.engine_doubles import rows

import penstock
from penstock.buffer import Consumer, ConsumerConfig, Producer, ProducerConfig, StorageError
from penstock.collector.dead_letters import DeadLetters
from penstock.collector.exporters import FileExporter
from penstock.collector.payload import RawPayload
from penstock.errors import ConfigError
from penstock.quiver import AsyncQuiver
from penstock.quiver.model import Signal
from penstock.servers.process import write_port_file
from penstock.spark.pipeline.checkpoint import Checkpoint
from penstock.storage.fs import DirectoryLock, LockHeld, OsFileSystem
from penstock.timeseries import TimeSeries
from penstock.topics.config import Durability, TopicConfig
from penstock.topics.engine import Engine, EngineConfig
from penstock.topics.model import NewRecord
from penstock.topics.tools.backup import backup
from penstock.vector import Vector, VectorConfig, VectorStore

HOLDER = """
import contextlib, os, sys
from penstock.storage.fs import OsFileSystem
fs = OsFileSystem()
with contextlib.ExitStack() as stack:
    for path in sys.argv[1:]:
        stack.enter_context(fs.lock(path, note=b"%d\\n" % os.getpid()))
    print("held", flush=True)
    sys.stdin.read()
"""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(penstock.__file__).parent.parent)}


@contextmanager
def held(*paths: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds these locks until the end of the block."""
    command = [sys.executable, "-c", HOLDER, *map(str, paths)]
    process = subprocess.Popen(
        command, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def stop(process: subprocess.Popen[str]) -> None:
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


@contextmanager
def umask(bits: int) -> Iterator[None]:
    before = os.umask(bits)
    try:
        yield
    finally:
        os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def open_to_others(root: Path, *, except_below: str = "") -> list[str]:
    """Everything below that group or others can use in any way."""
    wide = []
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if except_below and name.startswith(except_below):
            continue
        if mode(path) & 0o077:
            wide.append(f"{name} {mode(path):04o}")
    return wide


@pytest.mark.parametrize("stopped", [False, True])
async def test_a_producer_that_cannot_get_the_lock_names_the_holder_within_its_deadline(
    tmp_path: Path, stopped: bool
) -> None:
    config = ProducerConfig(store=str(tmp_path), flush_interval="1ms", append_deadline="300ms")
    async with Producer(config) as producer:
        await (await producer.produce([b"first"])).watcher.await_durable()
        locks = sorted((tmp_path / ".penstock" / "locks").iterdir())
        everything = [tmp_path / ".penstock" / "locks" / f"{stripe:02x}" for stripe in range(64)]
        assert set(locks) <= set(everything)
        with held(*everything) as process:
            if stopped:
                stop(process)
            began = time.monotonic()
            handle = await producer.produce([b"second"])
            with pytest.raises(StorageError) as caught:
                await handle.watcher.await_durable()
            assert time.monotonic() - began < 10
            said = str(caught.value)
            assert f"process {process.pid} " in said
            assert "-c" in said, "the command is named too"
            assert ("is stopped" in said) is stopped
            assert said.endswith("or end it" if stopped else "; wait for that process or stop it")
        await (await producer.produce([b"third"])).watcher.await_durable()
    consumer = await Consumer.open(ConsumerConfig(store=str(tmp_path)))
    found = []
    while (batch := await consumer.next_batch()) is not None:
        found += [bytes(entry) for entry in batch.entries]
        await consumer.ack(batch.sequence)
    await consumer.close()
    assert found == [b"first", b"third"]


@pytest.mark.parametrize("stopped", [False, True])
def test_a_data_directory_in_use_names_the_holder_and_whether_it_is_stopped(
    tmp_path: Path, stopped: bool
) -> None:
    path = tmp_path / "LOCK"
    with held(path) as process:
        path.write_text(f"{process.pid}\n")
        if stopped:
            stop(process)
        with pytest.raises(LockHeld) as caught, DirectoryLock(OsFileSystem(), str(tmp_path)):
            pass
    said = str(caught.value)
    assert f"in use by process {process.pid} (" in said
    assert f"`kill -CONT {process.pid}`" in said if stopped else said.endswith("choose another directory")


def test_a_lock_names_no_process_that_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with held(path) as process:
        pass
    fs = OsFileSystem()
    with fs.lock(str(path)), pytest.raises(LockHeld) as caught, fs.lock(str(path), wait=False):
        pass
    assert f"process {process.pid}" not in str(caught.value)


def test_an_old_lock_file_loses_the_read_bits_of_those_who_may_not_write(tmp_path: Path) -> None:
    old, shared = tmp_path / "old", tmp_path / "shared"
    for path, bits in ((old, 0o644), (shared, 0o666)):
        path.touch()
        path.chmod(bits)
        with OsFileSystem().lock(str(path)):
            pass
    assert (mode(old), mode(shared)) == (0o600, 0o666)


async def fill(root: Path) -> None:
    """A little of everything that writes files."""
    async with Producer(ProducerConfig(store=str(root / "queue"))) as producer:
        await (await producer.produce([b"record"])).watcher.await_durable()
    consumer = await Consumer.open(ConsumerConfig(store=str(root / "queue")))
    batch = await consumer.next_batch()
    assert batch is not None
    await consumer.ack(batch.sequence)
    await consumer.close()
    async with await Engine.open(EngineConfig(data_dir=str(root / "topics"))) as engine:
        await engine.put_topic("t", TopicConfig(durability=Durability.FSYNC))
        await engine.write("t", [NewRecord(data=msgspec.Raw(b"1"))])
        await engine.checkpoint()
    backup(OsFileSystem(), str(root / "topics"), str(root / "backup"))
    async with await AsyncQuiver.open(str(root / "quiver"), quiver_config()) as quiver:
        await quiver.register("lake")
        await quiver.activate("lake")
        await quiver.ingest(rows(3), signal="logs")
        await quiver.flush()
    DeadLetters(str(root / "dead")).keep("exporter", RawPayload(b"x", Signal.LOGS), "why", 1)
    exporter = FileExporter(str(root / "files"), "otlp")
    await exporter.start()
    await exporter.send(RawPayload(b"x", Signal.LOGS))
    Checkpoint(str(root / "checkpoint")).prepare()
    write_port_file(str(root / "port"), "127.0.0.1", 1)
    async with await TimeSeries.open(f"file://{root}/slate/series"):
        pass
    config = VectorConfig(store=f"file://{root}/slate/vectors", dimensions=1)
    async with await VectorStore.open(config) as store:
        await store.upsert([Vector(id="a", vector=[1.0])])


async def test_under_any_umask_only_the_owner_can_use_what_is_created(tmp_path: Path) -> None:
    with umask(0):
        await fill(tmp_path)
    # SlateDB makes its own files; the directory above them is ours.
    assert open_to_others(tmp_path, except_below="slate/") == []
    assert mode(tmp_path / "slate") == 0o700
    assert mode(tmp_path / "checkpoint") == 0o700
    kinds = set(os.listdir(tmp_path))
    assert kinds == {
        "queue", "topics", "backup", "quiver", "dead", "files", "checkpoint", "port", "slate",
    }  # fmt: skip


async def test_one_variable_opens_data_to_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_DATA_MODE", "0750")
    with umask(0o077):
        async with Producer(ProducerConfig(store=str(tmp_path / "queue"))) as producer:
            await (await producer.produce([b"record"])).watcher.await_durable()
    assert mode(tmp_path / "queue") == 0o750
    assert mode(tmp_path / "queue" / "ingest" / "manifest") == 0o640
    locks = tmp_path / "queue" / ".penstock" / "locks"
    assert {mode(path) for path in locks.iterdir()} == {0o600}, "a reader must not hold a lock"


def test_a_mode_that_is_none_is_refused_with_what_was_expected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_DATA_MODE", "rwx")
    with pytest.raises(ConfigError, match="octal mode of directories"):
        OsFileSystem().make_dirs(str(tmp_path / "new"))


def test_a_directory_with_a_wider_mode_keeps_it_and_works(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    OsFileSystem().make_dirs(str(tmp_path / "a" / "b"))
    assert mode(tmp_path) == 0o755
    assert mode(tmp_path / "a") == 0o700
