"""Arbitrary bytes as a log or a checkpoint raise only `Corrupt`, and no record is skipped."""

from __future__ import annotations

import contextlib

from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.unit.quiver.ack_doubles import CORE, Core
from xxhash import xxh3_64_intdigest

from penstock.errors import Corrupt
from penstock.quiver.offsets.checkpoint import CheckpointState, decode_checkpoint, encode_checkpoint
from penstock.quiver.offsets.records import OffsetRecord, decode_record, encode_record
from penstock.quiver.retention.shared_quota import decode_slot
from penstock.testing.disk import FakeDisk

HEAD = encode_checkpoint(CheckpointState(generation=1, last_number=1, next_segment_seq=1, next_wal_seq=1))[
    :-8
]


@given(st.binary(max_size=200))
def test_any_bytes_are_a_checkpoint_or_corrupt(data: bytes) -> None:
    with contextlib.suppress(Corrupt):
        decode_checkpoint(data)
    assert decode_slot(data) is None
    assert decode_record(data[:40]) is None


@given(st.binary(min_size=12, max_size=12), st.binary(max_size=300))
def test_counts_that_do_not_fit_are_corrupt_although_the_checksum_does(counts: bytes, rest: bytes) -> None:
    body = HEAD[:-12] + counts + rest
    data = body + xxh3_64_intdigest(body).to_bytes(8, "little")
    with contextlib.suppress(Corrupt):
        decode_checkpoint(data)


RECORDS = st.builds(
    OffsetRecord,
    kind=st.integers(0, 255),
    outcome=st.integers(0, 255),
    subscriber=st.integers(0, 65535),
    segment_seq=st.integers(0, 2**64 - 1),
    bundle=st.integers(0, 2**32 - 1),
    attempt=st.integers(0, 2**32 - 1),
    ts_ns=st.integers(-(2**63), 2**63 - 1),
    number=st.integers(0, 2**64 - 1),
)


HUGE = tuple(
    encode_record(OffsetRecord(kind=kind, segment_seq=seq, bundle=2**32 - 2, attempt=attempt, number=number))
    for kind in (1, 2, 3, 6)
    for seq, attempt, number in ((2**64 - 1, 1, 1), (1, 2**32 - 1, 1), (1, 1, 2**64 - 1))
)


@settings(max_examples=50, deadline=None)
@example([HUGE[0]])
@example([HUGE[2]])
@example([*HUGE])
@given(st.lists(st.one_of(RECORDS.map(encode_record), st.binary(min_size=1, max_size=60)), max_size=20))
def test_a_start_survives_any_records_and_takes_new_data(parts: list[bytes]) -> None:
    disk = FakeDisk()
    disk.make_dirs(f"{CORE}/ack")
    file = disk.create(f"{CORE}/ack/ack.log")
    file.write([bytes(32), *parts])
    core = Core(disk).open()
    floor = core.offsets.state.next_segment_seq
    core.subscribe("fresh")
    if floor < 2**63:
        core.add(floor, bundles=1)
        assert core.refs("fresh") == [(floor, 0)]
