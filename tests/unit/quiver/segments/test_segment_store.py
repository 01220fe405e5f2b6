"""The segment store on an in-memory disk and on a real one."""

from __future__ import annotations

import logging
import random
import threading
from pathlib import Path

import pyarrow as pa
import pytest
from tests.unit.quiver.bundles import SECOND_NS, batch, part, sealed, sealed_of

from penstock.errors import Corrupt, NotFound, Unsupported
from penstock.quiver.model import Signal
from penstock.quiver.segments.file import BundleMetadata
from penstock.quiver.segments.metadata import arrow_name, meta_name
from penstock.quiver.segments.recovery import DamageAction
from penstock.quiver.segments.store import SegmentStore
from penstock.storage.fs import OsFileSystem
from penstock.testing.disk import FakeDisk

pytestmark = pytest.mark.unit

SEGMENTS, QUARANTINE = "/q/segments", "/q/quarantine"


def opened(disk: FakeDisk, **more: object) -> SegmentStore:
    return SegmentStore.open(disk, SEGMENTS, QUARANTINE, **more)  # type: ignore[arg-type]


def flip(disk: FakeDisk, path: str, place: int, bit: int = 0) -> None:
    data = bytearray(disk.read(path))
    data[place] ^= 1 << bit
    disk.unlink(path)
    file = disk.create(path)
    file.write([bytes(data)])
    file.datasync()


def names(disk: FakeDisk, directory: str = SEGMENTS) -> list[str]:
    return [name for name, _ in disk.list_files(directory)]


def test_a_segment_is_read_back_bundle_by_bundle() -> None:
    store = opened(FakeDisk())
    info = store.write(sealed_of(batch(1, 2), batch(3), batch(), first_seq=5), 1)
    assert (info.bundle_count, info.item_count, info.signal, info.slot) == (3, 3, Signal.OTHER, 63)
    assert (info.wal_start, info.wal_end, info.wal_seq_min, info.wal_seq_max) == (5000, 8000, 5, 7)
    assert (info.ingest_ns_min, info.ingest_ns_max) == (5 * SECOND_NS, 7 * SECOND_NS)
    assert store.read(1, 0).equals(batch(1, 2))
    assert store.read(1, 2).equals(batch())
    assert [each.num_rows for each in store.batches(1)] == [2, 1, 0]
    assert store.bundle_metadata(1)[1] == BundleMetadata(wal_seq=6, ingest_ns=6 * SECOND_NS, items=1)


def test_a_batch_comes_back_with_its_own_metadata_only() -> None:
    store = opened(FakeDisk())
    store.write(sealed_of(batch(1).replace_schema_metadata({"mine": "kept"})), 1)
    assert store.read(1, 0).schema.metadata == {b"mine": b"kept"}
    assert store.schema(1).metadata == {b"mine": b"kept"}


def test_event_times_are_recorded_if_the_data_has_them() -> None:
    store = opened(FakeDisk())
    times = pa.array([5, None, 3], pa.timestamp("ns", "UTC"))
    info = store.write(sealed_of(pa.record_batch({"time": times}), slot=51), 1)
    assert (info.event_ns_min, info.event_ns_max) == (3, 5)
    seconds = pa.array([2], pa.timestamp("s"))
    assert (
        store.write(sealed_of(pa.record_batch({"start_time": seconds}), slot=50), 2).event_ns_max
        == 2 * SECOND_NS
    )
    none = pa.array([None], pa.timestamp("ns"))
    assert store.write(sealed_of(pa.record_batch({"time": none}), slot=52), 3).event_ns_min is None


def test_segments_survive_a_restart_with_all_their_metadata() -> None:
    disk = FakeDisk()
    store = opened(disk)
    written = [store.write(sealed_of(batch(seq)), seq) for seq in (1, 2, 3)]
    again = opened(disk)
    assert again.infos() == written
    assert again.byte_count == store.byte_count == sum(stat.size for _, stat in disk.list_files(SEGMENTS))
    assert again.highest_seq == 3
    assert again.read(2, 0).equals(batch(2))
    assert again.damage == []


def test_a_removed_segment_is_gone_and_frees_its_bytes() -> None:
    disk = FakeDisk()
    store = opened(disk)
    for seq in (1, 2, 3):
        store.write(sealed_of(batch(seq)), seq)
    held = store.read(1, 0)
    freed = store.bytes_of(1) + store.bytes_of(3)
    before = store.byte_count
    store.remove(1, 3)
    assert [info.seq for info in store.infos()] == [2]
    assert before - store.byte_count == freed
    assert names(disk) == [arrow_name(2), meta_name(2)]
    assert held.equals(batch(1))
    with pytest.raises(NotFound):
        store.read(1, 0)
    assert store.highest_seq == 3


def test_a_number_the_segment_does_not_have_is_an_index_error() -> None:
    store = opened(FakeDisk())
    store.write(sealed_of(batch(1)), 1)
    for bundle in (-1, 1):
        with pytest.raises(IndexError):
            store.read(1, bundle)


def test_staged_files_are_removed_and_others_are_left_alone() -> None:
    disk = FakeDisk()
    opened(disk).write(sealed_of(batch(1)), 1)
    for name in (arrow_name(2) + ".tmp", meta_name(2) + ".tmp", "README"):
        disk.create(f"{SEGMENTS}/{name}").write([b"half"])
    store = opened(disk)
    assert names(disk) == ["README", arrow_name(1), meta_name(1)]
    assert store.highest_seq == 1


def test_data_without_a_sidecar_is_removed_because_the_log_still_has_it() -> None:
    disk = FakeDisk()
    opened(disk).write(sealed_of(batch(1), first_seq=4), 1)
    disk.unlink(f"{SEGMENTS}/{meta_name(1)}")
    store = opened(disk, wal_cursor=4000)
    assert (store.infos(), names(disk), store.highest_seq) == ([], [], 1)


@pytest.mark.parametrize("why", [{"rebuild": True}, {"wal_cursor": 4001}])
def test_a_lost_sidecar_is_rebuilt_when_the_log_does_not_have_the_data(why: dict[str, object]) -> None:
    disk = FakeDisk()
    written = opened(disk).write(sealed_of(batch(1), batch(2), first_seq=4), 1)
    disk.unlink(f"{SEGMENTS}/{meta_name(1)}")
    store = opened(disk, **why)
    assert store.get(1).xxh3 == written.xxh3
    assert store.read(1, 1).equals(batch(2))
    assert opened(disk).get(1).created_by.endswith("rebuilt")


def test_half_of_a_file_is_not_a_segment_even_when_nothing_else_has_its_data() -> None:
    disk = FakeDisk()
    opened(disk).write(sealed_of(batch(1)), 1)
    disk.unlink(f"{SEGMENTS}/{meta_name(1)}")
    disk.truncate(f"{SEGMENTS}/{arrow_name(1)}", 200)
    assert opened(disk, rebuild=True).infos() == []


def test_a_damaged_sidecar_is_rebuilt_from_the_data(caplog: pytest.LogCaptureFixture) -> None:
    disk = FakeDisk()
    written = opened(disk).write(sealed_of(batch(1)), 1)
    flip(disk, f"{SEGMENTS}/{meta_name(1)}", 60)
    with caplog.at_level(logging.ERROR):
        store = opened(disk)
    assert store.get(1).xxh3 == written.xxh3
    assert [(each.seq, each.action) for each in store.damage] == [(1, DamageAction.REBUILT)]
    assert "segment 1 is rebuilt" in caplog.text
    assert opened(disk).damage == []


def test_a_sidecar_of_another_segment_is_not_used() -> None:
    disk = FakeDisk()
    store = opened(disk)
    store.write(sealed_of(batch(1)), 1)
    store.write(sealed_of(batch(2)), 2)
    disk.unlink(f"{SEGMENTS}/{meta_name(1)}")
    disk.rename(f"{SEGMENTS}/{meta_name(2)}", f"{SEGMENTS}/{meta_name(1)}")
    again = opened(disk)
    assert again.read(1, 0).equals(batch(1))
    assert [info.seq for info in again.infos()] == [1]


def test_a_sidecar_without_data_is_reported_and_kept() -> None:
    disk = FakeDisk()
    opened(disk).write(sealed_of(batch(1)), 1)
    disk.unlink(f"{SEGMENTS}/{arrow_name(1)}")
    store = opened(disk)
    assert [(each.action, each.info is not None) for each in store.damage] == [(DamageAction.MISSING, True)]
    assert names(disk, QUARANTINE) == [meta_name(1)]
    assert opened(disk).highest_seq == 1


@pytest.mark.parametrize("read_mode", ["mmap", "read"])
def test_a_flipped_bit_is_found_before_the_first_read(read_mode: str) -> None:
    disk = FakeDisk()
    opened(disk).write(sealed_of(batch(*range(20))), 1)
    size = disk.stat(f"{SEGMENTS}/{arrow_name(1)}").size
    for place in range(0, size, 7):
        flip(disk, f"{SEGMENTS}/{arrow_name(1)}", place, place % 8)
        store = opened(disk, read_mode=read_mode)
        assert store.damage == []
        with pytest.raises(Corrupt, match="checksum"):
            store.read(1, 0)
        with pytest.raises(Corrupt):
            store.bundle_metadata(1)
        flip(disk, f"{SEGMENTS}/{arrow_name(1)}", place, place % 8)
    assert opened(disk).read(1, 0).num_rows == 20


def test_full_verification_quarantines_damaged_segments_at_the_start() -> None:
    disk = FakeDisk()
    store = opened(disk)
    store.write(sealed_of(batch(1)), 1)
    store.write(sealed_of(batch(2)), 2)
    flip(disk, f"{SEGMENTS}/{arrow_name(1)}", 300)
    again = opened(disk, verify="full")
    assert [info.seq for info in again.infos()] == [2]
    assert [(each.seq, each.action) for each in again.damage] == [(1, DamageAction.QUARANTINED)]
    assert again.damage[0].info is not None
    assert names(disk, QUARANTINE) == [arrow_name(1), meta_name(1)]


def test_a_file_of_the_wrong_size_is_quarantined_without_reading_it() -> None:
    disk = FakeDisk()
    opened(disk).write(sealed_of(batch(1)), 1)
    disk.truncate(f"{SEGMENTS}/{arrow_name(1)}", 100)
    store = opened(disk)
    assert [(each.seq, each.action) for each in store.damage] == [(1, DamageAction.QUARANTINED)]


def test_verify_finds_damage_after_the_first_read() -> None:
    disk = FakeDisk()
    store = opened(disk)
    store.write(sealed_of(batch(1)), 1)
    store.verify(1)
    flip(disk, f"{SEGMENTS}/{arrow_name(1)}", 300)
    with pytest.raises(Corrupt):
        store.verify(1)


def test_quarantine_keeps_the_bytes_and_an_earlier_file_of_that_name() -> None:
    disk = FakeDisk()
    store = opened(disk)
    for _ in range(2):
        store.write(sealed_of(batch(1)), 1)
        damage = store.quarantine(1, "it looked odd")
        assert (damage.reason, damage.info is not None) == ("it looked odd", True)
    assert names(disk, QUARANTINE) == [
        "seg-0000000000000001.1.arrow",
        "seg-0000000000000001.1.meta.json",
        arrow_name(1),
        meta_name(1),
    ]
    assert (store.infos(), store.byte_count) == ([], 0)
    assert opened(disk).highest_seq == 1


def test_data_that_vanishes_at_runtime_is_corrupt_not_removed() -> None:
    disk = FakeDisk()
    opened(disk).write(sealed_of(batch(1)), 1)
    store = opened(disk)
    disk.unlink(f"{SEGMENTS}/{arrow_name(1)}")
    with pytest.raises(Corrupt, match="is missing"):
        store.read(1, 0)


@pytest.mark.parametrize("way", ["remove", "quarantine"])
def test_a_read_during_a_removal_reports_no_damage(way: str) -> None:
    disk = FakeDisk()
    opened(disk).write(sealed_of(batch(1)), 1)
    store = opened(disk)
    sync, seen = disk.sync_dir, []

    def read_meanwhile(path: str) -> None:
        sync(path)
        if arrow_name(1) not in names(disk):
            with pytest.raises((NotFound, Corrupt)) as caught:
                store.read(1, 0)
            seen.append(caught.type)

    disk.sync_dir = read_meanwhile  # type: ignore[method-assign]
    if way == "remove":
        store.remove(1)
    else:
        store.quarantine(1, "it looked odd")
    assert set(seen) == {NotFound}


def test_a_later_version_is_refused_before_anything_is_changed() -> None:
    from xxhash import xxh3_64_hexdigest

    disk = FakeDisk()
    opened(disk).write(sealed_of(batch(1)), 1)
    body = b'{"format":"quiver-segment/2"'
    data = body + b',"meta_xxh3":"' + xxh3_64_hexdigest(body).encode() + b'"}'
    disk.create(f"{SEGMENTS}/{meta_name(2)}").write([data])
    disk.create(f"{SEGMENTS}/{arrow_name(3)}.tmp").write([b"x"])
    before = names(disk)
    with pytest.raises(Unsupported):
        opened(disk)
    assert names(disk) == before


def test_the_highest_number_includes_quarantined_files() -> None:
    disk = FakeDisk()
    store = opened(disk)
    store.write(sealed_of(batch(1)), 9)
    store.quarantine(9, "test")
    assert opened(disk).highest_seq == 9


def test_dictionaries_of_many_bundles_share_one_file() -> None:
    store = opened(FakeDisk())
    bundles = [
        pa.record_batch({"d": pa.array([f"{seq}-{n}" for n in range(100)]).dictionary_encode().cast(kind)})
        for seq in range(4)
        for kind in [pa.dictionary(pa.int8(), pa.string())]
    ]
    store.write(sealed([part(each, seq) for seq, each in enumerate(bundles)]), 1)
    assert [each.to_pylist() for each in store.batches(1)] == [each.to_pylist() for each in bundles]


def test_a_real_file_is_mapped_and_outlives_its_removal(tmp_path: Path) -> None:
    store = SegmentStore.open(OsFileSystem(), str(tmp_path / "segments"), str(tmp_path / "quarantine"))
    store.write(sealed_of(*[batch(*range(10_000)) for _ in range(8)]), 1)
    path = Path(store.path(1))
    assert path.stat().st_mode & 0o777 == 0o400
    before = pa.total_allocated_bytes()
    batches = list(store.batches(1))
    assert pa.total_allocated_bytes() - before < 4096
    store.remove(1)
    assert not path.exists()
    assert all(each.equals(batch(*range(10_000))) for each in batches)


def test_few_files_stay_open_even_if_many_are_read() -> None:
    store = opened(FakeDisk())
    for seq in range(1, 50):
        store.write(sealed_of(batch(seq)), seq)
        assert store.read(seq, 0).num_rows == 1
    assert store.read(1, 0).equals(batch(1))


def test_bundles_whose_schemas_differ_only_in_metadata_share_a_segment() -> None:
    named = pa.map_(pa.field("k", pa.string(), nullable=False), pa.field("v", pa.int64()))
    noted = pa.struct([pa.field("x", pa.int64(), metadata={"unit": "s"})])
    one = pa.record_batch(
        [pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())), pa.array([{"x": 1}])], names=["m", "s"]
    )
    two = pa.record_batch([pa.array([[("b", 2)]], named), pa.array([{"x": 2}], noted)], names=["m", "s"])
    store = opened(FakeDisk())
    assert len({part(each).fingerprint for each in (one, two)}) == 1
    store.write(sealed_of(one, two), 1)
    assert [each.to_pylist() for each in store.batches(1)] == [one.to_pylist(), two.to_pylist()]


def test_rows_without_columns_are_still_rows() -> None:
    store = opened(FakeDisk())
    rows = pa.RecordBatch.from_struct_array(pa.array([{}, {}], pa.struct([])))
    assert store.write(sealed_of(rows, rows), 1).item_count == 4
    assert [each.num_rows for each in store.batches(1)] == [2, 2]


def test_a_slice_of_a_large_batch_takes_the_space_of_the_slice() -> None:
    store = opened(FakeDisk())
    large = pa.record_batch({"n": pa.array(range(100_000), pa.int64())})
    assert store.write(sealed_of(large.slice(10, 5)), 1).file_size < 4096
    assert store.read(1, 0)["n"].to_pylist() == [10, 11, 12, 13, 14]


def test_readers_during_removals_see_whole_segments_or_none(tmp_path: Path) -> None:
    store = SegmentStore.open(OsFileSystem(), str(tmp_path / "segments"), str(tmp_path / "quarantine"))
    wrong: list[str] = []
    done = threading.Event()

    def read() -> None:
        rng = random.Random(threading.get_ident())
        while not done.is_set():
            infos = store.infos()
            if not infos:
                continue
            seq = rng.choice(infos).seq
            try:
                if not store.read(seq, 1).equals(batch(seq, 1)):
                    wrong.append(f"segment {seq} is not what was written")
            except NotFound:
                continue
            except Exception as error:
                wrong.append(f"segment {seq}: {error!r}")

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    for seq in range(1, 21):
        store.write(sealed_of(batch(seq, 0), batch(seq, 1)), seq)
        if seq > 5:
            store.remove(seq - 5)
    done.set()
    for reader in readers:
        reader.join()
    assert wrong == []
