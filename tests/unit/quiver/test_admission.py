"""Admission: a bundle that can fit is accepted, one that can never fit is refused, and the cap holds."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from pathlib import Path

import pytest
from tests.unit.quiver.engine_doubles import PATH, StepClock, config, ready, rows

from penstock.errors import ConfigError, LimitExceeded, StorageFull
from penstock.metrics import Registry
from penstock.quiver import AsyncQuiver, AtCapacity, Closed, Quiver, QuiverConfig
from penstock.quiver.append import encode_bundle
from penstock.quiver.model import SealedSegment, SegmentInfo
from penstock.testing.disk import FakeDisk

CAP = 90_000
LOGGED: dict[str, dict[str, object] | str] = {
    "segment": {"target_size": 15_000},
    "wal": {"max_size": 60_000, "rotation_target": 30_000},
}


@pytest.fixture
def clock() -> StepClock:
    return StepClock()


@pytest.fixture
def disk(clock: StepClock) -> FakeDisk:
    return FakeDisk(clock=clock)


def capped(policy: str = "backpressure", cap: int = CAP, **sections: dict[str, object] | str) -> QuiverConfig:
    return config(retention={"size_cap": cap, "size_cap_policy": policy}, **sections)


def one_of(disk: FakeDisk, clock: StepClock, settings: QuiverConfig, core: int, cores: int) -> Quiver:
    quiver = Quiver.open(
        PATH,
        settings,
        core_id=core,
        cores=cores,
        fs=disk,
        clock=clock,
        rng=random.Random(1),
        registry=Registry(),
        maintenance=False,
        threads=False,
    )
    quiver.register("lake")
    return quiver


def take_all(quiver: Quiver) -> int:
    count = 0
    while (bundle := quiver.next_bundle("lake")) is not None:
        bundle.ack()
        count += 1
    quiver.maintain()
    return count


def largest(quiver: Quiver) -> int:
    """Return the maximum number of rows of a bundle."""
    low, high = 1, 100_000
    while low + 1 < high:
        middle = (low + high) // 2
        size = encode_bundle(rows(1, middle)).byte_count
        low, high = (middle, high) if size <= quiver.core.admission._bundle_max else (low, middle)
    return low


@pytest.mark.parametrize("row_count", [1, 50, 150, 400, 600, 640, 680])
@pytest.mark.parametrize("policy", ["backpressure", "drop_oldest"])
def test_bundles_of_any_size_stay_within_the_cap(
    disk: FakeDisk, clock: StepClock, row_count: int, policy: str
) -> None:
    quiver = ready(disk, clock, settings=capped(policy))
    refused = 0
    for n in range(200):
        try:
            quiver.ingest(rows(n * 1000, row_count))
        except AtCapacity:
            refused += 1
        assert quiver.stats().disk_bytes <= CAP
        clock.step(2)
        quiver.maintain()
        assert quiver.stats().disk_bytes <= CAP
    assert bool(refused) == (policy == "backpressure")


@pytest.mark.parametrize("seed", range(8))
def test_the_largest_bundle_is_accepted_once_the_others_are_delivered(
    disk: FakeDisk, clock: StepClock, seed: int
) -> None:
    rng = random.Random(seed)
    target, log = rng.choice([(3000, 60_000), (15_000, 60_000), (15_000, 30_000)])
    settings = capped(
        cap=log + 2 * target + rng.randrange(20_000),
        segment={"target_size": target},
        wal={"max_size": log, "rotation_target": rng.choice([4096, log // 2])},
    )
    quiver = ready(disk, clock, settings=settings)
    most = largest(quiver)
    for count in [most, most, *(rng.randrange(1, most + 1) for _ in range(20)), most]:
        for _ in range(3):
            try:
                quiver.ingest(rows(1, count))
                break
            except AtCapacity:
                clock.step(10)
                quiver.maintain()
                quiver.flush()
                take_all(quiver)
        else:
            pytest.fail(f"{count} rows are refused indefinitely, and {most} are allowed")
        assert quiver.stats().disk_bytes <= quiver.stats().cap_bytes
    quiver.flush()
    take_all(quiver)


@pytest.mark.parametrize("is_open", [False, True])
def test_space_is_freed_without_loss_before_data_is_dropped(
    disk: FakeDisk, clock: StepClock, is_open: bool
) -> None:
    settings = capped("drop_oldest", cap=97_000, **LOGGED)
    quiver = ready(disk, clock, settings=settings)
    quiver.register("archive")
    quiver.activate("archive")
    quiver.ingest(rows(0, 1))  # the archive has not resolved it, so maintenance keeps the log
    quiver.flush()
    quiver.ingest(rows(1, 600))  # only its log is in the way of the next one
    quiver.flush()
    take_all(quiver)
    assert quiver.ack_segment("archive", 2)
    quiver.ingest(rows(1000))
    quiver.flush()
    if is_open:
        quiver.ingest(rows(1500, 1))  # little data, but the whole log is kept for it
    quiver.ingest(rows(2000, 600))
    quiver.flush()
    assert [one.dropped for one in quiver.subscribers()] == [0, 0]
    assert take_all(quiver) == 2 + is_open


def marked(quiver: Quiver) -> None:
    """Wait until the log is idle, when the committer writes a mark that belongs to no bundle."""
    wal, end_s = quiver.core.wal, time.monotonic() + 20
    assert wal is not None
    while wal.position(wal.log.end) <= quiver.core.memtable.end and time.monotonic() < end_s:
        time.sleep(0.01)
    assert wal.position(wal.log.end) > quiver.core.memtable.end


@pytest.mark.parametrize("policy", ["backpressure", "drop_oldest"])
@pytest.mark.parametrize("restarts", [False, True])
def test_marks_of_the_log_do_not_block_bundles(tmp_path: Path, policy: str, restarts: bool) -> None:
    settings = capped(policy, cap=93_750, **LOGGED)
    quiver = Quiver.open(str(tmp_path), settings, registry=Registry(), maintenance=False)
    quiver.register("lake")
    quiver.activate("lake")
    for number in range(4):
        quiver.ingest(rows(number * 1000, 600))
        quiver.flush()
        marked(quiver)
        assert take_all(quiver) == 1
        if restarts:
            quiver.close()
            quiver = Quiver.open(str(tmp_path), settings, registry=Registry(), maintenance=False)
            quiver.activate("lake")
        assert quiver.stats().wal_files <= 2
    assert [one.dropped for one in quiver.subscribers()] == [0]
    quiver.close()


def test_a_full_log_is_emptied_even_if_it_has_marks(tmp_path: Path) -> None:
    settings = capped(cap=1_000_000, wal={"max_size": 40_000, "rotation_target": 20_000})
    with Quiver.open(str(tmp_path), settings, registry=Registry(), maintenance=False) as quiver:
        for number in range(4):
            quiver.ingest(rows(number * 1000, 600))
            quiver.flush()
            marked(quiver)
            assert quiver.stats().wal_files <= 2


def test_close_waits_for_a_thread_that_frees_space_and_admits_no_other(tmp_path: Path) -> None:
    quiver = Quiver.open(str(tmp_path), capped(), registry=Registry(), maintenance=False)
    guard = quiver.core.guard
    with guard.at_work():
        closing = threading.Thread(target=quiver.close)
        closing.start()
        closing.join(0.2)
        assert closing.is_alive()
        with pytest.raises(Closed), guard.at_work():
            pytest.fail("no thread starts during close")
    closing.join(20)
    assert not closing.is_alive()
    before = sorted((path, path.stat().st_ino) for path in tmp_path.rglob("*"))
    with pytest.raises(Closed):
        quiver.core.appender.rotate()
    with pytest.raises(Closed):
        quiver.core.space.reclaim(30_000)
    assert sorted((path, path.stat().st_ino) for path in tmp_path.rglob("*")) == before


def test_a_working_thread_may_close(tmp_path: Path) -> None:
    quiver = Quiver.open(str(tmp_path), capped(), registry=Registry(), maintenance=False)
    with quiver.core.guard.at_work():
        quiver.close()  # as a signal handler does


async def test_waiting_writers_do_not_prevent_a_reader_from_freeing_space(tmp_path: Path) -> None:
    settings = capped(ingest={"block_timeout": "10m"})
    async with await AsyncQuiver.open(str(tmp_path), settings, registry=Registry()) as quiver:
        await quiver.register("lake")
        await quiver.activate("lake")
        writers = [asyncio.create_task(quiver.ingest(rows(n * 1000, 300))) for n in range(40)]
        taken = set()
        while len(taken) < len(writers):
            bundle = await quiver.next_bundle("lake", timeout=None)
            assert bundle is not None
            taken.add(bundle.batch.column("n")[0].as_py())
            bundle.ack()
        assert sorted(taken) == [n * 1000 for n in range(40)]
        assert len({receipt.wal_seq for receipt in await asyncio.gather(*writers)}) == 40


def test_a_full_device_does_not_prevent_deletion_of_the_oldest(disk: FakeDisk, clock: StepClock) -> None:
    settings = config(
        segment={"target_size": 6000},
        retention={"size_cap": "1MB", "min_free": 1000, "size_cap_policy": "drop_oldest"},
    )
    quiver = ready(disk, clock, settings=settings)
    for number in range(5):
        quiver.ingest(rows(number, 20))
        quiver.flush()
    quiver.ingest(rows(1000, 80))
    assert quiver.core.memtable.open_bytes >= 3000
    store, free = quiver.core.store, [0]
    write, remove = store.write, quiver.core.segments.remove

    def write_if_possible(sealed: SealedSegment, seq: int) -> SegmentInfo:
        if free[0] < 1000:
            raise StorageFull("no space left on device")
        return write(sealed, seq)

    def make_space(seq: int) -> None:
        remove(seq)
        free[0] += 5_000_000

    disk.free_bytes = lambda path: free[0]  # type: ignore[method-assign]
    store.write = write_if_possible  # type: ignore[method-assign]
    quiver.core.segments.remove = make_space  # type: ignore[method-assign]
    clock.step(5)
    quiver.ingest(rows(2000))
    clock.step(60)
    quiver.flush()
    (lake,) = quiver.subscribers()
    assert 0 < lake.dropped < 5
    assert take_all(quiver) == 7 - lake.dropped


def test_a_bundle_that_can_never_fit_under_the_cap_is_refused(disk: FakeDisk, clock: StepClock) -> None:
    quiver = ready(disk, clock, settings=capped())
    most = largest(quiver)
    assert not quiver.core.admission.reserve(encode_bundle(rows(1, most + 10)).byte_count)
    with pytest.raises(LimitExceeded, match=r"retention\.size_cap"):
        quiver.ingest(rows(1, most + 10))
    quiver.ingest(rows(1, most))


@pytest.mark.parametrize(
    ("cores", "target", "log"), [(2, 40_000, 40_000), (4, 10_000, 40_000), (2, 3000, 9000)]
)
def test_one_of_several_cores_accepts_its_largest_bundle(
    disk: FakeDisk, clock: StepClock, cores: int, target: int, log: int
) -> None:
    settings = capped(cap=cores * (log + 2 * target), segment={"target_size": target}, wal={"max_size": log})
    all_cores = [one_of(disk, clock, settings, core, cores) for core in range(cores)]
    for quiver in all_cores:
        quiver.maintain()
    most = largest(all_cores[0])
    all_cores[0].ingest(rows(1, most))
    with pytest.raises(LimitExceeded):
        all_cores[0].ingest(rows(1, most + 10))
    for quiver in all_cores:
        quiver.close()


@pytest.mark.parametrize("cores", [2, 4])
def test_a_cap_that_leaves_a_core_no_room_for_bundles_is_refused(cores: int) -> None:
    settings = capped(cap=cores * 20_000, durability="segment_only", segment={"target_size": 10_000})
    with pytest.raises(ConfigError, match=r"no room for a bundle of 1 KiB"):
        Quiver.open("/nowhere", settings, cores=cores)


def test_without_a_log_only_the_segment_counts_even_if_an_old_log_exists(
    disk: FakeDisk, clock: StepClock
) -> None:
    with ready(disk, clock, settings=capped()) as before:
        before.ingest(rows(1))
    quiver = ready(disk, clock, settings=capped(durability="segment_only"))
    assert quiver.core.wal is not None
    assert take_all(quiver) == 1
    quiver.ingest(rows(1, largest(quiver)))


def test_an_old_log_is_removed_when_the_log_is_disabled(tmp_path: Path) -> None:
    with Quiver.open(str(tmp_path), capped(), registry=Registry(), maintenance=False) as before:
        before.ingest(rows(1))
        before.flush()
        marked(before)
    settings = capped(durability="segment_only")
    with Quiver.open(str(tmp_path), settings, registry=Registry(), maintenance=False) as quiver:
        quiver.maintain()
        assert quiver.stats().wal_files == 1


def test_space_is_reserved_once(disk: FakeDisk, clock: StepClock) -> None:
    quiver = ready(disk, clock, settings=capped())
    size = encode_bundle(rows(1, 100)).byte_count
    given = 0
    while quiver.core.admission.reserve(size):
        given += 1
    assert 2 * size * given < CAP
    assert given >= 2
    quiver.core.admission.release(size)
    assert quiver.core.admission.reserve(size)
    with pytest.raises(AtCapacity):
        quiver.ingest(rows(1, 100))
    for _ in range(given):
        quiver.core.admission.release(size)
    quiver.ingest(rows(1, 100))


def test_a_bundle_that_is_not_accepted_releases_its_space(
    disk: FakeDisk, clock: StepClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiver = ready(disk, clock, settings=capped())

    def full(*_: object) -> None:
        raise AtCapacity("too many wait", retry_after_s=0.1)

    with monkeypatch.context() as patched:
        patched.setattr(quiver.core.appender, "append", full)
        for _ in range(50):
            with pytest.raises(AtCapacity, match="too many wait"):
                quiver.ingest(rows(1, 100))
    quiver.ingest(rows(1, 100))


async def test_a_task_cancelled_during_admission_keeps_no_space(tmp_path: Path) -> None:
    settings = capped(ingest={"block_timeout": "30s"})
    async with await AsyncQuiver.open(str(tmp_path), settings, registry=Registry()) as quiver:
        await quiver.register("lake")
        await quiver.activate("lake")
        size = encode_bundle(rows(1, 100)).byte_count
        admission = quiver.sync.core.admission
        given = 0
        while admission.reserve(size):
            given += 1
        waiting = [asyncio.create_task(quiver.ingest(rows(1, 100))) for _ in range(3)]
        await asyncio.sleep(0.05)
        for task in waiting:
            task.cancel()
        assert all(isinstance(one, asyncio.CancelledError) for one in await gathered(waiting))
        for _ in range(given):
            admission.release(size)
        for _ in range(given):
            assert admission.reserve(size)
        for _ in range(given):
            admission.release(size)
        await quiver.ingest(rows(1, 100))


async def gathered(tasks: list[asyncio.Task[object]]) -> list[object]:
    return await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("policy", ["backpressure", "drop_oldest"])
def test_concurrent_writers_stay_within_the_cap(tmp_path: Path, policy: str) -> None:
    over: list[int] = []
    taken = [0] * 8
    with Quiver.open(str(tmp_path), capped(policy, cap=200_000), registry=Registry()) as quiver:
        quiver.register("lake")
        start = threading.Barrier(len(taken))

        def write(number: int) -> None:
            start.wait()
            for n in range(15):
                try:
                    quiver.ingest(rows(n * 1000, 300))
                    taken[number] += 1
                except AtCapacity:
                    pass
                used = quiver.core.space.used_bytes()
                if used > 200_000:
                    over.append(used)

        threads = [threading.Thread(target=write, args=(number,)) for number in range(len(taken))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert over == []
    assert sum(taken) >= (8 if policy == "drop_oldest" else 1)
