"""Flipped bits in the ack log and in checkpoints: lost acks cause redelivery, and nothing is skipped."""

from __future__ import annotations

import pytest
from tests.unit.quiver.ack_doubles import CORE, Core

from penstock.errors import Corrupt, PenstockError
from penstock.quiver.model import BundleRef
from penstock.quiver.offsets.checkpoint import (
    CheckpointEntry,
    CheckpointState,
    decode_checkpoint,
    encode_checkpoint,
)
from penstock.quiver.offsets.log_files import HEADER_BYTES, decode_header, encode_header
from penstock.quiver.offsets.records import (
    RECORD_BYTES,
    NamePart,
    OffsetRecord,
    Outcome,
    RecordKind,
    decode_record,
    decode_records,
    encode_record,
    name_parts,
)
from penstock.testing.disk import DiskFault, FakeDisk, PlannedFault, Survival

LOG = f"{CORE}/ack/ack.log"
CHECKPOINT = f"{CORE}/meta/checkpoint"
BUNDLES = 6


def flip(disk: FakeDisk, path: str, bit: int) -> None:
    data = bytearray(disk.read(path))
    data[bit >> 3] ^= 1 << (bit & 7)
    disk.unlink(path)
    file = disk.create(path)
    file.write([bytes(data)])
    file.datasync()
    disk.sync_dir(path.rpartition("/")[0])


def written() -> Core:
    """Return a core with two subscribers and a few acks in its log."""
    core = Core().open()
    core.subscribe("a", "b")
    core.add(1, bundles=BUNDLES)
    core.ack("a", 1, 0, 2)
    core.ack("b", 1, 1)
    core.offsets.sync()
    return core


def resolved(core: Core, name: str) -> set[int]:
    return {
        bundle
        for bundle in range(BUNDLES)
        if core.offsets.state.entry(name).progress.is_resolved(BundleRef(1, bundle))
    }


def test_a_flipped_bit_anywhere_in_the_log_skips_nothing() -> None:
    base = written()
    size = base.disk.stat(LOG).size
    for bit in range(0, size * 8, 7):
        core = written()
        flip(core.disk, LOG, bit)
        after = core.crashed()
        for name, acked in (("a", {0, 2}), ("b", {1})):
            if name in after.offsets.names():
                assert resolved(after, name) <= acked
        assert after.offsets.state.next_segment_seq >= 2
        if bit >= HEADER_BYTES * 8 and bit < (size - RECORD_BYTES) * 8:
            assert after.offsets.damage, f"bit {bit} was not detected"


def test_only_the_flipped_record_is_lost_reported_and_kept_as_evidence() -> None:
    core = written()
    size = core.disk.stat(LOG).size
    flip(core.disk, LOG, (size - 3 * RECORD_BYTES + 10) * 8)
    after = core.crashed()
    assert (resolved(after, "a"), resolved(after, "b")) == ({2}, {1})
    assert any("cannot be read" in text for text in after.offsets.damage)
    assert any(name.startswith("quarantine/ack.log") for name, _ in after.disk.list_files(CORE))


def test_a_damaged_header_does_not_matter_to_the_records() -> None:
    core = written()
    flip(core.disk, LOG, 3)
    after = core.crashed()
    assert (resolved(after, "a"), resolved(after, "b")) == ({0, 2}, {1})


def test_a_damaged_checkpoint_is_replaced_by_the_one_before_and_the_log() -> None:
    core = written()
    core.offsets.checkpoint()
    core.ack("a", 1, 3)
    core.offsets.checkpoint()
    core.ack("a", 1, 4)
    core.offsets.sync()
    flip(core.disk, CHECKPOINT, 200)
    after = core.crashed()
    assert resolved(after, "a") == {0, 2, 3, 4}
    assert after.offsets.damage
    again = after.crashed()
    assert resolved(again, "a") == {0, 2, 3, 4}
    assert not again.offsets.damage


def test_a_damaged_checkpoint_does_not_take_the_place_of_the_one_before_it() -> None:
    core = written()
    core.offsets.checkpoint()
    core.ack("a", 1, 3)
    core.offsets.checkpoint()
    good = core.disk.read(f"{CHECKPOINT}.1")
    flip(core.disk, CHECKPOINT, 200)
    after = core.crashed()
    assert after.disk.read(f"{CHECKPOINT}.1") == good
    flip(after.disk, CHECKPOINT, 200)
    assert resolved(after.crashed(), "a") == {0, 2, 3}


def test_abandoned_files_stay_while_a_checkpoint_needs_them() -> None:
    core = written()
    core.offsets.checkpoint()
    core.ack("a", 1, 3)
    core.offsets.sync()
    core.ack("a", 1, 4)
    core.disk.plan = PlannedFault(call=len(core.disk.calls) + 1, kind=DiskFault.FAIL_ONCE)
    with pytest.raises(PenstockError):
        core.offsets.sync()
    core.offsets.checkpoint()
    flip(core.disk, CHECKPOINT, 200)
    after = core.crashed(core.disk.crash(Survival.EVERYTHING))
    assert resolved(after, "a") == {0, 2, 3, 4}


def test_without_any_checkpoint_the_log_still_has_the_names_and_the_marks() -> None:
    core = written()
    core.deliveries.ack_segment("a", 1)
    for _ in range(3):
        core.offsets.checkpoint(next_segment_seq=2)
        core.offsets.sync()
    flip(core.disk, CHECKPOINT, 200)
    flip(core.disk, f"{CHECKPOINT}.1", 200)
    after = core.crashed()
    assert after.offsets.names() == ["a", "b"]
    assert after.offsets.subscriber("a").hwm == 1
    assert resolved(after, "b") <= {1}
    assert after.offsets.state.next_segment_seq >= 2


def test_with_all_acknowledgements_lost_all_existing_data_is_delivered_again() -> None:
    core = written()
    core.offsets.close()
    disk = core.disk
    for name, _ in disk.list_files(CORE):
        disk.unlink(f"{CORE}/{name}")
        disk.sync_dir(f"{CORE}/{name}".rpartition("/")[0])
    after = core.crashed()
    after.subscribe("a")
    assert len(after.refs("a")) == BUNDLES


def test_a_flipped_bit_anywhere_in_a_checkpoint_is_detected() -> None:
    state = CheckpointState(
        generation=3,
        last_number=99,
        next_segment_seq=7,
        next_wal_seq=1 << 40,
        abandoned_through=2,
        absent=((3, 4),),
        tombstoned=(5,),
        subscribers=(
            CheckpointEntry(
                index=1,
                name="a" * 64,
                state=2,
                hwm=2,
                orphaned_ns=5,
                counters=(1, 2, 3, 4, 5),
                gaps={6: b"\x05"},
                complete=((8, 9),),
            ),
        ),
    )
    data = encode_checkpoint(state)
    assert decode_checkpoint(data) == state
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit >> 3] ^= 1 << (bit & 7)
        with pytest.raises(Corrupt):
            decode_checkpoint(bytes(damaged))
    for size in range(len(data)):
        with pytest.raises(Corrupt):
            decode_checkpoint(data[:size])


def test_a_record_is_decoded_unchanged() -> None:
    record = OffsetRecord(
        kind=RecordKind.OUTCOME,
        outcome=Outcome.REJECTED,
        subscriber=65_535,
        segment_seq=2**63 - 1,
        bundle=2**32 - 1,
        attempt=7,
        ts_ns=-1,
        number=2**63 - 1,
    )
    assert len(encode_record(record)) == RECORD_BYTES
    assert decode_record(encode_record(record)) == record
    part = NamePart(subscriber=3, part=2, text=b"name", number=9)
    assert decode_record(encode_record(part)) == part
    assert b"".join(name_parts("n" * 64)) == b"n" * 64


@pytest.mark.parametrize("data", [b"", bytes(40), b"\xff" * 40, bytes(39)])
def test_bytes_that_are_not_a_record_decode_to_none(data: bytes) -> None:
    assert decode_record(data) is None
    assert all(record is None for record in decode_records(data))


def test_a_header_is_decoded_and_other_bytes_are_none() -> None:
    assert decode_header(encode_header(7, 99)) == (7, 99)
    assert len(encode_header(7, 99)) == HEADER_BYTES
    assert decode_header(bytes(32)) is None
    assert decode_header(b"") is None


async def test_after_a_lost_definition_nothing_is_deleted_before_its_owner_could_register_again() -> None:
    core = written()
    core.deliveries.ack_segment("b", 1)
    core.offsets.sync()
    flip(core.disk, LOG, (HEADER_BYTES + 10) * 8)
    after = core.crashed()
    assert after.offsets.names() == ["b"]
    assert any("definition was lost" in text for text in after.offsets.damage)
    assert after.offsets.finished() == [1]
    assert after.remove() == []
    after.subscribe("a")
    assert after.refs("a") == [(1, bundle) for bundle in range(BUNDLES)]
    await after.clock.advance(300)
    assert after.offsets.finished() == []
    after.deliveries.ack_segment("a", 1)
    assert after.remove() == [1]
