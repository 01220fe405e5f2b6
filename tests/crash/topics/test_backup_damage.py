"""Every file of a backup, damaged in every way: a restore refuses it and leaves nothing."""

from __future__ import annotations

import pytest
from tests.crash.damage import FEW, MANY, Tally, damages, names_in
from tests.unit.topics.engine_doubles import DATA, FSYNC, World, recs

from penstock.errors import PenstockError
from penstock.testing.disk import FakeDisk
from penstock.topics.tools.backup import backup
from penstock.topics.tools.restore import restore

BACKUP, TARGET = "/backup", "/restored"


def below(disk: FakeDisk, root: str) -> dict[str, bytes]:
    return {name: disk.read(f"{root}/{name}") for name, _ in disk.list_files(root)}


def disk_of(files: dict[str, bytes]) -> FakeDisk:
    disk = FakeDisk()
    for name, raw in files.items():
        disk.make_dirs(f"{BACKUP}/{name}".rpartition("/")[0])
        file = disk.create(f"{BACKUP}/{name}")
        if raw:
            file.write([raw])
        file.close()
    return disk


async def backups() -> list[dict[str, bytes]]:
    """The files of a backup, and of an older one of the same directory."""
    world, made = World(segment_max_events=4), []
    engine = await world.open()
    for turn in range(2):
        for step in range(4):
            await engine.write("t", recs(turn, step, "x", tag="y"), config=FSYNC)
        await engine.checkpoint()
        await engine.write("t", recs("in the log"), config=FSYNC)
        await engine.close()
        backup(world.disk, DATA, f"/backup-{turn}")
        made.append(below(world.disk, f"/backup-{turn}"))
        engine = await world.open()
    await engine.close()
    return made


@pytest.mark.parametrize("parts", [FEW, pytest.param(MANY, marks=pytest.mark.long)], ids=["few", "many"])
async def test_a_restore_refuses_a_damaged_backup_or_is_complete(parts: tuple[int, ...]) -> None:
    older, files = await backups()
    whole = disk_of(files)
    restore(whole, BACKUP, TARGET)
    expected = below(whole, TARGET)
    tally = Tally("Topics")
    for name, raw in files.items():
        for damage in damages(name, raw, [older[name]] if name in older else [], parts):
            left = {other: data for other, data in files.items() if other != name}
            if damage.data is not None:
                left[name] = damage.data
            disk = disk_of(left)
            damage = type(damage)(f"<backup>/{name}", damage.how, damage.data)
            try:
                restore(disk, BACKUP, TARGET)
            except PenstockError:
                remains = below(disk, TARGET).keys() - {".topics.lock"}
                tally.note(damage, "refused", f"{remains} is left" if remains else None)
            else:
                same = below(disk, TARGET) == expected
                tally.note(damage, "complete", None if same else "something else was restored")
    tally.finish(but=names_in("Topics").keys() - {"<backup>/backup.json", "<backup>/…"})
