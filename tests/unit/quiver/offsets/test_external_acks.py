"""The ack inbox: notes are complete, never go back, and are read once per change."""

from __future__ import annotations

import pytest

from penstock.errors import InvalidInput
from penstock.quiver.offsets.external import ExternalAck, ExternalAcks, commit_offset, read_external_ack
from penstock.testing.disk import DiskFault, FakeDisk, PlannedFault, PowerCut, Survival

pytestmark = pytest.mark.unit

CORE = "/q/core_0"
BOX = f"{CORE}/ack/inbox"


def note(through: int, subscriber: str = "spark") -> ExternalAck:
    return ExternalAck(subscriber=subscriber, through=through)


def test_an_empty_directory_has_no_notes() -> None:
    disk = FakeDisk()
    assert ExternalAcks(disk, CORE).take() == []
    assert read_external_ack(disk, CORE, "spark") is None


def test_a_note_is_read_once_per_change() -> None:
    disk = FakeDisk()
    inbox = ExternalAcks(disk, CORE)
    commit_offset(disk, CORE, note(0))
    commit_offset(disk, CORE, note(4, "audit"))
    assert inbox.take() == [note(4, "audit"), note(0)]
    assert inbox.take() == []
    commit_offset(disk, CORE, note(3))
    assert inbox.take() == [note(3)]


def test_after_a_start_every_note_is_read_again() -> None:
    disk = FakeDisk()
    commit_offset(disk, CORE, note(3))
    ExternalAcks(disk, CORE).take()
    assert ExternalAcks(disk, CORE).take() == [note(3)]


def test_a_note_never_lowers_an_earlier_offset() -> None:
    disk = FakeDisk()
    commit_offset(disk, CORE, note(7))
    commit_offset(disk, CORE, note(3))
    assert read_external_ack(disk, CORE, "spark") == note(7)


def test_a_name_that_is_not_a_subscriber_name_is_refused() -> None:
    for name in ("../evil", "", "a" * 65, "con"):
        with pytest.raises(InvalidInput):
            commit_offset(FakeDisk(), CORE, note(1, name))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b'{"format":"quiver-ack-inbox/1","subscriber":"spark","through":-1}',
        b'{"format":"quiver-ack-inbox/1","subscriber":"other","through":1}',
        b'{"format":"quiver-ack-inbox/2","subscriber":"spark","through":1}',
        b'{"format":"quiver-ack-inbox/1","subscriber":"spark","through":"x"}',
        b"x" * 5000,
    ],
)
def test_an_unreadable_note_is_skipped(text: bytes) -> None:
    disk = FakeDisk()
    disk.make_dirs(BOX)
    disk.create(f"{BOX}/spark.json").write([text])
    disk.create(f"{BOX}/not a name.json").write([b"{}"])
    inbox = ExternalAcks(disk, CORE)
    assert inbox.take() == []
    commit_offset(disk, CORE, note(2))
    assert inbox.take() == [note(2)]


@pytest.mark.parametrize("survival", [Survival.NOTHING, Survival.EVERYTHING])
def test_a_crash_at_any_call_leaves_the_old_note_or_the_new_one(survival: Survival) -> None:
    for call in range(40):
        disk = FakeDisk()
        commit_offset(disk, CORE, note(1))
        disk.plan = PlannedFault(call=len(disk.calls) + call, kind=DiskFault.CRASH_BEFORE)
        done = False
        try:
            commit_offset(disk, CORE, note(2))
            done = True
        except PowerCut:
            pass
        after = disk.crash(survival)
        assert ExternalAcks(after, CORE).take() in ([[note(2)]] if done else [[note(1)], [note(2)]])
        if done:
            return
    raise AssertionError("the sweep never reached the end")
