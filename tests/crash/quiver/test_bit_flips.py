"""One flipped bit in any file: losses are reported, nothing is invented, and the rest is delivered."""

from __future__ import annotations

import contextlib
import random

import pytest
from tests.unit.quiver.engine_doubles import CORE, StepClock, config, open_quiver, rows, take_all

from penstock.errors import Corrupt, PenstockError, Unsupported
from penstock.metrics import Registry
from penstock.testing.disk import FakeDisk, Survival

pytestmark = pytest.mark.crash

COUNT = 14


def prepared() -> FakeDisk:
    """Return a directory with committed segments, a log of several files, progress and a checkpoint."""
    clock = StepClock()
    disk = FakeDisk(clock=clock)
    quiver = open_quiver(disk, clock, config(wal={"rotation_target": 4096}))
    quiver.register("lake")
    quiver.activate("lake")
    quiver.ingest(rows(0), slot=52)
    for n in range(1, COUNT):
        quiver.ingest(rows(n * 100, 8), slot=50 + n % 2)
        clock.step(0.1)
        quiver.maintain()
    bundle = quiver.next_bundle("lake")
    assert bundle is not None
    bundle.nack("not now")
    quiver.core.offsets.checkpoint()
    quiver.core.appender.rotate()
    quiver.core.wal.log.mark()  # type: ignore[union-attr]
    return disk.crash(Survival.NOTHING)


def flip(disk: FakeDisk, path: str, bit: int) -> None:
    data = bytearray(disk.read(path))
    data[bit // 8] ^= 1 << bit % 8
    disk.unlink(path)
    file = disk.create(path)
    file.write([bytes(data)])
    file.datasync()
    disk.sync_dir(path.rpartition("/")[0])


def kinds(disk: FakeDisk) -> dict[str, str]:
    """Return one file of each kind."""
    names = [name for name, _ in disk.list_files(CORE)]
    chosen = {
        "rotated log": next(name for name in names if "wal/quiver.wal." in name and name[-1].isdigit()),
        "active log": "wal/quiver.wal",
        "cursor": "wal/quiver.wal.cursor",
        "segment": next(name for name in names if name.endswith(".arrow")),
        "sidecar": next(name for name in names if name.endswith(".meta.json")),
        "checkpoint": "meta/checkpoint",
        "ack log": "ack/ack.log",
    }
    assert set(chosen.values()) <= set(names), names
    return chosen


@pytest.mark.parametrize(
    "kind", ["rotated log", "active log", "cursor", "segment", "sidecar", "checkpoint", "ack log"]
)
def test_a_flipped_bit_invents_nothing_and_its_loss_is_reported(kind: str) -> None:
    rng = random.Random(kind)
    disk = prepared()
    path = f"{CORE}/{kinds(disk)[kind]}"
    size = len(disk.read(path).rstrip(b"\0")) or 1
    for _ in range(40):
        bit = rng.randrange(size * 8)
        # A copy is what a crash leaves, and the next copy can be created from it.
        disk, work = copies(disk)
        flip(work, path, bit)
        _check(work, f"{kind}, bit {bit}")


def copies(disk: FakeDisk) -> tuple[FakeDisk, FakeDisk]:
    return disk.crash(Survival.EVERYTHING), disk.crash(Survival.EVERYTHING)


def _check(disk: FakeDisk, why: str) -> None:
    registry = Registry()
    try:
        quiver = open_quiver(disk, StepClock(), registry=registry)
    except (Corrupt, Unsupported):
        return
    with contextlib.suppress(PenstockError):
        quiver.register("lake")
    quiver.flush()
    given = take_all(quiver, "lake")
    firsts = [values[0] for _, values in given]
    assert len(firsts) == len(set(firsts)), why
    for _, values in given:
        assert values == list(range(values[0], values[0] + (8 if values[0] else 3))), why
        assert values[0] in range(0, COUNT * 100, 100), why
    if len(firsts) < COUNT:
        reported = [*quiver.stats().damage]
        lost = registry.value("quiver.segment.corrupt_total")
        assert reported or lost, f"{why}: {COUNT - len(firsts)} bundles are lost without a report"
