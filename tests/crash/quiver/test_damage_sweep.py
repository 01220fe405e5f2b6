"""Every durable file of a Quiver, damaged in every way: damage is reported or harmless, and no number is
reused.
"""

from __future__ import annotations

import contextlib
import random

import pytest
from tests.crash.damage import FEW, MANY, Tally, damages, names_in, some_of
from tests.unit.quiver.engine_doubles import CORE, PATH, StepClock, config, open_quiver, rows, take_all

from penstock.errors import Corrupt, InvalidInput, PenstockError, Unsupported
from penstock.metrics import Registry
from penstock.quiver import Quiver
from penstock.quiver.offsets.external import ExternalAck, commit_offset
from penstock.quiver.segments.metadata import seq_of
from penstock.quiver.tools.fsck import check
from penstock.testing.disk import FakeDisk, Survival

pytestmark = pytest.mark.crash

COUNT = 14
LATER = 1_000_000


def write(disk: FakeDisk, path: str, data: bytes | None) -> None:
    """Replace a file durably, or remove it if `data` is None."""
    with contextlib.suppress(PenstockError):
        disk.unlink(path)
    if data is not None:
        file = disk.create(path)
        file.write([data])
        file.datasync()
    disk.sync_dir(path.rpartition("/")[0])


def prepared(*, at_rest: bool) -> tuple[FakeDisk, dict[str, list[bytes]], int]:
    """Return a directory, older copies of its files, and the highest assigned bundle number.

    Unless it is `at_rest`, the process ended right after it had accepted the last bundle.
    """
    clock = StepClock()
    disk = FakeDisk(clock=clock)
    quiver = open_quiver(disk, clock, config(wal={"rotation_target": 4096}))
    quiver.register("lake")
    quiver.activate("lake")
    older: dict[str, list[bytes]] = {}
    highest = 0
    for n in range(COUNT):
        highest = quiver.ingest(rows(n * 100, 8), slot=50 + n % 2).wal_seq
        if n < COUNT - 1 or at_rest:
            clock.step(0.2)
            quiver.maintain()
        if n == COUNT // 2 - 1:
            quiver.core.offsets.checkpoint()
            commit_offset(disk, CORE, ExternalAck(subscriber="spark", through=0))
        if n == COUNT // 2 + 1:
            commit_offset(disk, CORE, ExternalAck(subscriber="spark", through=1))
            quiver.core.offsets.checkpoint()
        if n in (2, COUNT // 2, COUNT - 3):
            for name, _ in disk.list_files(PATH):
                older.setdefault(name, []).append(disk.read(f"{PATH}/{name}"))
    if at_rest:
        clock.step(0.2)
        quiver.maintain()
    return disk.crash(Survival.NOTHING if at_rest else Survival.EVERYTHING), older, highest


def lost_silently(disk: FakeDisk, highest: int) -> str | None:
    """Return the problem after a start on a damaged directory, or None if it is reported or harmless."""
    reported = bool(check(disk, 0, CORE).problems)
    registry = Registry()
    try:
        quiver = open_quiver(disk, StepClock(), registry=registry)
    except (Corrupt, Unsupported):
        return None
    was_there = "lake" in quiver.core.offsets.state.subscribers
    if not was_there:
        quiver.register("lake")
    quiver.activate("lake")
    number = quiver.ingest(rows(LATER, 3), slot=50).wal_seq
    if number <= highest:
        return f"bundle number {number} is given twice"
    quiver.flush()
    firsts = {values[0] for _, values in take_all(quiver, "lake")}
    if LATER not in firsts:
        return "what came after the damage is not delivered"
    missing = COUNT - len(firsts - {LATER})
    if missing and not quiver.stats().damage:
        return f"{missing} bundles are gone without a word"
    if missing and not reported and not quiver.core.store.damage:
        return f"{missing} bundles are gone and fsck is clean"
    dropped = dropped_of(quiver, "lake")
    if was_there and dropped < missing:
        return f"{missing} bundles are gone, and {dropped} are counted as dropped"
    again = open_quiver(disk.crash(Survival.EVERYTHING), StepClock(), registry=Registry())
    if dropped_of(again, "lake") != dropped:
        return f"the next start counts {dropped_of(again, 'lake')} dropped, not {dropped}"
    if again.ingest(rows(LATER, 3), slot=50).wal_seq <= number:
        return f"bundle number {number} is given again by the next start"
    return None


def dropped_of(quiver: Quiver, name: str) -> int:
    return sum(one.dropped for one in quiver.stats().subscribers if one.name == name)


@pytest.mark.parametrize("at_rest", [True, False], ids=["at rest", "at work"])
@pytest.mark.parametrize("parts", [FEW, pytest.param(MANY, marks=pytest.mark.long)], ids=["few", "many"])
def test_damage_to_any_durable_file_is_reported_or_harmless_and_no_number_is_assigned_twice(
    parts: tuple[int, ...], at_rest: bool, caplog: pytest.LogCaptureFixture
) -> None:
    disk, older, highest = prepared(at_rest=at_rest)
    files = [name for name, _ in disk.list_files(PATH)]
    tally = Tally("Quiver")
    for name in some_of("Quiver", files, 2 if parts is FEW else len(files)):
        data = disk.read(f"{PATH}/{name}")
        for damage in damages(name, data, older.get(name, []), parts):
            disk, work = disk.crash(Survival.EVERYTHING), disk.crash(Survival.EVERYTHING)
            write(work, f"{PATH}/{name}", damage.data)
            caplog.clear()
            wrong = lost_silently(work, highest)
            tally.note(damage, "wrong" if wrong else "reported or complete", wrong)
    tally.finish(but={"budget.shm", "budget.lock"})


def open_cores(disk: FakeDisk) -> list[Quiver]:
    """Both cores of one directory, which share its cap."""
    return [
        Quiver.open(
            PATH,
            config(),
            core_id=core,
            cores=2,
            fs=disk,
            clock=StepClock(),
            rng=random.Random(core),
            registry=Registry(),
            maintenance=False,
            threads=False,
        )
        for core in range(2)
    ]


def lost_by_budget(disk: FakeDisk) -> tuple[str, str | None]:
    """How a start of both cores goes, and what is wrong: a bundle is lost or dropped."""
    try:
        cores = open_cores(disk)
    except InvalidInput as error:
        return "refused", None if "budget.shm" in str(error) else f"the error is {error}"
    for core, quiver in enumerate(cores):
        quiver.activate("lake")
        quiver.ingest(rows(LATER, 3), slot=50)
        quiver.flush()
        quiver.maintain()
        firsts = {values[0] for _, values in take_all(quiver, "lake")}
        if firsts != {0, 100, 200, LATER} or dropped_of(quiver, "lake"):
            return "wrong", f"core {core} delivers {sorted(firsts)}"
    return "complete", None


def test_damage_to_what_cores_say_of_their_budget_loses_nothing() -> None:
    disk = FakeDisk(clock=StepClock())
    cores = open_cores(disk)
    older: dict[str, list[bytes]] = {"budget.shm": [], "budget.lock": [b"lock"]}
    for n in range(3):
        for quiver in cores:
            if not n:
                quiver.register("lake")
                quiver.activate("lake")
            quiver.ingest(rows(n * 100, 8), slot=50)
            quiver.maintain()
        older["budget.shm"].append(disk.read(f"{PATH}/budget.shm"))
    tally = Tally("Quiver")
    for name, copies in older.items():
        for damage in damages(name, copies[-1], copies):
            disk, work = disk.crash(Survival.EVERYTHING), disk.crash(Survival.EVERYTHING)
            write(work, f"{PATH}/{name}", damage.data)
            tally.note(damage, *lost_by_budget(work))
    assert tally.tried > 0
    tally.finish(but=names_in("Quiver").keys() - {"budget.shm", "budget.lock"})


def test_bundles_lost_by_a_truncated_log_are_counted_for_every_subscriber() -> None:
    clock = StepClock()
    disk = FakeDisk(clock=clock)
    quiver = open_quiver(disk, clock)
    for name in ("lake", "archive"):
        quiver.register(name)
    quiver.ingest(rows(0, 3), slot=50)
    quiver.flush()
    for n in range(1, 5):
        quiver.ingest(rows(n * 100, 3), slot=50)
    clock.step(0.2)
    quiver.maintain()
    disk = disk.crash(Survival.NOTHING)
    write(disk, f"{CORE}/wal/quiver.wal", None)
    assert any("missing" in finding.text for finding in check(disk, 0, CORE).problems)
    again = open_quiver(disk, StepClock())
    assert any("4 accepted bundles" in text for text in again.stats().damage)
    assert {one.name: one.dropped for one in again.stats().subscribers} == {"lake": 4, "archive": 4}
    once_more = open_quiver(disk.crash(Survival.NOTHING), StepClock())
    assert {one.dropped for one in once_more.stats().subscribers} == {4}, "each loss is counted once"


def test_a_log_truncated_above_its_cursor_is_reported_from_the_offset_log() -> None:
    clock = StepClock()
    disk = FakeDisk(clock=clock)
    quiver = open_quiver(disk, clock)
    quiver.register("lake")
    kept = 0
    for n in range(4):
        quiver.ingest(rows(n * 100, 3), slot=50)
        kept = kept or len(disk.read(f"{CORE}/wal/quiver.wal").rstrip(b"\0"))
    clock.step(0.2)
    quiver.maintain()
    disk = disk.crash(Survival.NOTHING)
    write(disk, f"{CORE}/wal/quiver.wal", disk.read(f"{CORE}/wal/quiver.wal")[:kept])
    assert check(disk, 0, CORE).problems
    again = open_quiver(disk, StepClock())
    assert any("3 accepted bundles up to number 4" in text for text in again.stats().damage)
    assert [one.dropped for one in again.stats().subscribers] == [3]


@pytest.mark.parametrize("lost", [2, 3])
def test_a_segment_missing_before_any_subscription_is_reported_once(lost: int) -> None:
    clock = StepClock()
    disk = FakeDisk(clock=clock)
    quiver = open_quiver(disk, clock)
    for n in range(3):
        quiver.ingest(rows(n * 100, 3), slot=50)
        quiver.flush()
    clock.step(0.2)
    quiver.maintain()
    assert [info.seq for info in quiver.core.store.infos()] == [1, 2, 3]
    quiver.close()
    for name, _ in disk.list_files(f"{CORE}/segments"):
        if seq_of(name) == lost:
            write(disk, f"{CORE}/segments/{name}", None)
    assert any(str(lost) in finding.subject for finding in check(disk, 0, CORE).problems)
    again = open_quiver(disk, clock)
    assert any(f"segments {lost} to {lost} are missing" in text for text in again.stats().damage)
    again.close()
    assert not check(disk, 0, CORE).problems
    assert not open_quiver(disk, clock).stats().damage


@pytest.mark.parametrize("offset", [10, 20])
def test_a_log_with_the_header_of_another_version_is_reported_with_the_segments(offset: int) -> None:
    clock = StepClock()
    disk = FakeDisk(clock=clock)
    quiver = open_quiver(disk, clock)
    quiver.ingest(rows(0, 3), slot=50)
    quiver.flush()
    disk = disk.crash(Survival.EVERYTHING)
    raw = bytearray(disk.read(f"{CORE}/wal/quiver.wal"))
    raw[offset] ^= 1
    write(disk, f"{CORE}/wal/quiver.wal", bytes(raw))
    checked = check(disk, 0, CORE)
    assert [finding.subject for finding in checked.problems] == ["wal"]
    assert checked.segments == 1


@pytest.mark.parametrize("how", ["missing", "cut"])
def test_bundles_accepted_just_before_a_crash_are_counted_when_the_log_lost_them(
    how: str,
) -> None:
    disk, clock = FakeDisk(), StepClock()
    quiver = open_quiver(disk, clock)
    quiver.register("lake")
    kept = len(disk.read(f"{CORE}/wal/quiver.wal").rstrip(b"\0"))
    highest = max(quiver.ingest(rows(n * 100, 3), slot=50).wal_seq for n in range(4))
    # No maintenance between the last bundle and the end of the process.
    disk = disk.crash(Survival.EVERYTHING)
    raw = disk.read(f"{CORE}/wal/quiver.wal")
    write(disk, f"{CORE}/wal/quiver.wal", None if how == "missing" else raw[:kept])
    assert [one.subject for one in check(disk, 0, CORE).problems] == ["wal/quiver.wal"]
    again = open_quiver(disk, StepClock())
    assert any("4 accepted bundles up to number 4" in text for text in again.stats().damage)
    assert [one.dropped for one in again.stats().subscribers] == [4]
    assert again.ingest(rows(900, 3), slot=50).wal_seq > highest
    once_more = open_quiver(disk.crash(Survival.EVERYTHING), StepClock())
    assert [one.dropped for one in once_more.stats().subscribers] == [4], "each loss is counted once"


def test_bundles_lost_in_the_middle_of_a_log_are_counted_once_for_every_subscriber() -> None:
    disk, clock = FakeDisk(), StepClock()
    quiver = open_quiver(disk, clock, config(wal={"rotation_target": 30_000}))
    quiver.register("lake")
    ends = [len(disk.read(f"{CORE}/wal/quiver.wal").rstrip(b"\0"))]
    for n in range(8):
        quiver.ingest(rows(n * 100, 3), slot=50)
        ends.append(len(disk.read(f"{CORE}/wal/quiver.wal").rstrip(b"\0")))
    disk = disk.crash(Survival.EVERYTHING)
    raw = disk.read(f"{CORE}/wal/quiver.wal")
    write(disk, f"{CORE}/wal/quiver.wal", raw[: ends[2]] + bytes(ends[5] - ends[2]) + raw[ends[5] :])
    for turn in range(3):
        again = open_quiver(disk, StepClock())
        assert again.stats().damage, f"start {turn}"
        assert [one.dropped for one in again.stats().subscribers] == [3], f"start {turn}"
        disk = disk.crash(Survival.EVERYTHING)
    again = open_quiver(disk, StepClock())
    again.flush()
    assert {values[0] for _, values in take_all(again, "lake")} == {0, 100, 500, 600, 700}


def test_bundles_of_a_rotated_log_file_that_is_empty_are_counted_for_every_subscriber() -> None:
    disk, clock = FakeDisk(), StepClock()
    quiver = open_quiver(disk, clock, config(wal={"rotation_target": 4096}))
    quiver.register("lake")
    for n in range(14):
        quiver.ingest(rows(n * 100, 8), slot=50)
    disk = disk.crash(Survival.EVERYTHING)
    rotated = [
        name
        for name, _ in disk.list_files(f"{CORE}/wal")
        if name.startswith("quiver.wal.") and name[-1].isdigit()
    ]
    assert rotated
    write(disk, f"{CORE}/wal/{rotated[-1]}", b"")
    again = open_quiver(disk, StepClock())
    again.flush()
    missing = 14 - len({values[0] for _, values in take_all(again, "lake")})
    assert missing
    assert dropped_of(again, "lake") == missing
