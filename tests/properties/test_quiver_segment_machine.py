"""Segments under random work, crashes and damage, compared with a dictionary, and files of random bytes."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.unit.quiver.bundles import batch, sealed_of

from penstock.errors import Corrupt, NotFound, PenstockError, Rejected
from penstock.quiver.segments.file import SegmentReader, unify
from penstock.quiver.segments.metadata import arrow_name, decode_meta, meta_name
from penstock.quiver.segments.recovery import DamageAction
from penstock.quiver.segments.store import SegmentStore
from penstock.quiver.wal.payload import fingerprint
from penstock.testing.clock import ManualClock
from penstock.testing.disk import DiskFault, FakeDisk, PlannedFault, PowerCut, Survival

pytestmark = pytest.mark.properties

SEGMENTS, QUARANTINE = "/q/segments", "/q/quarantine"


class SegmentMachine(RuleBasedStateMachine):
    """`model` is the required content; `maybe` is what a crash may have kept or lost."""

    @initialize()
    def start(self) -> None:
        self.disk = FakeDisk(clock=ManualClock())
        self.store = SegmentStore.open(self.disk, SEGMENTS, QUARANTINE)
        self.model: dict[int, list[list[int]]] = {}
        self.next_seq = 1

    @rule(rows=st.lists(st.lists(st.integers(-5, 5), max_size=4), min_size=1, max_size=4))
    def write(self, rows: list[list[int]]) -> None:
        self.store.write(sealed_of(*[batch(*values) for values in rows]), self.next_seq)
        self.model[self.next_seq] = rows
        self.next_seq += 1

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        seqs = data.draw(st.lists(st.sampled_from(sorted(self.model)), unique=True, max_size=3))
        self.store.remove(*seqs)
        for seq in seqs:
            del self.model[seq]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def set_aside(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(sorted(self.model)))
        self.store.quarantine(seq, "as a test")
        del self.model[seq]

    @rule(
        call=st.integers(0, 20),
        survival=st.sampled_from(list(Survival)),
        seed=st.integers(0, 9),
        rows=st.lists(st.lists(st.integers(-5, 5), max_size=3), min_size=1, max_size=2),
    )
    def crash_in_a_write(self, call: int, survival: Survival, seed: int, rows: list[list[int]]) -> None:
        self.disk.plan = PlannedFault(call=len(self.disk.calls) + call, kind=DiskFault.CRASH_BEFORE)
        try:
            self.store.write(sealed_of(*[batch(*values) for values in rows]), self.next_seq)
            self.model[self.next_seq] = rows
        except PowerCut:
            pass
        self.restart(survival, seed)
        if self.next_seq not in self.model and self.next_seq in {info.seq for info in self.store.infos()}:
            self.model[self.next_seq] = rows
        self.next_seq = max(self.next_seq, self.store.highest_seq) + 1
        assert self.store.damage == []

    @rule(survival=st.sampled_from(list(Survival)), seed=st.integers(0, 9))
    def crash(self, survival: Survival, seed: int) -> None:
        self.restart(survival, seed)
        assert self.store.damage == []

    @precondition(lambda self: self.model)
    @rule(data=st.data(), in_sidecar=st.booleans())
    def flip_a_bit(self, data: st.DataObject, in_sidecar: bool) -> None:
        seq = data.draw(st.sampled_from(sorted(self.model)))
        path = f"{SEGMENTS}/{meta_name(seq) if in_sidecar else arrow_name(seq)}"
        content = bytearray(self.disk.read(path))
        content[data.draw(st.integers(0, len(content) - 2))] ^= 1 << data.draw(st.integers(0, 7))
        self.disk.unlink(path)
        file = self.disk.create(path)
        file.write([bytes(content)])
        file.datasync()
        self.disk.sync_dir(SEGMENTS)
        self.store = SegmentStore.open(self.disk, SEGMENTS, QUARANTINE, verify="full")
        [found] = self.store.damage
        assert found.seq == seq
        if found.action is DamageAction.QUARANTINED:
            del self.model[seq]
        else:
            assert in_sidecar

    def restart(self, survival: Survival, seed: int) -> None:
        self.disk = self.disk.crash(survival, random.Random(seed))
        self.store = SegmentStore.open(self.disk, SEGMENTS, QUARANTINE)

    @invariant()
    def everything_is_there_and_nothing_else(self) -> None:
        if not hasattr(self, "store"):
            return
        assert [info.seq for info in self.store.infos()] == sorted(self.model)
        for seq, rows in self.model.items():
            assert [each["n"].to_pylist() for each in self.store.batches(seq)] == rows
        sizes = {name: stat.size for name, stat in self.disk.list_files(SEGMENTS)}
        assert self.store.byte_count == sum(sizes.values())
        assert self.store.highest_seq < self.next_seq or self.store.highest_seq == self.next_seq - 1


SegmentMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)
test_segments_hold_what_was_committed = SegmentMachine.TestCase


def a_file() -> bytes:
    disk = FakeDisk(clock=ManualClock())
    store = SegmentStore.open(disk, SEGMENTS, QUARANTINE)
    store.write(sealed_of(batch(1, 2, 3), batch(4)), 1)
    return disk.read(f"{SEGMENTS}/{arrow_name(1)}")


FILE = a_file()


@settings(max_examples=300, deadline=None)
@given(
    place=st.integers(0, len(FILE) - 1),
    junk=st.binary(min_size=1, max_size=16),
    cut=st.integers(0, len(FILE)),
)
def test_a_file_whose_checksum_is_unknown_is_read_or_refused_and_nothing_else(
    place: int, junk: bytes, cut: int
) -> None:
    content = (FILE[:place] + junk + FILE[place + len(junk) :])[: cut or None]
    disk = FakeDisk(clock=ManualClock())
    SegmentStore.open(disk, SEGMENTS, QUARANTINE)
    disk.create(f"{SEGMENTS}/{arrow_name(1)}").write([content])
    store = SegmentStore.open(disk, SEGMENTS, QUARANTINE, rebuild=True)
    for info in store.infos():
        for bundle in store.batches(info.seq):
            bundle.validate(full=True)


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=300))
def test_random_bytes_are_neither_a_segment_nor_a_sidecar(data: bytes) -> None:
    with pytest.raises(PenstockError) as caught:
        SegmentReader(data, "random")
    assert isinstance(caught.value, Corrupt)
    with pytest.raises((Corrupt, Rejected, NotFound)):
        decode_meta(data, "random")


TEXTS = st.lists(st.one_of(st.none(), st.text(max_size=3)), max_size=6)


@settings(max_examples=100, deadline=None)
@given(columns=st.lists(TEXTS, min_size=1, max_size=5), nested=st.booleans())
def test_joined_dictionaries_keep_every_value_and_every_boundary(
    columns: list[list[str | None]], nested: bool
) -> None:
    arrays = [pa.array(values, pa.string()).dictionary_encode() for values in columns]
    if nested:
        arrays = [pa.StructArray.from_arrays([array], ["x"]) for array in arrays]
    batches = [pa.record_batch({"c": array}) for array in arrays]
    unified = unify(batches)
    assert [each.to_pylist() for each in unified] == [each.to_pylist() for each in batches]
    assert fingerprint(unified[0].schema) == fingerprint(batches[0].schema)
