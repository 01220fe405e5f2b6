"""A fault at every file call of the local store, and a power cut at every instant.

The writer below does everything the store offers, one step after the other, and records the answers.
Whatever fails and whenever the power goes, afterwards every object is in a state that the notes allow.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from penstock.errors import Conflict, NotFound, OutcomeUnknown, PenstockError, StorageFull, Unavailable
from penstock.objects import Version
from penstock.objects.directory import ObjectDirectory
from penstock.storage.fs import FileSystem
from penstock.testing.clock import ManualClock
from penstock.testing.disk import DiskFault, FakeDisk, PlannedFault, PowerCut, Survival

pytestmark = pytest.mark.crash

ROOT = "/data/store"
ABSENT = None
SEEDS = range(12)


@dataclass
class Notes:
    """Per key: the states that the object may be in, given the answers to the writer."""

    allowed: dict[str, set[bytes | None]] = field(default_factory=dict)

    def told(self, key: str, state: bytes | None) -> None:
        self.allowed[key] = {state}

    def open(self, key: str, state: bytes | None) -> None:
        self.allowed.setdefault(key, {ABSENT}).add(state)


def directory(disk: FileSystem) -> ObjectDirectory:
    return ObjectDirectory(ROOT, fs=disk, clock=ManualClock())


def attempt(
    notes: Notes, key: str, new: bytes | None, call: Callable[[], object], *, plain: bool = False
) -> None:
    """Run one write; what it may have done stays open until it is known."""
    before = set(notes.allowed.get(key, {ABSENT}))
    notes.open(key, new)
    try:
        call()
    except OutcomeUnknown:
        return
    except PenstockError as error:
        if not (plain and isinstance(error, Unavailable)):
            notes.allowed[key] = before
        return
    notes.told(key, new)


def look(notes: Notes, store: ObjectDirectory, key: str) -> Version | None:
    """What a read returned must be there for good."""
    try:
        blob = store.get(key)
    except PenstockError:
        return None
    assert bytes(blob.data) in notes.allowed[key], f"read {bytes(blob.data)!r}"
    notes.told(key, bytes(blob.data))
    return blob.version


def work(disk: FakeDisk, notes: Notes) -> None:
    store = directory(disk)
    attempt(notes, "a/b/data", b"plain" * 40, lambda: store.put("a/b/data", [b"plain" * 40]), plain=True)
    attempt(notes, "a/m", b"1" * 64, lambda: store.put_if_absent("a/m", b"1" * 64))
    for content in (b"2" * 65, b"3" * 66):
        version = look(notes, store, "a/m")
        if version is not None:
            attempt(notes, "a/m", content, lambda c=content, v=version: store.put_if_match("a/m", c, v))
    attempt(notes, "a/m", b"never", lambda: store.put_if_match("a/m", b"never", Version(etag="stale")))
    attempt(notes, "a/b/data", b"again", lambda: store.put("a/b/data", b"again"), plain=True)
    attempt(notes, "top", b"x", lambda: store.put("top", b"x"), plain=True)
    attempt(notes, "top", ABSENT, lambda: _delete(store, "top"), plain=True)
    look(notes, store, "a/m")


def _delete(store: ObjectDirectory, key: str) -> None:
    for error in store.delete_many([key]).values():
        raise Unavailable(str(error)) from error


def verify(disk: FakeDisk, notes: Notes, why: str) -> None:
    store = directory(disk)
    for key, states in notes.allowed.items():
        try:
            found: bytes | None = bytes(store.get(key).data)
        except NotFound:
            found = ABSENT
        assert found in states, f"{why}: {key} is {found!r}, expected one of {states!r}"
    # The store keeps working, whatever was left behind.
    version = store.put("after/crash", b"alive")
    assert store.put_if_match("after/crash", b"still", version)
    assert bytes(store.get("after/crash").data) == b"still"
    assert {info.key for info in store.list("")} <= {*notes.allowed, "after/crash"}


def cuts(disk: FakeDisk) -> Iterator[tuple[str, FakeDisk]]:
    yield "nothing survived", disk.crash(Survival.NOTHING)
    yield "everything survived", disk.crash(Survival.EVERYTHING)
    for seed in SEEDS:
        yield f"seed {seed}", disk.crash(Survival.RANDOM, random.Random(seed))


def count_calls() -> int:
    disk = FakeDisk(clock=ManualClock())
    work(disk, Notes())
    return len(disk.calls)


CALLS = count_calls()


def test_the_sweep_covers_every_kind_of_call() -> None:
    disk = FakeDisk(clock=ManualClock())
    work(disk, Notes())
    assert {
        "create",
        "write",
        "datasync",
        "rename",
        "sync_dir",
        "unlink",
        "mkdir",
        "lock",
        "read",
        "list",
    } == set(disk.calls)
    assert len(disk.calls) > 60


@pytest.mark.parametrize("kind", DiskFault)
def test_a_fault_at_any_file_call_loses_and_invents_nothing(kind: DiskFault) -> None:
    for call in range(CALLS + 1):
        disk, notes = FakeDisk(plan=PlannedFault(call=call, kind=kind), clock=ManualClock()), Notes()
        try:
            work(disk, notes)
        except PowerCut:
            assert kind in (DiskFault.CRASH_BEFORE, DiskFault.CRASH_AFTER)
        for how, after in cuts(disk):
            verify(after, notes, f"{kind.name} at call {call}, {how}")


@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize("kind", [DiskFault.FAIL_ONCE, DiskFault.NO_SPACE, DiskFault.SHORT_WRITE])
def test_a_failed_write_leaves_no_staging_file(kind: DiskFault, conditional: bool) -> None:
    for call in itertools.count():
        disk = FakeDisk(clock=ManualClock())
        version = directory(disk).put("k", b"old")
        struck = len(disk.calls) + call
        disk.plan = PlannedFault(call=struck, kind=kind)
        outcome = _outcome(disk, version if conditional else None)
        disk.plan = None
        if outcome != "unknown" and disk.calls[struck : struck + 1] != ["rename"]:
            assert disk.list_files(f"{ROOT}/.penstock/staging") == [], f"call {call}"
        if len(disk.calls) <= struck + 1:
            break


def test_a_full_disk_is_reported_as_such_and_keeps_the_old_object() -> None:
    disk = FakeDisk(clock=ManualClock())
    version = directory(disk).put("k", b"old")
    disk.plan = PlannedFault(call=0, kind=DiskFault.NO_SPACE)
    with pytest.raises(StorageFull, match="free space"):
        directory(disk).put_if_match("k", b"new", version)
    with pytest.raises(StorageFull):
        directory(disk).put("k", b"new")
    disk.plan = None
    assert bytes(directory(disk).get("k").data) == b"old"
    assert directory(disk).put_if_match("k", b"new", version)


@pytest.mark.parametrize("conditional", [False, True])
def test_a_write_is_durable_also_in_folders_that_a_dead_process_made(conditional: bool) -> None:
    for call in range(20):
        disk = FakeDisk(clock=ManualClock(), plan=PlannedFault(call=call, kind=DiskFault.FAIL_ALWAYS))
        with contextlib.suppress(PenstockError):
            directory(disk).put("a/b/other", b"x")
        disk.plan = None
        if conditional:
            directory(disk).put_if_absent("a/b/k", b"told")
        else:
            directory(disk).put("a/b/k", b"told")
        after = disk.crash(Survival.NOTHING)
        assert bytes(directory(after).get("a/b/k").data) == b"told", f"call {call}"


def test_replacing_a_foreign_file_makes_its_folder_durable_too() -> None:
    version = directory(FakeDisk(clock=ManualClock())).put("k", b"foreign")
    disk = FakeDisk(clock=ManualClock())
    directory(disk).put("k", b"x")
    folder = disk._dir(ROOT)
    folder.visible["made"] = type(folder)()  # by a program that syncs nothing
    disk.create(f"{ROOT}/made/k").write([b"foreign"])
    directory(disk).put_if_match("made/k", b"ours", version)
    assert bytes(directory(disk.crash(Survival.NOTHING)).get("made/k").data) == b"ours"


def test_staging_files_of_killed_writers_are_swept_after_an_hour() -> None:
    clock = ManualClock()
    disk = FakeDisk(clock=clock)
    directory(disk).put("k", b"old")
    disk.create(f"{ROOT}/.penstock/staging/left").close()
    ObjectDirectory(ROOT, fs=disk, clock=clock).put("k", b"new")
    assert [name for name, _ in disk.list_files(f"{ROOT}/.penstock/staging")] == ["left"]
    later = ManualClock(start_ms=clock.now_ms() + 3_600_001)
    ObjectDirectory(ROOT, fs=disk, clock=later).put("k", b"newer")
    assert disk.list_files(f"{ROOT}/.penstock/staging") == []


def _outcome(disk: FakeDisk, version: Version | None) -> str:
    try:
        if version is None:
            directory(disk).put("k", b"new")
        else:
            directory(disk).put_if_match("k", b"new", version)
    except OutcomeUnknown:
        return "unknown"
    except Conflict:
        raise
    except PenstockError:
        return "failed"
    return "won"


def test_a_failed_directory_sync_leaves_the_outcome_of_a_conditional_write_unknown() -> None:
    seen: set[str] = set()
    base = FakeDisk(clock=ManualClock())
    version = directory(base).put("k", b"old")
    first = len(base.calls)
    for call in range(30):
        disk = FakeDisk(clock=ManualClock())
        directory(disk).put("k", b"old")
        disk.plan = PlannedFault(call=first + call, kind=DiskFault.FAIL_ONCE)
        outcome = _outcome(disk, version)
        if len(disk.calls) > first + call:
            seen.add(f"{disk.calls[first + call]} {outcome}")
    assert "sync_dir unknown" in seen
    assert "datasync failed" in seen
    assert "datasync unknown" not in seen
    assert "lock failed" in seen


def test_what_was_read_once_is_there_after_a_power_cut() -> None:
    number = _number_of_the_sync_after_the_rename()
    disk = FakeDisk(clock=ManualClock())
    version = directory(disk).put("q/manifest", b"old")
    # A writer that dies between its rename and its directory sync.
    disk.plan = PlannedFault(call=number, kind=DiskFault.FAIL_ONCE)
    with pytest.raises(OutcomeUnknown):
        directory(disk).put_if_match("q/manifest", b"new", version)
    assert bytes(directory(disk).get("q/manifest").data) == b"new"
    assert bytes(directory(disk.crash(Survival.NOTHING)).get("q/manifest").data) == b"new"


def test_what_refused_a_create_once_is_there_after_a_power_cut() -> None:
    disk = FakeDisk(clock=ManualClock())
    directory(disk).put("other/k", b"x")
    first = len(disk.calls)
    directory(disk).put_if_absent("q/k", b"x")
    number = disk.calls.index("sync_dir", disk.calls.index("rename", first))
    disk = FakeDisk(clock=ManualClock())
    directory(disk).put("other/k", b"x")
    disk.plan = PlannedFault(call=number, kind=DiskFault.FAIL_ONCE)
    with pytest.raises(OutcomeUnknown):
        directory(disk).put_if_absent("q/k", b"x")
    with pytest.raises(Conflict):
        directory(disk).put_if_absent("q/k", b"y")
    assert bytes(directory(disk.crash(Survival.NOTHING)).get("q/k").data) == b"x"


def _number_of_the_sync_after_the_rename() -> int:
    disk = FakeDisk(clock=ManualClock())
    version = directory(disk).put("q/manifest", b"old")
    first = len(disk.calls)
    directory(disk).put_if_match("q/manifest", b"new", version)
    return disk.calls.index("sync_dir", disk.calls.index("rename", first))
