"""Verification of a data directory against its checksums."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tests.unit.topics.data_directories import FS, GROWING, SEALED, DataDirectory, entry
from tests.unit.topics.engine_doubles import recs

from penstock.errors import NotFound, Rejected
from penstock.findings import Severity
from penstock.topics.checkpoints.layout import LOCK_FILE, is_in_use
from penstock.topics.log.frame import encode
from penstock.topics.log.payload import prepare
from penstock.topics.segments.format import Part
from penstock.topics.segments.store import LocalSegmentRoot
from penstock.topics.tools.verify import VerifyReport, verify


@pytest.fixture
def made(tmp_path: Path) -> DataDirectory:
    return DataDirectory(tmp_path / "data")


def check(made: DataDirectory) -> VerifyReport:
    return verify(FS, str(made.path))


def test_an_untouched_directory_is_clean(made: DataDirectory) -> None:
    made.write_log(3)
    report = check(made)
    assert report.findings == []
    assert (report.topics, report.stored_records) == (1, 15)
    assert report.log_frames >= 8
    assert report.files == 8


def test_a_directory_without_a_snapshot_is_verified_by_its_log(tmp_path: Path) -> None:
    made = DataDirectory(tmp_path)
    made.path.joinpath("meta", "snapshot-0000000000000003.bin").unlink()
    made.root.remove_topic(1)
    report = check(made)
    assert report.problems == []
    assert report.topics == 0


def test_segments_of_a_topic_that_nothing_names_are_a_problem(tmp_path: Path) -> None:
    made = DataDirectory(tmp_path)
    made.path.joinpath("meta", "snapshot-0000000000000003.bin").unlink()
    assert any("segments in topics/00000001" in problem.text for problem in check(made).problems)


def test_a_log_that_lost_all_its_files_is_a_problem(tmp_path: Path) -> None:
    made = DataDirectory(tmp_path)
    made.path.joinpath("meta", "snapshot-0000000000000003.bin").unlink()
    made.root.remove_topic(1)
    made.path.joinpath(made.active_log()).unlink()
    assert any("names this file, but it is missing" in problem.text for problem in check(made).problems)


def test_a_foreign_directory_is_not_reported_as_clean(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for directory in (tmp_path, tmp_path / "photos"):
        with pytest.raises(Rejected, match=r"is not a data directory of topics; name .*TOPICS_DATA_DIR"):
            verify(FS, str(directory))


@pytest.mark.parametrize("name", ["meta", "wal"])
def test_a_data_directory_may_be_new(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    assert verify(FS, str(tmp_path)).findings == []


def test_a_data_directory_may_have_only_its_lock(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).touch()
    assert verify(FS, str(tmp_path)).findings == []


@pytest.mark.parametrize(
    ("name", "told"), [("backup.unfinished", "not finished"), ("restoring", "did not finish")]
)
def test_an_unfinished_directory_is_not_reported_as_clean(made: DataDirectory, name: str, told: str) -> None:
    (made.path / name).mkdir()
    with pytest.raises(Rejected, match=told):
        check(made)


def test_records_of_a_topic_that_nothing_names_are_a_problem(made: DataDirectory) -> None:
    known = encode(prepare(recs(1)), topic_id=1, first_seq=16, ts_ms=1, durable=True)
    nameless = encode(prepare(recs(1, 2)), topic_id=7, first_seq=1, ts_ms=1, durable=True)
    for batch in (known, nameless):
        made.log.append([batch.buffer], len(batch.buffer), batch.count, sync=True)
    (finding,) = check(made).problems
    assert finding.subject == made.active_log()
    assert finding.text == "2 records of topic 7, which no snapshot or log names"
    made.snapshot(4)
    assert check(made).findings == []


def test_a_log_that_continues_a_snapshot_needs_it(made: DataDirectory) -> None:
    made.log.rotate()
    made.log.drop_before(made.log.end.file)
    (made.path / "meta" / "snapshot-0000000000000003.bin").unlink()
    log, segments = check(made).problems
    assert "meta has no readable one" in log.text
    assert "neither meta nor wal names these topics" in segments.text


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        verify(FS, str(tmp_path / "none"))


def test_every_bit_of_a_record_is_checked_and_named(made: DataDirectory) -> None:
    made.damage(f"{SEALED}.data", 3 * 51 + 20)
    (finding,) = check(made).problems
    assert finding.subject == f"{SEALED}.data"
    assert finding.start is not None
    assert finding.end is not None
    assert finding.start <= 3 * 51 + 20 < finding.end
    assert (finding.topic, finding.first_seq) == ("clicks", finding.last_seq)
    assert "bytes" in str(finding)


def test_records_that_are_lost_side_by_side_are_one_finding(made: DataDirectory) -> None:
    size = made.entries[0].data_bytes // 10
    for place in (2, 3, 4, 8):
        made.damage(f"{SEALED}.data", place * size + 20)
    first, second = check(made).problems
    assert (first.first_seq, first.last_seq) == (3, 5)
    assert (first.start, first.end) == (2 * size, 5 * size)
    assert (
        first.text
        == "3 records cannot be read; the first: stored record 3 cannot be read: its checksum is wrong"
    )
    assert (second.first_seq, second.last_seq) == (9, 9)
    assert second.text == "stored record 9 cannot be read: its checksum is wrong"


@pytest.mark.parametrize("part", ["idx", "tags", "del"])
def test_every_bit_beside_the_records_is_checked(made: DataDirectory, part: str) -> None:
    size = len((made.path / f"{SEALED}.{part}").read_bytes())
    for offset in range(size):
        made.damage(f"{SEALED}.{part}", offset)
        assert [finding.subject for finding in check(made).problems] == [f"{SEALED}.{part}"], offset
        made.damage(f"{SEALED}.{part}", offset)


def test_every_bit_of_every_record_counts(made: DataDirectory) -> None:
    size = made.entries[0].data_bytes
    for offset in range(0, size, 7):
        made.damage(f"{SEALED}.data", offset)
        assert {finding.subject for finding in check(made).problems} == {f"{SEALED}.data"}, offset
        made.damage(f"{SEALED}.data", offset)


def test_bytes_beyond_the_snapshots_sizes_do_not_matter(made: DataDirectory) -> None:
    made.damage(f"{GROWING}.data", made.entries[1].data_bytes + 2)
    made.damage(f"{GROWING}.idx", made.entries[1].idx_bytes + 2)
    assert check(made).findings == []


@pytest.mark.parametrize("part", ["data", "idx", "del"])
def test_a_missing_file_is_a_problem(made: DataDirectory, part: str) -> None:
    (made.path / f"{SEALED}.{part}").unlink()
    (finding,) = check(made).problems
    assert finding.subject == f"{SEALED}.{part}"
    assert "missing" in finding.text
    assert (finding.first_seq, finding.last_seq) == (1, 10)


def test_tags_may_be_missing_because_they_can_be_derived(made: DataDirectory) -> None:
    (made.path / f"{SEALED}.tags").unlink()
    assert check(made).findings == []


@pytest.mark.parametrize("part", ["data", "idx"])
def test_a_file_that_is_too_short_is_a_problem(made: DataDirectory, part: str) -> None:
    path = made.path / f"{SEALED}.{part}"
    path.write_bytes(path.read_bytes()[:-1])
    assert [finding.subject for finding in check(made).problems] == [f"{SEALED}.{part}"]


def test_missing_deletions_are_a_problem(made: DataDirectory) -> None:
    made.snapshot(4, entry(1, 10, sealed=True, deleted=3, tag=b"red"), made.entries[1])
    (finding,) = check(made).problems
    assert "2 deleted records instead of 3" in finding.text


def test_a_damaged_snapshot_is_named_and_the_previous_one_is_used(made: DataDirectory) -> None:
    made.snapshot(4)
    made.damage("meta/snapshot-0000000000000004.bin", 40)
    report = check(made)
    assert [finding.subject for finding in report.problems] == ["meta/snapshot-0000000000000004.bin"]
    assert report.stored_records == 15


def test_damage_in_the_log_is_named_with_its_range(made: DataDirectory) -> None:
    start = made.log.end.offset
    made.write_log(4)
    made.write_log(1)
    made.write_log(1)
    made.damage(made.active_log(), start + 60)
    (finding,) = check(made).problems
    assert finding.subject == made.active_log()
    assert finding.start is not None
    assert finding.end is not None
    assert finding.start <= start + 60 < finding.end


def test_damage_in_the_log_that_a_snapshot_covers_is_only_a_note(made: DataDirectory) -> None:
    made.write_log(4)
    made.write_log(1)
    made.snapshot(4)
    made.write_log(1)
    made.damage(made.active_log(), 200)
    report = check(made)
    assert report.problems == []
    assert [finding.severity for finding in report.findings] == [Severity.NOTE]
    assert "no start reads this part" in report.findings[0].text


def test_a_write_that_was_cut_off_is_a_note(made: DataDirectory) -> None:
    path = made.path / made.active_log()
    raw = bytearray(path.read_bytes())
    raw[made.log.end.offset : made.log.end.offset + 5] = b"\x40\0\0\0\x01"
    path.write_bytes(raw)
    report = check(made)
    assert report.problems == []
    assert "cut off" in report.findings[0].text


def test_a_log_file_that_the_snapshot_needs_must_be_there(made: DataDirectory) -> None:
    (made.path / made.active_log()).unlink()
    assert made.active_log() in [finding.subject for finding in check(made).problems]


@pytest.mark.parametrize("text", [None, b"", b"nothing\n", b"wal-0000000000009999.log\n"])
def test_a_current_that_is_missing_or_damaged_is_a_problem(made: DataDirectory, text: bytes | None) -> None:
    current = made.path / "wal" / "CURRENT"
    current.unlink() if text is None else current.write_bytes(text)
    assert any("CURRENT" in finding.text for finding in check(made).problems)


def test_an_empty_log_file_is_a_problem(made: DataDirectory) -> None:
    (made.path / made.active_log()).write_bytes(b"")
    assert made.active_log() in [finding.subject for finding in check(made).problems]


def test_a_log_that_ends_before_the_offset_in_the_snapshot_is_a_problem(made: DataDirectory) -> None:
    path = made.path / made.active_log()
    path.write_bytes(path.read_bytes()[: made.log.end.offset - 60])
    (finding,) = check(made).problems
    assert (finding.subject, finding.end) == (made.active_log(), made.log.end.offset)


def test_records_in_the_cold_tier_are_read_there_or_reported(made: DataDirectory, tmp_path: Path) -> None:
    cold = tmp_path / "cold"
    store = made.root.topic(1)
    other = LocalSegmentRoot(FS, str(cold))
    other.topic(1).put(1, [store.view(1, Part.DATA)], store.view(1, Part.IDX))
    store.delete(1, [Part.DATA])
    made.snapshot(4, msgspec.structs.replace(made.entries[0], cold=True), made.entries[1])
    (note,) = check(made).findings
    assert (note.severity, note.subject) == (Severity.NOTE, f"{SEALED}.data")
    assert note.text == "10 records of clicks not checked: they are in the cold tier; give --cold"
    report = verify(FS, str(made.path), cold=other)
    assert report.findings == []
    assert report.stored_records == 15


def test_segments_of_a_topic_that_was_deleted_since_the_snapshot_are_not_missed(made: DataDirectory) -> None:
    made.remove_topic()
    report = check(made)
    assert report.findings == []
    assert report.topics == 0


def test_a_directory_is_in_use_while_its_lock_is_held(made: DataDirectory) -> None:
    assert not is_in_use(FS, str(made.path))
    assert not (made.path / LOCK_FILE).exists()
    with FS.lock(str(made.path / LOCK_FILE)):
        assert is_in_use(FS, str(made.path))
    assert not is_in_use(FS, str(made.path))
