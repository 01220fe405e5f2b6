"""Every durable file of a data directory, truncated, zeroed, replaced by an older copy, or missing.

Whatever is done to one file: an acknowledged record is readable, or its loss is reported; a reader that was
ahead is told of a gap or gets what is written next; and no acknowledged sequence number is assigned twice.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest
from tests.unit.topics.engine_doubles import DATA, FSYNC, World, recs, seqs, values

from penstock.errors import PenstockError
from penstock.testing.disk import FakeDisk, Survival
from penstock.topics import Damaged, Durability, Engine, TopicConfig
from penstock.topics.model import Tombstone
from penstock.topics.verify import verify

pytestmark = [pytest.mark.crash, pytest.mark.timeout(300)]

NAMES = ("a", "b", "d")
STEPS = 6


class Lived:
    """A life of a data directory: what was acknowledged, and copies of its files at several moments."""

    def __init__(self) -> None:
        self.acked: dict[str, dict[int, object]] = {name: {} for name in NAMES}
        self.copies: list[dict[str, bytes]] = []


def contents(disk: FakeDisk) -> dict[str, bytes]:
    return {name: disk.read(os.path.join(DATA, name)) for name, _ in disk.list_files(DATA)}


def disk_of(files: dict[str, bytes]) -> FakeDisk:
    """A disk that has these files, durably."""
    disk = FakeDisk()
    for name, raw in files.items():
        path = os.path.join(DATA, name)
        disk.make_dirs(os.path.dirname(path))
        file = disk.create(path)
        if raw:
            file.write([raw])
        file.datasync()
        file.close()
        disk.sync_dir(os.path.dirname(path))
    return disk


async def live(world: World, *, closed: bool) -> Lived:
    lived = Lived()
    engine = await world.open()
    for name in NAMES[:2]:
        await engine.put_topic(name, FSYNC)
    await engine.put_topic("d", TopicConfig(durability=Durability.DISK))
    for step in range(STEPS):
        for name in NAMES:
            values = [f"{name}{step}.{place}" for place in range(step + 1)]
            done = await engine.write(name, recs(*values))
            lived.acked[name] |= dict(enumerate(values, done.first_seq))
        if step == 3:
            engine = await world.kill()
        lived.copies.append(contents(world.disk))
        if step in (1, 4):
            await engine.checkpoint()
    world.committers.tend()
    if closed:
        await engine.close()
    else:
        world.unplug(Survival.EVERYTHING)
    return lived


def damages(lived: Lived, name: str, raw: bytes) -> Iterator[tuple[str, bytes | None]]:
    """What may become of a file: the kind of damage, and its new bytes."""
    used = len(raw.rstrip(b"\0"))
    for part in (0, 1, 7, 20, 35, 50, 65, 80, 90, 97, 99):
        offset = used * part // 100
        yield "truncated", raw[:offset]
        yield "zeroed", raw[:offset] + bytes(len(raw) - offset)
    yield "truncated", raw[: max(used - 1, 0)]
    yield "missing", None
    for copy in lived.copies:
        if name in copy and copy[name] != raw:
            yield "older copy", copy[name]


async def read(engine: Engine, name: str, from_seq: int) -> tuple[dict[int, object], list[Tombstone], bool]:
    """Records and gaps after `from_seq`, and whether the reader is told that something is unreadable."""
    found: dict[int, object] = {}
    gaps: list[Tombstone] = []
    while True:
        try:
            page = await engine.diff(name, from_seq)
        except Damaged:
            return found, gaps, True
        if page.tombstone is not None:
            gaps.append(page.tombstone)
        found |= dict(zip(seqs(page), values(page), strict=True))
        if page.caught_up:
            return found, gaps, False
        from_seq = page.next_from_seq


async def check(lived: Lived, files: dict[str, bytes], what: str, config: dict[str, object]) -> str:
    """Start on these files and hold what is there against what was acknowledged; returns how it went."""
    world = World(disk=disk_of(files), **config)
    wrong = verify(world.disk, DATA).problems
    try:
        engine = await world.open()
    except PenstockError:
        assert wrong, f"{what}: the start is refused, and verify is clean"
        return "refused"
    problems, is_lost = engine.problems, False
    for name in NAMES:
        acked = lived.acked[name]
        if not engine.exists(name):
            assert problems, f"{what}: topic {name} is gone without a word"
            is_lost = True
            continue
        found, gaps, told = await read(engine, name, 0)
        assert found.items() <= acked.items(), f"{what}: topic {name} has what nobody wrote"
        missing = acked.keys() - found.keys()
        if missing:
            assert problems or told, f"{what}: records {sorted(missing)} of {name} are gone without a word"
            covered = {seq for seq in missing for gap in gaps if gap.gap_from <= seq <= gap.gap_to}
            assert told or covered == missing, f"{what}: no reader hears of {sorted(missing - covered)}"
            is_lost = True
        last = max(acked)
        for turn in range(2):
            done = await engine.write(name, recs(f"new{turn}"))
            assert done.first_seq > last, f"{what}: number {done.first_seq} of {name} is given out again"
            ahead, _, _ = await read(engine, name, last)
            assert ahead == {done.first_seq: f"new{turn}"}, f"{what}: a reader of {name} that was ahead"
            last = done.first_seq
            engine = await world.kill()
    world.unplug()
    assert wrong or not is_lost, f"{what}: records are lost, and verify is clean"
    return "lost and reported" if is_lost else "reported" if problems else "complete"


@pytest.mark.parametrize("closed", [False, True], ids=["killed", "closed"])
@pytest.mark.parametrize(
    "config",
    [{"wal_file_bytes": 1 << 14}, {"wal_file_bytes": 1400, "wal_shards": 2}],
    ids=["one log", "two logs of small files"],
)
async def test_damage_to_any_file_is_reported_and_no_number_is_assigned_twice(
    closed: bool, config: dict[str, object]
) -> None:
    world = World(**config)
    lived = await live(world, closed=closed)
    files = contents(world.disk)
    outcomes: Counter[str] = Counter()
    for name, raw in files.items():
        if name.endswith("lock"):
            continue
        for kind, damaged in damages(lived, name, raw):
            left = {other: files[other] for other in files if other != name}
            if damaged is not None:
                left[name] = damaged
            size = -1 if damaged is None else len(damaged.rstrip(b"\0"))
            outcomes[await check(lived, left, f"{name} {kind}, {size} of {len(raw)} bytes", config)] += 1
    print(f"{sum(outcomes.values())} damages: {dict(outcomes)}")
    assert outcomes["complete"] < sum(outcomes.values())
    assert outcomes["lost and reported"] > 0 or closed
