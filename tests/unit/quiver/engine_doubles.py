"""A small Quiver on an in-memory disk, with every step controlled by the test."""

from __future__ import annotations

import asyncio
import random

import pyarrow as pa

from penstock.metrics import Registry
from penstock.quiver.config import QuiverConfig
from penstock.quiver.engine import Quiver
from penstock.storage.fs import FileSystem


class StepClock:
    """A clock for code without an event loop: time passes when `step` is called."""

    def __init__(self, start_ms: int = 1_700_000_000_000) -> None:
        self._start_ms = start_ms
        self._passed_s = 0.0

    def now_ms(self) -> int:
        return self._start_ms + round(self._passed_s * 1000)

    def monotonic(self) -> float:
        return self._passed_s

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)

    def step(self, seconds: float) -> None:
        self._passed_s += seconds

    def jump_wall(self, milliseconds: int) -> None:
        self._start_ms += milliseconds


PATH = "/data/quiver"
CORE = f"{PATH}/core_0"

SMALL: dict[str, object] = {
    "segment": {"target_size": 3000, "max_open_duration": "5s"},
    "wal": {"max_size": 60_000, "rotation_target": 4096, "max_rotated_files": 10},
    "retention": {"size_cap": "1MB", "min_free": 0},
}


def config(**sections: dict[str, object] | str) -> QuiverConfig:
    """Return `SMALL` with some values replaced."""
    merged: dict[str, object] = {**SMALL}
    for name, values in sections.items():
        below = merged.get(name)
        merged[name] = {**below, **values} if isinstance(below, dict) and isinstance(values, dict) else values
    return QuiverConfig.from_mapping(merged)


def open_quiver(
    fs: FileSystem, clock: StepClock, settings: QuiverConfig | None = None, registry: Registry | None = None
) -> Quiver:
    return Quiver.open(
        PATH,
        settings or config(),
        fs=fs,
        clock=clock,
        rng=random.Random(1),
        registry=registry or Registry(),
        maintenance=False,
        threads=False,
    )


def ready(disk: FileSystem, clock: StepClock, *names: str, settings: QuiverConfig | None = None) -> Quiver:
    """Open a Quiver with active subscribers: `lake`, or the given names."""
    quiver = open_quiver(disk, clock, settings)
    for name in names or ("lake",):
        quiver.register(name)
        quiver.activate(name)
    return quiver


def rows(first: int, count: int = 3) -> pa.RecordBatch:
    """Return a batch whose column `n` identifies each row. A row has about a hundred bytes of text."""
    values = list(range(first, first + count))
    return pa.record_batch(
        {"n": pa.array(values, pa.int64()), "s": pa.array([f"row {n} " * 4 for n in values], pa.string())}
    )


def words(first: int, count: int = 3) -> pa.RecordBatch:
    """Return the same batch with a dictionary column."""
    values = list(range(first, first + count))
    texts = pa.array([f"word {n % 2}" for n in values]).dictionary_encode()
    return pa.record_batch({"n": pa.array(values, pa.int64()), "w": texts})


def take_all(quiver: Quiver, subscriber: str) -> list[tuple[int, list[int]]]:
    """Take every bundle that is available to a subscriber, each with its slot, without resolving any."""
    quiver.activate(subscriber)
    taken: list[tuple[int, list[int]]] = []
    held = []
    while (bundle := quiver.next_bundle(subscriber)) is not None:
        held.append(bundle)
        taken.append((bundle.slot, bundle.batch.column("n").to_pylist()))
    for bundle in held:
        bundle.defer(0)
    return taken
