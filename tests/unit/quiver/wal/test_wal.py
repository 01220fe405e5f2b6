from __future__ import annotations

import struct
from pathlib import Path

import pytest

from penstock.errors import Unsupported
from penstock.quiver.model import SLOTS
from penstock.quiver.wal.entry import SlotPart, encode_entry
from penstock.quiver.wal.layout import (
    HEADER_BYTES,
    decode_cursor,
    encode_cursor,
    layout_hash,
    read_cursor,
    write_cursor,
)
from penstock.quiver.wal.log import Wal
from penstock.quiver.wal.replay import quarantine_damage, read_wal
from penstock.storage import OsFileSystem

FS = OsFileSystem()


def part(size: int = 100) -> SlotPart:
    return SlotPart(slot=50, fingerprint=bytes(32), rows=1, payload=[b"x" * size], byte_count=size)


def open_wal(path: Path, rotation_bytes: int = 4096) -> Wal:
    return Wal.open(FS, str(path), read_wal(FS, str(path)), rotation_bytes=rotation_bytes)


def append(wal: Wal, seq: int, size: int = 100) -> int:
    buffers, byte_count = encode_entry(seq * 1000, seq, [part(size)])
    return wal.position(wal.log.append(buffers, byte_count, 1, sync=True))


def seqs(path: Path) -> list[int]:
    return [found.entry.wal_seq for found in read_wal(FS, str(path)).entries()]


def names(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir() if not file.name.startswith("next-"))


def filled(path: Path, count: int = 40) -> list[int]:
    """Create a closed log of several files. Return the positions of its entries."""
    wal = open_wal(path)
    positions = [append(wal, seq) for seq in range(1, count + 1)]
    wal.close()
    return positions


def flip(path: Path, offset: int, mask: int = 1) -> None:
    path.chmod(0o640)
    data = bytearray(path.read_bytes())
    data[offset] ^= mask
    path.write_bytes(data)


def test_the_header_has_the_bytes_of_the_format(tmp_path: Path) -> None:
    filled(tmp_path)
    for file, start in ((tmp_path / "quiver.wal.1", 0), (tmp_path / "quiver.wal.2", None)):
        data = file.read_bytes()
        magic, version, size, meaning, position = struct.unpack_from("<10sHH16sQ", data)
        assert (magic, version, size, meaning) == (b"QUIVER\0WAL", 1, 38, layout_hash())
        assert position == (start if start is not None else (tmp_path / "quiver.wal.1").stat().st_size - 38)


def test_the_layout_hash_follows_the_slot_table(monkeypatch: pytest.MonkeyPatch) -> None:
    before = layout_hash()
    monkeypatch.setattr("penstock.quiver.wal.layout.SLOTS", {**SLOTS, 1: "something else"})
    assert layout_hash() != before
    assert len(before) == 16


def test_rotated_files_are_truncated_protected_and_numbered_upwards(tmp_path: Path) -> None:
    filled(tmp_path)
    rotated = [name for name in names(tmp_path) if name != "quiver.wal"]
    assert rotated == [f"quiver.wal.{n}" for n in range(1, len(rotated) + 1)]
    for name in rotated:
        file = tmp_path / name
        assert file.stat().st_mode & 0o777 == 0o400
        assert not file.read_bytes().endswith(bytes(64))


def test_numbers_continue_when_older_files_are_gone(tmp_path: Path) -> None:
    positions = filled(tmp_path)
    wal = open_wal(tmp_path)
    wal.advance(positions[-1])
    last = max(wal.log.files())
    wal.close()
    assert seqs(tmp_path) == [40]
    again = open_wal(tmp_path)
    assert min(again.log.files()) >= last - 1
    again.close()


def test_positions_count_entries_without_headers_and_survive_rotation_and_purge(tmp_path: Path) -> None:
    positions = filled(tmp_path)
    assert positions == sorted(positions)
    assert {found.entry.wal_seq: found.start for found in read_wal(FS, str(tmp_path)).entries()} == dict(
        enumerate(positions, 1)
    )
    wal = open_wal(tmp_path)
    wal.advance(positions[29])
    wal.close()
    found = list(read_wal(FS, str(tmp_path)).entries())
    assert [(each.entry.wal_seq, each.start) for each in found] == list(enumerate(positions, 1))[29:]


def test_a_file_is_removed_once_the_cursor_is_at_its_end_and_not_before(tmp_path: Path) -> None:
    filled(tmp_path)
    wal = open_wal(tmp_path)
    first_end = (tmp_path / "quiver.wal.1").stat().st_size - HEADER_BYTES
    wal.advance(first_end - 1)
    assert "quiver.wal.1" in names(tmp_path)
    assert wal.advance(first_end)
    assert "quiver.wal.1" not in names(tmp_path)
    assert not wal.advance(5), "the cursor never goes back"
    assert wal.cursor == first_end
    wal.close()


def test_a_cursor_inside_an_entry_keeps_that_entry(tmp_path: Path) -> None:
    positions = filled(tmp_path, 5)
    write_cursor(FS, str(tmp_path), positions[2] + 3)
    assert seqs(tmp_path) == [3, 4, 5]


@pytest.mark.parametrize("data", [b"", encode_cursor(900)[:-1], encode_cursor(900) + b"x", bytes(24)])
def test_a_damaged_cursor_reads_everything(tmp_path: Path, data: bytes) -> None:
    filled(tmp_path, 5)
    (tmp_path / "quiver.wal.cursor").write_bytes(data)
    assert read_cursor(FS, str(tmp_path)) is None
    assert seqs(tmp_path) == [1, 2, 3, 4, 5]


def test_every_flipped_bit_of_a_cursor_is_detected() -> None:
    data = encode_cursor(123_456)
    assert decode_cursor(data) == 123_456
    assert len(data) == 24
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        assert decode_cursor(bytes(damaged)) is None


def test_a_cursor_beyond_the_log_does_not_hide_later_entries(tmp_path: Path) -> None:
    filled(tmp_path, 5)
    write_cursor(FS, str(tmp_path), 10**9)
    wal = open_wal(tmp_path)
    append(wal, 6)
    wal.close()
    assert seqs(tmp_path) == [6]


def test_a_log_without_files_continues_above_its_cursor(tmp_path: Path) -> None:
    write_cursor(FS, str(tmp_path), 10**9)
    wal = open_wal(tmp_path)
    assert append(wal, 1) >= 10**9
    wal.close()
    assert seqs(tmp_path) == [1]


def test_another_version_or_slot_table_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    filled(tmp_path, 3)
    whole = (tmp_path / "quiver.wal").read_bytes()
    for offset in (10, 20):
        flip(tmp_path / "quiver.wal", offset)
        damaged = (tmp_path / "quiver.wal").read_bytes()
        with pytest.raises(Unsupported, match=r"quiver\.wal"):
            read_wal(FS, str(tmp_path))
        assert (tmp_path / "quiver.wal").read_bytes() == damaged
        (tmp_path / "quiver.wal").write_bytes(whole)
    assert seqs(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize("offset", [0, 5, 30, 37])
def test_the_opening_replaces_a_damaged_header(tmp_path: Path, offset: int) -> None:
    positions = filled(tmp_path)
    flip(tmp_path / "quiver.wal.2", offset)
    replay = read_wal(FS, str(tmp_path))
    assert [found.start for found in replay.entries()] == positions
    assert replay.damage == []


def test_the_header_replaces_a_damaged_opening(tmp_path: Path) -> None:
    positions = filled(tmp_path)
    flip(tmp_path / "quiver.wal.2", HEADER_BYTES + 6)
    replay = read_wal(FS, str(tmp_path))
    assert [found.start for found in replay.entries()] == positions


def test_damage_in_a_rotated_file_costs_the_entries_up_to_the_next_mark_and_is_copied(tmp_path: Path) -> None:
    filled(tmp_path)
    file = tmp_path / "quiver.wal.1"
    flip(file, file.stat().st_size // 2)
    replay = read_wal(FS, str(tmp_path))
    found = [each.entry.wal_seq for each in replay.entries()]
    assert len(found) == 39
    assert len(replay.damage) == 1
    assert "quiver.wal.1" in str(replay.damage[0])
    copies = quarantine_damage(FS, replay, str(tmp_path / "quarantine"))
    assert Path(copies[0]).read_bytes() == file.read_bytes()[replay.damage[0].start :]


def test_a_missing_file_in_the_middle_is_reported(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / "quiver.wal.2").unlink()
    replay = read_wal(FS, str(tmp_path))
    numbers = [each.entry.wal_seq for each in replay.entries()]
    assert numbers[0] == 1
    assert numbers[-1] == 40
    assert [str(damage) for damage in replay.damage] == ["quiver.wal.2: the file is missing"]


def test_a_missing_file_that_the_cursor_needs_is_reported_once(tmp_path: Path) -> None:
    positions = filled(tmp_path)
    write_cursor(FS, str(tmp_path), positions[1])
    (tmp_path / "quiver.wal.1").unlink()
    replay = read_wal(FS, str(tmp_path))
    assert f"positions {positions[1]} to " in str(replay.damage[0])
    Wal.open(FS, str(tmp_path), replay, rotation_bytes=4096).close()
    assert read_wal(FS, str(tmp_path)).damage == []


def test_bytes_inside_an_entry_that_look_like_an_entry_are_not_an_entry(tmp_path: Path) -> None:
    inner = b"".join(encode_entry(0, 77, [part()])[0])
    wal = open_wal(tmp_path)
    looks = SlotPart(slot=50, fingerprint=bytes(32), rows=1, payload=[inner], byte_count=len(inner))
    buffers, byte_count = encode_entry(0, 1, [looks])
    wal.log.append(buffers, byte_count, 1, sync=True)
    append(wal, 2)
    wal.close()
    assert seqs(tmp_path) == [1, 2]


def test_an_entry_of_an_unknown_type_is_skipped_and_counted(tmp_path: Path) -> None:
    import xxhash

    body = b"\x07something new"
    wal = open_wal(tmp_path)
    data = struct.pack("<I", len(body)) + body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))
    wal.log.append([data], len(data), 1, sync=True)
    append(wal, 1)
    wal.close()
    replay = read_wal(FS, str(tmp_path))
    assert [each.entry.wal_seq for each in replay.entries()] == [1]
    assert replay.unknown_entries == 1


def test_an_entry_larger_than_a_file_gets_a_separate_file(tmp_path: Path) -> None:
    wal = open_wal(tmp_path)
    for seq, size in enumerate((100, 50_000, 100), 1):
        append(wal, seq, size)
    wal.close()
    assert seqs(tmp_path) == [1, 2, 3]
