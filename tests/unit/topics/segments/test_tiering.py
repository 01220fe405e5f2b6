"""The life of a segment from its first record to the cold tier and its removal."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.unit.topics.segments.segment_doubles import (
    TOPIC,
    Written,
    built_of,
    read_back,
    some_records,
    stored_parts,
)

from penstock.clock import SYSTEM_CLOCK
from penstock.errors import InvalidInput, Unavailable
from penstock.objects import LocalStore, MemoryStore
from penstock.storage.fs import OsFileSystem
from penstock.testing.faulty_store import FaultKind, FaultPlan, FaultyStore
from penstock.topics.errors import Damaged
from penstock.topics.segments.build import build
from penstock.topics.segments.columns import Columns
from penstock.topics.segments.format import HOLE, Part, SegmentEntry
from penstock.topics.segments.reader import SegmentViews
from penstock.topics.segments.store import LocalSegmentRoot, ObjectSegmentRoot, SegmentRoot
from penstock.topics.segments.tiering import Tiers, TopicTier, choose

COLD: dict[str, Callable[[Path], SegmentRoot]] = {
    "directory": lambda path: LocalSegmentRoot(OsFileSystem(), str(path / "cold")),
    "memory store": lambda _path: ObjectSegmentRoot(MemoryStore()),
    "directory store": lambda path: ObjectSegmentRoot(LocalStore(path / "cold")),
}


class Plant:
    """A topic with a hot and a cold tier."""

    def __init__(self, path: Path, cold: SegmentRoot) -> None:
        self.hot_root, self.cold_root = LocalSegmentRoot(OsFileSystem(), str(path / "hot")), cold
        self.tiers = Tiers(self.hot_root, cold)
        self.hot, self.cold = self.hot_root.topic(TOPIC), cold.topic(TOPIC)

    @property
    def tier(self) -> TopicTier:
        return self.tiers.topic(TOPIC)

    def sealed(self, records: list[Written], first_seq: int = 1) -> SegmentEntry:
        return self.tier.seal(self.tier.start(built_of(records, first_seq), created_ms=5))


@pytest.fixture(params=COLD)
def plant(request: pytest.FixtureRequest, tmp_path: Path) -> Plant:
    return Plant(tmp_path, COLD[request.param](tmp_path))


@pytest.fixture
def local(tmp_path: Path) -> Plant:
    return Plant(tmp_path, COLD["memory store"](tmp_path))


def test_a_segment_grows_with_every_append_and_reads_back_whole(local: Plant) -> None:
    records = some_records(12)
    entry = local.tier.start(built_of(records[:4]), created_ms=5)
    assert (entry.first_seq, entry.count, entry.end_seq, entry.created_ms) == (1, 4, 5, 5)
    for start in (4, 8):
        built = built_of(records[start : start + 4], 1 + start, entry.data_bytes)
        entry = local.tier.append(entry, built)
        assert read_back(local.tier.load(entry)) == records[: start + 4]
    assert not entry.sealed


def test_an_older_entry_of_a_grown_segment_still_reads_as_it_was(local: Plant) -> None:
    records = some_records(8)
    entry = local.tier.start(built_of(records[:4]), created_ms=5)
    local.tier.append(entry, built_of(records[4:], 5, entry.data_bytes))
    assert read_back(local.tier.load(entry)) == records[:4]


def test_only_the_following_records_are_appended(local: Plant) -> None:
    entry = local.tier.start(built_of(some_records(4)), created_ms=5)
    with pytest.raises(InvalidInput, match="do not continue"):
        local.tier.append(entry, built_of(some_records(1), 6, entry.data_bytes))
    with pytest.raises(InvalidInput, match="do not continue"):
        local.tier.append(local.tier.seal(entry), built_of(some_records(1), 5, entry.data_bytes))
    with pytest.raises(Damaged):
        local.tier.append(entry, built_of(some_records(1), 5, entry.data_bytes + 1))


def test_a_segment_whose_index_is_damaged_is_not_continued(local: Plant) -> None:
    entry = local.tier.start(built_of(some_records(4)), created_ms=5)
    path = Path(local.hot.directory) / "seg-0000000000000001.idx"
    path.write_bytes(path.read_bytes()[:-1] + b"\x07")
    before = stored_parts(local.hot, entry)
    with pytest.raises(Damaged):
        local.tier.append(entry, built_of(some_records(1), 5, entry.data_bytes))
    assert stored_parts(local.hot, entry) == before


def test_a_segment_of_holes_only_has_no_data_and_grows_all_the_same(local: Plant) -> None:
    rows = Columns(1)
    for _ in range(3):
        rows.append_row(0, 0, 0, 9, HOLE, 0)
    entry = local.tier.start(build(rows, lambda _file: memoryview(b"")), created_ms=5)
    assert read_back(local.tier.load(entry)) == [None] * 3
    entry = local.tier.append(entry, built_of(some_records(2), 4))
    assert read_back(local.tier.load(entry)) == [None] * 3 + some_records(2)


def test_sealing_writes_a_table_of_tags_if_there_are_tags(local: Plant) -> None:
    local.sealed([Written(b'{"d":1}')])
    assert not local.hot.exists(1, Part.TAGS)
    entry = local.sealed(some_records(9), 11)
    assert local.hot.exists(11, Part.TAGS)
    assert local.tier.load(entry).tags().seqs("tag-1").tolist() == [12, 18]


def test_tags_are_found_with_a_valid_a_damaged_or_no_table(local: Plant) -> None:
    entry = local.tier.start(built_of(some_records(9)), created_ms=5)
    expected = local.tier.load(entry).tags().seqs("tag-1").tolist()
    assert expected == [2, 8]
    entry = local.tier.seal(entry)
    for content in (None, b"", b"x" * 100, local.hot.view(1, Part.TAGS).tobytes()[:-1] + b"?"):
        if content is None:
            local.hot.delete(1, (Part.TAGS,))
        else:
            local.hot.replace(1, Part.TAGS, content)
        assert local.tier.load(entry).tags().seqs("tag-1").tolist() == expected
    assert len(local.tier.load(local.sealed([Written(b'{"d":1}')], 50)).tags()) == 0


def test_deletions_are_kept_and_only_grow(local: Plant) -> None:
    records = some_records(5)
    entry = local.sealed(records)
    first, second = np.array([0, 1, 0, 0, 0], bool), np.array([0, 1, 0, 1, 0], bool)
    assert local.tier.load(entry).deleted.tolist() == [False] * 5
    entry = local.tier.write_deleted(entry, first)
    assert entry.deleted == 1
    later = local.tier.write_deleted(entry, second)
    assert read_back(local.tier.load(later)) == [records[0], None, records[2], None, records[4]]
    assert local.tier.load(entry).deleted.tolist() == second.tolist()  # a newer file does no harm
    for wrong in (first, np.zeros(4, bool)):
        with pytest.raises(InvalidInput):
            local.tier.write_deleted(later, wrong)


def test_missing_deletions_are_damage_and_no_record_comes_back(local: Plant) -> None:
    entry = local.tier.write_deleted(local.sealed(some_records(5)), np.array([0, 1, 0, 1, 0], bool))
    older = msgspec.structs.replace(entry, deleted=1)
    local.tier.write_deleted(older, np.array([0, 1, 0, 0, 0], bool))
    with pytest.raises(Damaged, match="would come back"):
        local.tier.load(entry)
    local.hot.delete(1, (Part.DEL,))
    with pytest.raises(Damaged, match="del is missing"):
        local.tier.load(entry)


@pytest.mark.parametrize("part", [Part.DATA, Part.IDX])
def test_a_missing_or_short_file_is_damage_that_names_the_records(local: Plant, part: Part) -> None:
    entry = local.sealed(some_records(5), 11)
    content = local.hot.view(11, part).tobytes()
    for attempt in range(2):
        if attempt:
            local.hot.replace(11, part, content[:-1])
        else:
            local.hot.delete(11, (part,))
        with pytest.raises(Damaged) as caught:
            read_back(Tiers(local.hot_root).topic(TOPIC).load(entry))
        assert caught.value.detail is not None
        assert caught.value.detail["first_seq"] == 11


@pytest.mark.parametrize("part", [Part.DATA, Part.IDX, Part.DEL])
def test_a_flipped_bit_in_any_file_is_damage_and_never_a_wrong_record(local: Plant, part: Part) -> None:
    records = some_records(4)
    entry = local.tier.write_deleted(local.sealed(records), np.array([0, 1, 0, 0], bool))
    expected = [records[0], None, *records[2:]]
    raw = local.hot.view(1, part).tobytes()
    for bit in range(len(raw) * 8):
        changed = bytearray(raw)
        changed[bit // 8] ^= 1 << bit % 8
        local.hot.replace(1, part, changed)
        tier = Tiers(local.hot_root).topic(TOPIC)
        try:
            found = read_back(tier.load(entry))
        except Damaged:
            continue
        # The one deleted record is not read, so damage to it does no harm.
        assert part is Part.DATA
        assert found == expected
        start, size = (int(tier.load(entry).rows[1][name]) for name in ("offset", "length"))
        assert start * 8 <= bit < (start + size) * 8
    local.hot.replace(1, part, raw)
    assert read_back(Tiers(local.hot_root).topic(TOPIC).load(entry)) == expected


def test_a_segment_moves_to_the_cold_tier_and_reads_the_same(plant: Plant) -> None:
    records = some_records(20)
    entry = plant.tier.write_deleted(plant.sealed(records), np.arange(20) == 3)
    expected = [None if place == 3 else record for place, record in enumerate(records)]
    moved = plant.tier.relocate(entry)
    assert moved == msgspec.structs.replace(entry, cold=True)
    assert stored_parts(plant.hot, entry) == stored_parts(plant.cold, entry)
    for each in (entry, moved):
        assert read_back(plant.tier.load(each)) == expected
        assert plant.tier.resolve(each) is not None
    early = plant.tier.load(entry)
    for _ in range(2):
        plant.tier.drop_hot(moved)
        assert not plant.hot.exists(1, Part.DATA)
        assert read_back(plant.tier.load(moved)) == expected
    assert read_back(early) == expected  # opened before the move, read after it
    assert plant.tier.load(moved).tags().seqs("tag-1").tolist() == [2, 8, 14, 20]
    base, view = plant.tier.load(moved).read(4, 6)
    assert len(view) == sum(plant.tier.load(moved).rows["length"][4:6])
    assert base == int(plant.tier.load(moved).rows["offset"][4])


def test_a_start_and_a_delete_need_no_cold_file(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = plant.tier.relocate(plant.sealed(some_records(6)))
    plant.tier.drop_hot(entry)
    without_cold = Tiers(plant.hot_root).topic(TOPIC)
    segment = without_cold.load(entry)
    assert len(segment.rows) == 6
    assert segment.tags().records == 3
    entry = without_cold.write_deleted(entry, np.arange(6) == 0)
    with pytest.raises(Damaged, match="data is missing"):
        segment.read(0, 6)
    assert read_back(plant.tier.load(entry)) == [None, *some_records(6)[1:]]


def test_the_cold_tier_alone_is_enough_to_read(plant: Plant) -> None:
    entry = plant.tier.relocate(plant.tier.write_deleted(plant.sealed(some_records(6)), np.arange(6) == 0))
    plant.hot.delete(1)
    assert read_back(plant.tier.load(entry)) == [None, *some_records(6)[1:]]


def test_moving_may_be_repeated_at_every_step(plant: Plant) -> None:
    records = some_records(6)
    entry = plant.sealed(records)
    moved = plant.tier.relocate(entry)
    entry = plant.tier.write_deleted(entry, np.arange(6) == 2)
    moved = plant.tier.relocate(entry)
    assert moved.deleted == 1
    plant.tier.drop_hot(moved)
    plant.tier.drop_hot(moved)
    assert read_back(plant.tier.load(moved)) == [*records[:2], None, *records[3:]]


def test_hot_data_stays_until_the_cold_copy_is_complete(plant: Plant) -> None:
    entry = plant.sealed(some_records(6))
    moved = msgspec.structs.replace(entry, cold=True)
    with pytest.raises(Damaged, match="missing"):
        plant.tier.drop_hot(moved)
    plant.tier.relocate(entry)
    plant.cold.replace(1, Part.DATA, b"cut")
    with pytest.raises(Damaged, match="has 3 bytes"):
        plant.tier.drop_hot(moved)
    assert read_back(plant.tier.load(moved)) == some_records(6)


def test_only_sealed_segments_move_and_only_cold_ones_are_dropped(local: Plant) -> None:
    entry = local.tier.start(built_of(some_records(3)), created_ms=5)
    with pytest.raises(InvalidInput, match="only a sealed"):
        local.tier.relocate(entry)
    with pytest.raises(InvalidInput, match="would be lost"):
        local.tier.drop_hot(entry)
    sealed = local.tier.seal(entry)
    with pytest.raises(InvalidInput, match="no cold tier"):
        Tiers(local.hot_root).topic(TOPIC).relocate(sealed)


def test_a_damaged_index_is_not_copied_over_a_good_one(local: Plant) -> None:
    entry = local.sealed(some_records(3))
    local.tier.relocate(entry)
    good = stored_parts(local.cold, entry)
    local.hot.replace(1, Part.IDX, bytes(60))
    with pytest.raises(Damaged):
        local.tier.relocate(entry)
    assert stored_parts(local.cold, entry) == good


def test_a_cold_tier_that_does_not_respond_is_unavailable_and_not_damaged(tmp_path: Path) -> None:
    memory = MemoryStore()
    plant = Plant(tmp_path, ObjectSegmentRoot(memory))
    entry = plant.tier.relocate(plant.sealed(some_records(3)))
    plant.tier.drop_hot(entry)
    plan = FaultPlan(script={0: FaultKind.FAILED_BEFORE, 1: FaultKind.TRUNCATED})
    faulty = FaultyStore(memory, clock=SYSTEM_CLOCK, rng=random.Random(1), plan=plan)
    segment = Plant(tmp_path, ObjectSegmentRoot(faulty)).tier.load(entry)
    for _ in range(2):
        with pytest.raises(Unavailable):
            segment.read(0, 3)
    assert read_back(segment) == some_records(3)


def test_a_dead_segment_is_removed_from_both_tiers(plant: Plant) -> None:
    entry = plant.tier.relocate(plant.sealed(some_records(3)))
    for _ in range(2):
        plant.tier.delete(entry.first_seq)
        assert (plant.hot.list(), plant.cold.list()) == ([], [])
    plant.sealed(some_records(3))
    plant.tiers.remove_topic(TOPIC)
    assert plant.hot.list() == []


def test_leftovers_of_a_crash_are_removed_and_nothing_else(plant: Plant) -> None:
    kept, orphan = plant.sealed(some_records(3)), plant.sealed(some_records(3), 4)
    plant.tier.relocate(orphan)
    moved = plant.tier.relocate(plant.sealed(some_records(3), 7))
    other = Plant.sealed(plant, some_records(3), 10)
    plant.tiers.topic(99).start(built_of(some_records(1)), created_ms=1)
    stray = Path(plant.hot.directory) / "seg-0000000000000001.del.tmp"
    stray.write_bytes(b"torn")
    for attempt in range(2):
        done = plant.tiers.tidy({TOPIC: [kept, moved, other]}, plant.tiers.stored())
        assert done.failed == []
        assert done.removed == (0 if attempt else 4)
        assert (plant.hot.list(), plant.cold.list()) == ([1, 7, 10], [7])
        assert set(plant.hot_root.scan().topics) == {TOPIC}
        assert not plant.hot.exists(7, Part.DATA)
        assert not stray.exists()
        for entry in (kept, moved, other):
            assert read_back(plant.tier.load(entry)) == some_records(3)


def test_a_failed_removal_does_not_prevent_the_others(local: Plant) -> None:
    moved = msgspec.structs.replace(local.sealed(some_records(3)), cold=True)
    local.sealed(some_records(3), 4)
    done = local.tiers.tidy({TOPIC: [moved]}, local.tiers.stored())
    assert (done.removed, len(done.failed)) == (1, 1)
    assert read_back(local.tier.load(moved)) == some_records(3)


def entries(*sizes: int, cold: int = 0) -> list[SegmentEntry]:
    """Return sealed segments of these sizes, the first `cold` of them cold, and an active one."""
    made = [
        SegmentEntry(
            first_seq=1 + place,
            count=1,
            data_bytes=size,
            sealed=True,
            cold=place < cold,
            created_ms=0,
            idx_xxh3=0,
        )
        for place, size in enumerate(sizes)
    ]
    active = msgspec.structs.replace(made[0], first_seq=100, sealed=False, cold=False, data_bytes=10**9)
    return [*made, active]


@pytest.mark.parametrize(
    ("segments", "retain_segments", "retain_bytes", "moving"),
    [
        (entries(10, 10, 10), 4, 0, []),
        (entries(10, 10, 10), 3, 0, []),
        (entries(10, 10, 10), 2, 0, [1]),
        (entries(10, 10, 10), 0, 0, [1, 2, 3]),
        (entries(10, 10, 10), 4, 30, []),
        (entries(10, 10, 10), 4, 29, [1]),
        (entries(10, 10, 10), 4, 1, [1, 2, 3]),
        (entries(10, 10, 10), 1, 30, [1, 2]),
        (entries(10, 10, 10, cold=1), 1, 0, [2]),
        (entries(10, 10, 10, cold=1), 2, 0, []),
    ],
)
def test_the_oldest_sealed_segments_move_and_the_stricter_bound_wins(
    segments: list[SegmentEntry], retain_segments: int, retain_bytes: int, moving: list[int]
) -> None:
    chosen = choose(segments[::-1], retain_segments=retain_segments, retain_bytes=retain_bytes)
    assert [entry.first_seq for entry in chosen] == moving


def test_the_number_of_open_files_is_limited_and_used_ones_stay() -> None:
    views, opened = SegmentViews(views_max=2), []

    def get(name: str) -> None:
        views.get((name, 1), 4, lambda: opened.append(name) or memoryview(b"data"))

    for name in ("a", "b", "a", "c", "a", "b"):
        get(name)
    assert opened == ["a", "b", "c", "b"]
    assert len(views) == 2
    views.forget(("b", 1))
    views.forget(("b", 1))
    get("b")
    assert opened[-2:] == ["b", "b"]


def test_a_view_that_has_become_too_short_is_opened_again() -> None:
    views = SegmentViews()
    views.get(("a", 1), 1, lambda: memoryview(b"x"))
    assert views.get(("a", 1), 2, lambda: memoryview(b"xy")) == b"xy"


def test_a_cold_segment_is_never_mapped_as_a_whole(plant: Plant) -> None:
    entry = plant.tier.relocate(plant.sealed(some_records(3)))
    plant.tier.drop_hot(entry)
    with pytest.raises(Damaged, match="data is missing"):
        plant.tier.load(entry).data()


def test_a_segment_that_is_in_neither_tier_is_damage(plant: Plant) -> None:
    entry = plant.tier.relocate(plant.sealed(some_records(3)))
    plant.tier.drop_hot(entry)
    plant.cold.delete(1)
    with pytest.raises(Damaged, match="data is missing"):
        plant.tier.load(entry).read(0, 3)


def test_an_unreadable_record_does_not_keep_a_segment_open(local: Plant) -> None:
    entry = local.tier.start(built_of(some_records(4)), created_ms=5)
    data = bytearray(local.hot.view(1, Part.DATA))
    data[int(built_of(some_records(4)).rows["offset"][1]) + 30] ^= 1
    local.hot.replace(1, Part.DATA, data)
    sealed = local.tier.seal(entry)
    assert sealed.sealed
    assert not local.hot.exists(1, Part.TAGS)
    with pytest.raises(Damaged, match="record 2 cannot be read"):
        local.tier.load(sealed).tags()


@pytest.mark.parametrize("kind", [FaultKind.FAILED_BEFORE, FaultKind.APPLIED_THEN_LOST, FaultKind.THROTTLED])
def test_a_fault_at_any_call_to_the_cold_store_only_causes_a_retry(tmp_path: Path, kind: FaultKind) -> None:
    records, struck = some_records(6), 0
    for call in range(10):
        plan = FaultPlan.at(call, kind)
        faulty = FaultyStore(MemoryStore(), clock=SYSTEM_CLOCK, rng=random.Random(call), plan=plan)
        plant = Plant(tmp_path / str(call), ObjectSegmentRoot(faulty))
        entry = plant.tier.write_deleted(plant.sealed(records), np.arange(6) == 0)
        steps: list[Callable[[], object]] = [
            lambda plant=plant, entry=entry: plant.tier.relocate(entry),
            lambda plant=plant, entry=entry: plant.tier.drop_hot(msgspec.structs.replace(entry, cold=True)),
        ]
        for step in steps:
            try:
                step()
            except Unavailable:
                assert read_back(plant.tier.load(entry)) == [None, *records[1:]]
                step()
        moved = msgspec.structs.replace(entry, cold=True)
        assert not plant.hot.exists(1, Part.DATA)
        plan.quiet()
        assert read_back(plant.tier.load(moved)) == [None, *records[1:]]
        plan.resume()
        try:
            plant.tier.delete(1)
        except Unavailable:
            assert plant.hot.list() == [1]
            plant.tier.delete(1)
        assert plant.hot.list() == []
        struck += plan.injected.total()
    assert struck >= 5  # four writes and a removal; the other calls depend on the kind of fault
    assert not plan.injected
