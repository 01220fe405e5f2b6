"""Segments built by a process of their own: the same files, and no harm when it or its parent dies."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from penstock.storage.fs import OsFileSystem
from penstock.topics import Engine, EngineConfig, NewRecord, TopicConfig
from penstock.topics.segments.growth import LOCK_FILE, ROWS_MIN, await_earlier

ROWS = ROWS_MIN + 500


def config(directory: Path, *, process: bool) -> EngineConfig:
    return EngineConfig(
        data_dir=str(directory), wal_shards=1, wal_file_bytes=1 << 20, segment_process=process
    )


async def write(engine: Engine, first: int, count: int) -> None:
    for at in range(first, first + count, 500):
        records = [
            NewRecord(data=msgspec.Raw(b'{"n":%d}' % number), tag=f"t{number % 7}")
            for number in range(at, min(at + 500, first + count))
        ]
        await engine.write("t", records, config=TopicConfig(durable=True))


async def numbers(engine: Engine) -> list[int]:
    found: list[int] = []
    at, caught_up = 0, False
    while not caught_up:
        page = await engine.diff("t", at, limit=1000)
        found += [msgspec.json.decode(record.data)["n"] for record in page.records()]
        at, caught_up = page.next_from_seq, page.caught_up
    return found


def builder() -> int:
    (child,) = (process for process in multiprocessing.active_children() if "Spawn" in type(process).__name__)
    assert child.pid is not None
    return child.pid


async def test_it_makes_segments_that_hold_every_record_and_goes_with_the_engine(tmp_path: Path) -> None:
    async with await Engine.open(config(tmp_path, process=True)) as engine:
        await write(engine, 0, ROWS)
        await engine.checkpoint()
        await write(engine, ROWS, 2 * ROWS)
        await engine.checkpoint()
        assert is_alive(builder())
        assert await numbers(engine) == list(range(3 * ROWS))
    assert multiprocessing.active_children() == []
    async with await Engine.open(config(tmp_path, process=False)) as engine:
        assert engine.problems == []
        assert await numbers(engine) == list(range(3 * ROWS))


async def test_when_it_is_killed_the_engine_says_so_and_does_the_work_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with await Engine.open(config(tmp_path, process=True)) as engine:
        await write(engine, 0, ROWS)
        await engine.checkpoint()
        os.kill(builder(), signal.SIGKILL)
        await write(engine, ROWS, ROWS)
        await engine.checkpoint()
        assert await numbers(engine) == list(range(2 * ROWS))
    assert "the segment process was killed by signal 9; segments are built" in caplog.text
    async with await Engine.open(config(tmp_path, process=True)) as engine:
        assert engine.problems == []
        assert await numbers(engine) == list(range(2 * ROWS))


_PARENT = """
import sys, time
from tests.process.test_segment_process import *
import asyncio
async def main():
    engine = await Engine.open(config(Path(sys.argv[1]), process=True))
    await write(engine, 0, ROWS)
    await engine.checkpoint()
    print(builder(), flush=True)
    time.sleep(60)
if __name__ == "__main__":
    asyncio.run(main())
"""


def start_and_kill_a_parent(directory: Path) -> int:
    """An engine in another process that is killed after a checkpoint; the number of what it started."""
    script = directory / "parent.py"
    script.write_text(_PARENT)
    parent = subprocess.Popen(
        [sys.executable, str(script), str(directory / "data")],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        text=True,
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    return child


def is_alive(number: int) -> bool:
    return os.path.exists(f"/proc/{number}")


def wait_for_the_end_of(number: int) -> None:
    until_s = time.monotonic() + 30
    while is_alive(number) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert not is_alive(number)


@pytest.mark.timeout(90)
async def test_it_does_not_outlive_a_parent_that_is_killed(tmp_path: Path) -> None:
    child = start_and_kill_a_parent(tmp_path)
    await_earlier(OsFileSystem(), str(tmp_path / "data"))
    wait_for_the_end_of(child)
    assert (tmp_path / "data" / LOCK_FILE).exists()
    async with await Engine.open(config(tmp_path / "data", process=False)) as engine:
        assert engine.problems == []
        assert await numbers(engine) == list(range(ROWS))
