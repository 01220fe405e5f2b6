"""The snapshot file: written as a whole, and read as a whole or not at all."""

from __future__ import annotations

import struct
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from penstock.errors import Unsupported
from penstock.storage.fs import OsFileSystem
from penstock.topics.checkpoints.snapshot import (
    SNAPSHOT_VERSION,
    LogStart,
    Snapshot,
    TopicEntry,
    decode_snapshot,
    encode_snapshot,
    load_latest,
    snapshot_name,
    write_snapshot,
)
from penstock.topics.errors import Damaged
from penstock.topics.segments.format import SegmentEntry

FS = OsFileSystem()


def snapshot_of(head_seq: int) -> Snapshot:
    segment = SegmentEntry(
        first_seq=1,
        count=head_seq,
        data_bytes=100,
        sealed=True,
        cold=False,
        created_ms=7,
        idx_xxh3=2**64 - 1,
        deleted=1,
    )
    topic = TopicEntry(
        name="clicks",
        id=10,
        epoch=2,
        config=b'{"ttl_ms":0}',
        head_seq=head_seq,
        cap_floor=1,
        ttl_floor=2,
        trim_floor=3,
        delete_below=4,
        reserved_head=head_seq + 256,
        last_write_ms=None,
        checkpointed_seq=head_seq,
        segments=(segment,),
    )
    return Snapshot(
        next_topic_id=11,
        created_ms=1_700_000_000_000,
        wal={"shard-00": LogStart(3, 4096), "shard-01": LogStart(1, 0)},
        topics=(topic,),
    )


u64 = st.integers(0, 2**64 - 1)
segments = st.builds(
    SegmentEntry,
    first_seq=u64,
    count=u64,
    data_bytes=u64,
    sealed=st.booleans(),
    cold=st.booleans(),
    created_ms=u64,
    idx_xxh3=u64,
    deleted=u64,
)
topics = st.builds(
    TopicEntry,
    name=st.text(max_size=8),
    id=u64,
    epoch=u64,
    config=st.binary(max_size=8),
    head_seq=u64,
    cap_floor=u64,
    ttl_floor=u64,
    trim_floor=u64,
    delete_below=u64,
    reserved_head=u64,
    last_write_ms=st.one_of(st.none(), u64),
    checkpointed_seq=u64,
    segments=st.lists(segments, max_size=3).map(tuple),
)
snapshots = st.builds(
    Snapshot,
    next_topic_id=u64,
    created_ms=u64,
    wal=st.dictionaries(st.text(max_size=8), st.builds(LogStart, u64, u64), max_size=3),
    topics=st.lists(topics, max_size=3).map(tuple),
)


@given(snapshots)
def test_a_snapshot_round_trips(snapshot: Snapshot) -> None:
    assert decode_snapshot(encode_snapshot(snapshot)) == snapshot


def test_the_header_is_twenty_bytes_with_a_checksum_over_everything_else() -> None:
    raw = encode_snapshot(snapshot_of(3))
    assert raw[:12] == b"SNP1" + struct.pack("<II", SNAPSHOT_VERSION, len(raw) - 20)
    assert raw[12:20] == struct.pack("<Q", xxh3_64_intdigest(raw[:12] + raw[20:]))


def test_any_flipped_bit_is_damage() -> None:
    raw = encode_snapshot(snapshot_of(3))
    for bit in range(len(raw) * 8):
        changed = bytearray(raw)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Damaged):
            decode_snapshot(changed)


def test_a_cut_or_continued_file_is_damage() -> None:
    raw = encode_snapshot(snapshot_of(3))
    for size in range(len(raw)):
        with pytest.raises(Damaged):
            decode_snapshot(raw[:size])
    with pytest.raises(Damaged):
        decode_snapshot(raw + b"\0")


def sealed(body: bytes, version: int = SNAPSHOT_VERSION, magic: bytes = b"SNP1") -> bytes:
    head = magic + struct.pack("<II", version, len(body))
    return head + struct.pack("<Q", xxh3_64_intdigest(head + body)) + body


@given(st.binary(max_size=60))
def test_an_invalid_body_is_damage(body: bytes) -> None:
    with pytest.raises(Damaged):
        decode_snapshot(body)
    with pytest.raises(Damaged):
        decode_snapshot(sealed(body))


def test_another_kind_of_file_is_damage_and_another_version_is_not() -> None:
    body = msgspec.msgpack.encode(snapshot_of(3))
    assert decode_snapshot(sealed(body)) == snapshot_of(3)
    with pytest.raises(Damaged, match="not a snapshot"):
        decode_snapshot(sealed(body, magic=b"SNP2"))
    with pytest.raises(Unsupported, match="version is 5"):
        decode_snapshot(sealed(body, version=5))


def test_a_directory_without_snapshots_is_a_fresh_one(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "absent"):
        loaded = load_latest(FS, str(directory))
        assert (loaded.snapshot, loaded.number, loaded.next_number, loaded.rejected) == (None, 0, 1, ())


def test_the_newest_is_loaded_and_the_one_before_is_kept(tmp_path: Path) -> None:
    meta = tmp_path / "meta"
    for number in range(1, 6):
        write_snapshot(FS, str(meta), number, snapshot_of(number))
        loaded = load_latest(FS, str(meta))
        assert (loaded.snapshot, loaded.number, loaded.next_number) == (
            snapshot_of(number),
            number,
            number + 1,
        )
    assert [path.name for path in sorted(meta.iterdir())] == [snapshot_name(4), snapshot_name(5)]
    assert snapshot_name(4) == "snapshot-0000000000000004.bin"


def test_a_damaged_newest_snapshot_is_reported_and_the_previous_one_is_used(tmp_path: Path) -> None:
    for number in (1, 2):
        write_snapshot(FS, str(tmp_path), number, snapshot_of(number))
    newest = tmp_path / snapshot_name(2)
    newest.write_bytes(newest.read_bytes()[:-1])
    loaded = load_latest(FS, str(tmp_path))
    assert (loaded.snapshot, loaded.number, loaded.next_number) == (snapshot_of(1), 1, 3)
    assert len(loaded.rejected) == 1
    assert str(newest) in loaded.rejected[0]
    assert newest.exists()


def test_an_unreadable_snapshot_does_not_replace_a_readable_one(tmp_path: Path) -> None:
    for number in (1, 2):
        write_snapshot(FS, str(tmp_path), number, snapshot_of(number))
    (tmp_path / snapshot_name(2)).write_bytes(b"torn")
    write_snapshot(FS, str(tmp_path), 3, snapshot_of(3), previous=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        snapshot_name(1),
        snapshot_name(2),
        snapshot_name(3),
    ]
    (tmp_path / snapshot_name(3)).write_bytes(b"torn too")
    assert load_latest(FS, str(tmp_path)).snapshot == snapshot_of(1)


def test_a_start_fails_when_no_snapshot_can_be_read(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / snapshot_name(number)).write_bytes(b"")
    with pytest.raises(Damaged, match="no snapshot can be read") as caught:
        load_latest(FS, str(tmp_path))
    assert snapshot_name(1) in str(caught.value)
    assert snapshot_name(2) in str(caught.value)


def test_a_snapshot_of_a_newer_program_is_not_skipped(tmp_path: Path) -> None:
    write_snapshot(FS, str(tmp_path), 1, snapshot_of(1))
    (tmp_path / snapshot_name(2)).write_bytes(sealed(b"whatever", version=5))
    with pytest.raises(Unsupported, match="use the program that wrote it"):
        load_latest(FS, str(tmp_path))


def test_other_files_beside_the_snapshots_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / f"{snapshot_name(1)}.0123").write_text("torn")
    for number in (1, 2, 3):
        write_snapshot(FS, str(tmp_path), number, snapshot_of(number))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "notes.txt",
        snapshot_name(2),
        snapshot_name(3),
    ]
