"""Scanning a log: torn writes are cut off, damage is reported, and neither is mistaken for the other."""

from __future__ import annotations

import random

import pytest
from tests.unit.storage.log_doubles import DIRECTORY, MARK_BYTES, TINY, append, bodies, frame

from penstock.errors import PenstockError
from penstock.storage import AppendLog, LogScan, scan
from penstock.testing.disk import DiskFault, FakeDisk, PlannedFault, Survival

HEADER = 3 * MARK_BYTES
RECORDS = [b"record %d " % n + b"x" * (n * 7 % 23) for n in range(24)]


def written(disk: FakeDisk, records: list[bytes] = RECORDS, file_bytes: int = 400) -> AppendLog:
    log = AppendLog.open(disk, DIRECTORY, TINY, file_bytes=file_bytes, salt=lambda: 0x1234_5678_9ABC_DEF0)
    for n, body in enumerate(records):
        assert append(log, body, sync=n % 3 != 1)
    log.sync()
    log.mark()
    return log


def path(number: int) -> str:
    return f"{DIRECTORY}/wal-{number:016d}.log"


def flip(disk: FakeDisk, name: str, offset: int, bit: int = 0x10) -> None:
    log = disk.open_log(name)
    old = disk.read(name, offset, 1)[0]
    log.write_durably_at(offset, [bytes([old ^ bit])])


def places(disk: FakeDisk) -> dict[bytes, tuple[int, int]]:
    """Return the file and offset of every record, by its body."""
    frames = scan(disk, DIRECTORY, TINY).frames()
    return {bytes(file.view[start + 5 : end - 8]): (file.number, start) for file, start, end in frames}


def missing(found: LogScan) -> list[bytes]:
    return [body for body in RECORDS if body not in bodies(found)]


def test_a_flipped_bit_anywhere_is_reported_or_harmless() -> None:
    disk = FakeDisk()
    log = written(disk)
    assert len(log.files()) >= 3
    where = places(disk)
    told = 0
    for number in log.files():
        for offset in range(disk.stat(path(number)).size):
            flip(disk, path(number), offset)
            found = scan(disk, DIRECTORY, TINY)
            assert bodies(found) == [body for body in RECORDS if body in bodies(found)]
            for body in missing(found):
                file, start = where[body]
                assert any(
                    damage.file == file and damage.start <= start < (damage.end or 0)
                    for damage in found.damage
                ), f"{body!r} was lost silently by a flip at {number}, {offset}"
            told += bool(found.damage)
            flip(disk, path(number), offset)
    assert told > 500
    assert scan(disk, DIRECTORY, TINY).damage == []


def test_damage_costs_the_frames_up_to_the_next_mark_and_no_more() -> None:
    disk = FakeDisk()
    log = written(disk)
    middle = log.files()[1]
    before = [body for body, (file, _) in places(disk).items() if file == middle and body in RECORDS]
    flip(disk, path(middle), HEADER + 9)
    found = scan(disk, DIRECTORY, TINY)
    assert [(damage.file, damage.start) for damage in found.damage] == [(middle, HEADER)]
    assert missing(found) == before[: len(missing(found))]
    assert 0 < len(missing(found)) < len(before)
    assert str(found.damage[0]).startswith(f"wal-{middle:016d}.log, bytes {HEADER} to ")


def test_a_torn_tail_is_cut_and_nothing_before_it_is_lost() -> None:
    disk = FakeDisk()
    log = written(disk)
    data = frame(b"torn" * 10)
    disk.open_log(path(log.end.file)).write_durably_at(log.end.offset, [data[:-1]])
    found = scan(disk, DIRECTORY, TINY)
    assert found.torn
    assert found.damage == []
    assert bodies(found) == RECORDS
    AppendLog.open(disk, DIRECTORY, TINY)
    assert disk.stat(path(log.end.file)).size == log.end.offset
    assert bodies(scan(disk, DIRECTORY, TINY)) == RECORDS


def test_bytes_after_a_torn_frame_are_ignored() -> None:
    disk = FakeDisk()
    log = written(disk, RECORDS[:2])
    start = log.end.offset
    for body in (b"one", b"two", b"three"):
        append(log, body, sync=False)
    flip(disk, path(log.end.file), start + 6)
    found = scan(disk, DIRECTORY, TINY)
    assert bodies(found) == RECORDS[:2]
    assert found.torn
    assert found.damage == []


def test_a_later_sync_confirms_earlier_writes() -> None:
    disk = FakeDisk()
    log = written(disk, RECORDS[:2])
    append(log, b"one", sync=False)
    at = log.end.offset
    append(log, b"two", sync=False)
    append(log, b"three", sync=True)
    append(log, b"four", sync=True)
    flip(disk, path(log.end.file), at + 6)
    found = scan(disk, DIRECTORY, TINY)
    assert [damage.start for damage in found.damage] == [at]
    assert bodies(found) == [*RECORDS[:2], b"one", b"four"]


def test_bytes_of_a_record_that_look_like_marks_and_frames_are_ignored() -> None:
    disk = FakeDisk()
    forged = b"".join(TINY.mark(position) + frame(b"phantom") for position in range(0, 400, 7))
    log = AppendLog.open(disk, DIRECTORY, TINY)
    append(log, b"first")
    data = frame(forged)
    disk.open_log(path(log.end.file)).write_durably_at(log.end.offset, [data[:-1]])
    found = scan(disk, DIRECTORY, TINY)
    assert found.damage == []
    assert found.torn
    assert bodies(found) == [b"first"]
    again = AppendLog.open(disk, DIRECTORY, TINY)
    append(again, forged)
    append(again, b"last")
    flip(disk, path(again.end.file), HEADER + 6)
    found = scan(disk, DIRECTORY, TINY)
    assert len(found.damage) == 1
    assert bodies(found) == [b"first", b"last"]


def test_a_missing_file_is_reported_and_the_others_are_read() -> None:
    disk = FakeDisk()
    log = written(disk)
    first, second, *_ = log.files()
    disk.unlink(path(second))
    found = scan(disk, DIRECTORY, TINY)
    assert [(damage.file, damage.end) for damage in found.damage] == [(second, None)]
    assert str(found.damage[0]) == f"wal-{second:016d}.log: the file is missing"
    assert bodies(found)[0] == RECORDS[0]
    assert bodies(found)[-1] == RECORDS[-1]
    disk.unlink(path(first))
    assert scan(disk, DIRECTORY, TINY).damage == [], "files before the oldest are taken for dropped"
    found = scan(disk, DIRECTORY, TINY, start=(log.end._replace(file=second, offset=HEADER)))
    assert [damage.file for damage in found.damage] == [second], "unless the reader needs them"


def test_a_missing_active_file_is_reported() -> None:
    disk = FakeDisk()
    log = written(disk)
    disk.unlink(path(log.end.file))
    found = scan(disk, DIRECTORY, TINY)
    assert [(damage.file, damage.end) for damage in found.damage] == [(log.end.file, None)]
    assert "CURRENT" in found.damage[0].reason
    again = AppendLog.open(disk, DIRECTORY, TINY)
    assert again.end.file > log.end.file, "its number is not used again"


@pytest.mark.parametrize("text", [None, b"", b"wal-1.log\n", b"\xff\xfe"])
def test_a_damaged_current_is_reported(text: bytes | None) -> None:
    disk = FakeDisk()
    written(disk)
    disk.unlink(f"{DIRECTORY}/CURRENT")
    if text is not None:
        file = disk.create(f"{DIRECTORY}/CURRENT")
        file.write([text])
    found = scan(disk, DIRECTORY, TINY)
    assert len(found.damage) == 1
    assert "CURRENT" in found.damage[0].reason
    assert bodies(found) == RECORDS


def test_a_file_shorter_than_the_next_header_says_is_damage() -> None:
    disk = FakeDisk()
    log = written(disk)
    first = log.files()[0]
    size = scan(disk, DIRECTORY, TINY).files[0].end
    disk.truncate(path(first), size - 3)
    found = scan(disk, DIRECTORY, TINY)
    assert {damage.file for damage in found.damage} == {first}
    assert max(damage.end or 0 for damage in found.damage) == size
    assert bodies(found)[-1] == RECORDS[-1]


def test_a_damaged_file_is_kept_as_evidence_when_it_is_dropped() -> None:
    disk = FakeDisk()
    log = written(disk)
    first = log.files()[0]
    flip(disk, path(first), HEADER + 9)
    again = AppendLog.open(disk, DIRECTORY, TINY)
    again.drop_before(again.end.file)
    assert [name for name, _ in disk.list_files(DIRECTORY)] == [
        "CURRENT", f"damaged-wal-{first:016d}.log", f"wal-{again.end.file:016d}.log",
    ]  # fmt: skip
    assert scan(disk, DIRECTORY, TINY).damage == []


def test_a_failed_record_does_not_reappear_even_if_nothing_follows() -> None:
    disk = FakeDisk()
    log = written(disk)
    disk.plan = PlannedFault(call=len(disk.calls), kind=DiskFault.FAIL_ONCE)
    assert not append(log, b"failed")
    for survival in Survival:
        assert bodies(scan(disk.crash(survival, random.Random(1)), DIRECTORY, TINY)) == RECORDS


def test_after_a_failed_sync_the_bytes_are_read_from_memory() -> None:
    disk = FakeDisk()
    log = written(disk, RECORDS[:3])
    data = frame(b"only written")
    file, offset = log.append([data], len(data), 1, sync=False)
    disk.plan = PlannedFault(call=len(disk.calls), kind=DiskFault.FAIL_ONCE)
    with pytest.raises(PenstockError):
        log.sync()
    # A kernel that dropped the page may return the old bytes again.
    disk.open_log(path(file)).write_durably_at(offset, [bytes(len(data))])
    assert bytes(log.view(file)[offset : offset + len(data)]) == data
    assert append(log, b"later")
    assert bytes(log.view(file)[offset : offset + len(data)]) == data
    assert bodies(scan(disk.crash(), DIRECTORY, TINY)) == [*RECORDS[:3], b"only written", b"later"]


def test_a_second_scan_and_a_second_opening_change_nothing() -> None:
    disk = FakeDisk()
    written(disk)
    numbers = []
    for _ in range(3):
        numbers.append(AppendLog.open(disk, DIRECTORY, TINY, file_bytes=400).end.file)
        assert bodies(scan(disk, DIRECTORY, TINY)) == RECORDS
    assert numbers == sorted(set(numbers))
