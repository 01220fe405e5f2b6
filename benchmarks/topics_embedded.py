"""The event log's engine without a server: single synced writes in one process, compared with the disk's."""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import uvloop

from penstock.http.listener import settle, tune
from penstock.topics import Engine, EngineConfig, NewRecord, TopicConfig
from topics_floor import DiskFloor
from topics_server import texts

__all__ = ["embedded_engine"]

_TOPIC = "lone"


@contextmanager
def embedded_engine(
    root: Path, byte_count: int, *, pause_s: float
) -> Iterator[Callable[[float], tuple[float, float]]]:
    """Run an engine in its own process, with the settings of a server's process.

    For the requested seconds it alternates between writing a record and writing as many bytes directly to the
    disk, with a pause before each. The wake-up time of an idle processor varies, and alternation makes it
    affect both. It returns both medians in microseconds.
    """
    command = [sys.executable, __file__, str(root), str(byte_count), str(pause_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        asked, told = child.stdin, child.stdout

        def measure(seconds: float) -> tuple[float, float]:
            print(seconds, file=asked, flush=True)
            engine_us, disk_us = map(float, told.readline().split())
            return engine_us, disk_us

        try:
            yield measure
        finally:
            asked.close()
            child.wait(30)


async def _measured(engine: Engine, disk: DiskFloor, seconds: float, pause_s: float) -> tuple[float, float]:
    records = [[NewRecord(msgspec.Raw(text))] for text in texts(64)]
    waits: list[float] = []
    disk_waits: list[float] = []
    end_s = time.perf_counter() + seconds
    while not waits or time.perf_counter() < end_s:
        await asyncio.sleep(pause_s)
        began = time.perf_counter()
        await engine.write(_TOPIC, records[len(waits) % len(records)])
        waits.append(time.perf_counter() - began)
        await asyncio.sleep(pause_s)
        began = time.perf_counter()
        disk.write()
        disk_waits.append(time.perf_counter() - began)
    return statistics.median(waits) * 1e6, statistics.median(disk_waits) * 1e6


async def _answer(root: Path, byte_count: int, pause_s: float) -> None:
    with DiskFloor(root / "floor", byte_count) as disk:
        async with await Engine.open(EngineConfig(data_dir=str(root / "data"))) as engine:
            await engine.put_topic(_TOPIC, TopicConfig(durable=True))
            settle()
            for line in sys.stdin:
                print(*await _measured(engine, disk, float(line), pause_s), flush=True)


if __name__ == "__main__":
    tune()
    Path(sys.argv[1]).mkdir()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_answer(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
