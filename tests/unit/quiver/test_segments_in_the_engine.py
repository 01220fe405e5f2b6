"""Segments in a complete Quiver: their numbers, notes from readers, copies, and scans."""

from __future__ import annotations

import pytest
from tests.unit.quiver.engine_doubles import CORE, PATH, StepClock, config, open_quiver, rows, take_all

from penstock.errors import PenstockError, Unavailable
from penstock.objects import named_memory_store
from penstock.quiver.engine import Quiver
from penstock.quiver.offsets.external import ExternalAck, commit_offset
from penstock.quiver.segments.source import LocalSegments, StoredSegments
from penstock.testing.disk import FakeDisk, Survival

pytestmark = pytest.mark.unit


def seqs(quiver: Quiver) -> list[int]:
    return [info.seq for info in quiver.core.store.infos()]


def settle(quiver: Quiver, clock: StepClock) -> None:
    """Run maintenance until acknowledgements are synced and unneeded segments are removed."""
    for _ in range(5):
        clock.step(0.2)
        quiver.maintain()


@pytest.mark.parametrize("how", ["crash", "close"])
def test_a_segment_that_was_never_written_leaves_no_gap_in_the_numbers(how: str) -> None:
    disk, clock = FakeDisk(), StepClock()
    quiver = open_quiver(disk, clock)
    quiver.register("lake")
    quiver.ingest(rows(0))
    quiver.flush()

    def refuse(*_: object) -> None:
        raise Unavailable("the disk is away")

    quiver.core.store.write = refuse  # type: ignore[method-assign, assignment]
    quiver.ingest(rows(10))
    clock.step(6)
    quiver.maintain()
    clock.step(61)
    quiver.maintain()
    if how == "close":
        try:
            quiver.close()
        except PenstockError:
            pass
    again = open_quiver(disk.crash(Survival.EVERYTHING), clock)
    again.flush()
    assert seqs(again) == [1, 2]
    assert take_all(again, "lake") == [(63, [0, 1, 2]), (63, [10, 11, 12])]


def test_a_note_registers_a_reader_and_keeps_and_releases_its_segments() -> None:
    disk, clock = FakeDisk(), StepClock()
    quiver = open_quiver(disk, clock)
    commit_offset(disk, CORE, ExternalAck(subscriber="lake", through=0))
    quiver.maintain()
    assert [each.name for each in quiver.subscribers()] == ["lake"]
    for first in (0, 10, 20):
        quiver.ingest(rows(first))
        quiver.flush()
    settle(quiver, clock)
    assert seqs(quiver) == [1, 2, 3]
    commit_offset(disk, CORE, ExternalAck(subscriber="lake", through=2))
    settle(quiver, clock)
    assert seqs(quiver) == [3]
    assert [info.seq for info in LocalSegments(PATH, disk).infos()] == [3]


def test_a_note_waits_while_no_process_has_the_directory_open() -> None:
    disk, clock = FakeDisk(), StepClock()
    quiver = open_quiver(disk, clock)
    quiver.register("lake")
    quiver.ingest(rows(0))
    quiver.ingest(rows(10))
    quiver.close()
    commit_offset(disk, CORE, ExternalAck(subscriber="lake", through=1))
    again = open_quiver(disk, clock)
    settle(again, clock)
    assert seqs(again) == []
    assert take_all(again, "lake") == []


def test_a_segment_stays_until_it_is_uploaded() -> None:
    disk, clock = FakeDisk(), StepClock()
    store = named_memory_store("quiver-engine-upload")
    quiver = open_quiver(disk, clock, config(upload={"store": "memory://quiver-engine-upload"}))
    quiver.register("lake")
    quiver.activate("lake")
    uploader = quiver.core.uploader
    assert uploader is not None
    upload = uploader.step
    uploader.step = lambda: False  # type: ignore[method-assign]
    quiver.ingest(rows(0))
    quiver.flush()
    bundle = quiver.next_bundle("lake")
    assert bundle is not None
    bundle.ack()
    settle(quiver, clock)
    assert seqs(quiver) == [1]
    uploader.step = upload  # type: ignore[method-assign]
    settle(quiver, clock)
    assert seqs(quiver) == []
    source = StoredSegments(store, "quiver")
    [info] = source.infos()
    assert source.reader(info).batch(0).column("n").to_pylist() == [0, 1, 2]
