"""Every durable file of a data directory and its cold place, damaged in every way.

Whatever is done to one file: an acknowledged record is readable, or its loss is reported; a reader that was
ahead is told of a gap or gets what is written next; no acknowledged sequence number is assigned twice; and
no deleted record comes back unreported.
"""

from __future__ import annotations

import os

import pytest
from tests.crash.damage import FEW, MANY, Tally, damages, some_of
from tests.unit.topics.engine_doubles import COLD, DATA, FSYNC, World, recs, seqs, values

from penstock.errors import PenstockError
from penstock.testing.disk import FakeDisk, Survival
from penstock.topics import Damaged, Durability, Engine, TopicConfig
from penstock.topics.model import Predicate, Tombstone
from penstock.topics.segments.store import LocalSegmentRoot
from penstock.topics.tools.verify import verify

pytestmark = [pytest.mark.crash, pytest.mark.timeout(900)]

NAMES = ("a", "b", "d")
STEPS = 6
BACKUP = {"<backup>/backup.json", "<backup>/…"}
SHARDED = {f"wal/shard-<nn>/{name}" for name in ("CURRENT", "EXTENT", "wal-<number>.log")}
PLAIN = {name.replace("shard-<nn>/", "") for name in SHARDED}
COLD_PLACE = {
    "meta/owner.json",
    "<cold>/topics/owner.json",
    *(f"<cold>/topics/<id>/seg-<first>.{part}" for part in ("data", "idx", "tags", "del")),
}
ABSENT = {
    "one log": BACKUP | SHARDED | COLD_PLACE | {"topics/<id>/seg-<first>.tags"},
    "two logs of small files": BACKUP | PLAIN | COLD_PLACE,
    "cold place": BACKUP | SHARDED | {"topics/<id>/seg-<first>.tags"},
    "no snapshot yet": BACKUP
    | SHARDED
    | COLD_PLACE
    | {
        "meta/snapshot-<number>.bin",
        *(f"topics/<id>/seg-<first>.{part}" for part in ("data", "idx", "tags", "del")),
    },
}
"""Rows for files that a configuration does not have."""


class Lived:
    """A life of a data directory: what was acknowledged, and copies of its files at several moments."""

    def __init__(self) -> None:
        self.acked: dict[str, dict[int, object]] = {name: {} for name in NAMES}
        self.deleted: dict[str, dict[int, object]] = {name: {} for name in NAMES}
        self.copies: list[dict[str, bytes]] = []


def contents(disk: FakeDisk) -> dict[str, bytes]:
    """Every file of both places, that of the cold one below `<cold>`."""
    places = {DATA: "", COLD: "<cold>/"}
    return {
        f"{prefix}{name}": disk.read(os.path.join(place, name))
        for place, prefix in places.items()
        for name, _ in disk.list_files(place)
    }


def disk_of(files: dict[str, bytes]) -> FakeDisk:
    """A disk that has these files, durably."""
    disk = FakeDisk()
    for name, raw in files.items():
        cold = name.removeprefix("<cold>/")
        path = os.path.join(DATA, name) if cold == name else os.path.join(COLD, cold)
        disk.make_dirs(os.path.dirname(path))
        file = disk.create(path)
        if raw:
            file.write([raw])
        file.datasync()
        file.close()
        disk.sync_dir(os.path.dirname(path))
    return disk


async def live(world: World, *, closed: bool, snapshots: bool = True) -> Lived:
    lived = Lived()
    engine = await world.open()
    for name in NAMES[:2]:
        await engine.put_topic(name, FSYNC)
    await engine.put_topic("d", TopicConfig(durability=Durability.DISK))
    for step in range(STEPS):
        for name in NAMES:
            values = [f"{name}{step}.{place}" for place in range(step + 1)]
            done = await engine.write(name, recs(*values[:-1]) + recs(values[-1], tag="last"))
            lived.acked[name] |= dict(enumerate(values, done.first_seq))
        if step in (2, 4):
            await engine.delete("b", match=Predicate(value="last"))
            tagged = {f"b{at}.{at}" for at in range(step + 1)}
            acked = lived.acked["b"]
            lived.deleted["b"] |= {seq: text for seq, text in acked.items() if text in tagged}
            lived.acked["b"] = {seq: text for seq, text in acked.items() if text not in tagged}
        if step == 3:
            engine = await world.kill()
        lived.copies.append(contents(world.disk))
        if step in (1, 4) and snapshots:
            await engine.checkpoint()
    world.committers.tend()
    if closed:
        await engine.close()
    else:
        world.unplug(Survival.EVERYTHING)
    return lived


async def read(engine: Engine, name: str, from_seq: int) -> tuple[dict[int, object], list[Tombstone], bool]:
    """Records and gaps after `from_seq`, and whether the reader learns that something is unreadable."""
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
    cold = LocalSegmentRoot(world.disk, COLD) if "cold_dir" in config else None
    wrong = verify(world.disk, DATA, cold=cold).problems
    try:
        engine = await world.open()
    except PenstockError as error:
        # Whose a cold place is is no matter of records, so verify leaves that to the start.
        if not wrong and "cold" not in str(error) and "owner.json" not in str(error):
            pytest.fail(f"{what}: {error}, and verify is clean")
        return "refused"
    problems, is_lost = engine.problems, False
    for name in NAMES:
        acked = lived.acked[name]
        if not engine.exists(name):
            assert problems, f"{what}: topic {name} is gone without a word"
            is_lost = True
            await engine.put_topic(name, FSYNC)
        found, gaps, told = await read(engine, name, 0)
        back = found.items() & lived.deleted[name].items()
        assert not back or problems, f"{what}: deleted records {sorted(back)} of {name} are back"
        assert found.items() - back <= acked.items(), f"{what}: topic {name} has what nobody wrote"
        missing = acked.keys() - found.keys()
        if missing:
            assert problems or told, f"{what}: records {sorted(missing)} of {name} are gone without a word"
            covered = {seq for seq in missing for gap in gaps if gap.gap_from <= seq <= gap.gap_to}
            assert told or covered == missing, f"{what}: no reader hears of {sorted(missing - covered)}"
            is_lost = True
        last = max(acked | lived.deleted[name])
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


CONFIGS: dict[str, dict[str, object]] = {
    "one log": {"wal_file_bytes": 1 << 14},
    "two logs of small files": {"wal_file_bytes": 1400, "wal_shards": 2, "segment_max_events": 4},
    "cold place": {"segment_max_events": 4, "hot_retain_segments": 0, "cold_dir": COLD},
    "no snapshot yet": {"wal_file_bytes": 1400},
}
YOUNG = "no snapshot yet"
FIRST = {("one log", False), ("two logs of small files", True), ("cold place", False), (YOUNG, False)}
CASES = [
    *(pytest.param(kind, closed, FEW, id=f"{kind}, few") for kind, closed in sorted(FIRST)),
    *(
        pytest.param(
            kind, closed, MANY, id=f"{kind}, {'closed' if closed else 'killed'}", marks=pytest.mark.long
        )
        for kind in CONFIGS
        for closed in (False, True)
        if not (closed and kind == YOUNG)
    ),
]


@pytest.mark.parametrize(("kind", "closed", "parts"), CASES)
async def test_damage_to_any_file_is_reported_and_no_number_is_assigned_twice(
    kind: str, closed: bool, parts: tuple[int, ...]
) -> None:
    config = CONFIGS[kind]
    world = World(**config)
    lived = await live(world, closed=closed, snapshots=kind != YOUNG)
    files = contents(world.disk)
    tally = Tally("Topics")
    for name in some_of("Topics", files, 1 if parts is FEW else len(files)):
        older = [copies[name] for copies in lived.copies if name in copies]
        for damage in damages(name, files[name], older[-1:] if parts is FEW else older, parts):
            left = {other: files[other] for other in files if other != name}
            if damage.data is not None:
                left[name] = damage.data
            try:
                tally.note(damage, await check(lived, left, str(damage), config))
            except (AssertionError, pytest.fail.Exception) as error:
                tally.note(damage, "wrong", str(error))
    tally.finish(but=ABSENT[kind])
    assert tally.outcomes["complete"] < tally.tried
    assert tally.outcomes["lost and reported"] > 0 or closed


FOLDERS = {
    "wal/": ("wal/",),
    "every log file": ("wal/wal-", "wal/shard-00/wal-", "wal/shard-01/wal-"),
    "meta/": ("meta/",),
    "topics/": ("topics/",),
    "meta/ and topics/": ("meta/", "topics/"),
    "wal/ and meta/": ("wal/", "meta/"),
}


LOCKS_LEFT = {(YOUNG, "wal/"), (YOUNG, "wal/ and meta/")}
"""Nothing but locks is left: such a directory looks as if it was never used."""


@pytest.mark.parametrize(
    ("kind", "folder"),
    [(kind, folder) for kind in CONFIGS for folder in FOLDERS if (kind, folder) not in LOCKS_LEFT],
)
async def test_a_folder_that_is_missing_is_reported(kind: str, folder: str) -> None:
    config = CONFIGS[kind]
    world = World(**config)
    lived = await live(world, closed=False, snapshots=kind != YOUNG)
    files = contents(world.disk)
    left = {name: raw for name, raw in files.items() if not name.startswith(FOLDERS[folder])}
    await check(lived, left, f"{folder} is missing", config)
