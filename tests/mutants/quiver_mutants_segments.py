"""Deliberate bugs in the segments of Quiver; see `mutants.py`."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["SEGMENT_MUTANTS"]

DAMAGED = "tests/unit/quiver/segments/test_damaged_segments.py"
CRASH = "tests/crash/quiver/test_segment_crash.py"
STORE = "tests/unit/quiver/segments/test_segment_store.py"
WRITER = "tests/unit/quiver/segments/test_segment_writer.py"
UPLOAD = "tests/unit/quiver/segments/test_upload.py"
INBOX = "tests/unit/quiver/offsets/test_external_acks.py"
OPEN = "tests/unit/quiver/segments/test_memtable.py"
READERS = "tests/unit/quiver/segments/test_segment_readers.py"
OFFSETS = "tests/unit/spark/sources/test_quiver_offsets.py"

SEGMENT_MUTANTS = (
    Mutant(
        name="fsck is silent about notes that cannot be read",
        where="quiver:unreadable_notes",
        old="            yield subject, str(error)\n            continue\n",
        new="            continue\n",
        test=f"{DAMAGED}::test_fsck_continues_after_an_unreadable_sidecar_log_and_acknowledgements",
    ),
    Mutant(
        name="an open Quiver is silent about notes that cannot be read",
        where="quiver:recover",
        old="for subject, text in unreadable_notes(fs, core_dir):",
        new="for subject, text in ():",
        test=f"{DAMAGED}::test_a_start_reports_notes_beside_the_log_that_cannot_be_read",
    ),
    Mutant(
        name="a segment stamped in the future is kept until then",
        where="quiver:Retention.expired",
        old="(info.ingest_ns_max < before_ns or info.seq in known_for_long)",
        new="info.ingest_ns_max < before_ns",
        test="tests/unit/quiver/retention/test_reaper.py"
        "::test_a_segment_stamped_in_the_future_expires_at_its_age_after_the_start",
    ),
    Mutant(
        name="an orphan is dropped by the wall clock alone",
        where="quiver:SubscriberUpkeep.drop_orphans",
        old="        if since_ns > limit_ns and (name, since_ns) not in known_for_long:\n",
        new="        if since_ns > limit_ns:\n",
        test="tests/unit/quiver/test_engine.py"
        "::test_a_clock_set_back_by_a_year_keeps_an_orphan_no_longer_than_its_time",
    ),
    Mutant(
        name="fsck maps a segment that it has not read",
        where="quiver:_check_segment",
        old="check_bytes(fs.read(data), info, data)",
        new="check_bytes(fs.map(data), info, data)",
        test=f"{DAMAGED}::test_fsck_reports_a_bad_sector_and_repair_quarantines_the_segment",
    ),
    Mutant(
        name="segments are mapped unless somebody says otherwise",
        where="quiver:SegmentConfig",
        old='read_mode: Literal["mmap", "read"] = "read"',
        new='read_mode: Literal["mmap", "read"] = "mmap"',
        test=f"{DAMAGED}::test_a_segment_with_a_bad_sector_is_quarantined_and_all_other_data_is_delivered",
    ),
    Mutant(
        name="a segment counts before its data has a name",
        where="quiver:SegmentStore.write",
        old="    self._directory.name_data(seq)\n    self._directory.name_sidecar(seq)\n",
        new="    self._directory.name_sidecar(seq)\n    self._directory.name_data(seq)\n",
        test=f"{CRASH}::test_a_crash_at_any_call_keeps_committed_segments_and_nothing_incomplete",
    ),
    Mutant(
        name="a segment is acknowledged before its bytes are durable",
        where="quiver:SegmentDirectory._staged",
        old="            file.datasync()\n",
        new="",
        test=f"{CRASH}::test_a_crash_at_any_call_keeps_committed_segments_and_nothing_incomplete",
    ),
    Mutant(
        name="a segment is acknowledged before its name is durable",
        where="quiver:SegmentDirectory._name",
        old="    self.fs.rename(path + TMP, path)\n    self.fs.sync_dir(self.directory)\n",
        new="    self.fs.rename(path + TMP, path)\n",
        test=f"{CRASH}::test_a_crash_at_any_call_keeps_committed_segments_and_nothing_incomplete",
    ),
    Mutant(
        name="data is removed before its sidecar",
        where="quiver:SegmentDirectory.remove",
        old="    for path_of in (self.meta_path, self.arrow_path):\n",
        new="    for path_of in (self.arrow_path, self.meta_path):\n",
        test=f"{CRASH}::test_a_crash_at_any_call_keeps_committed_segments_and_nothing_incomplete",
    ),
    Mutant(
        name="a checksum is never gone over",
        where="quiver:SegmentStore._checked_view",
        old='    if info.seq not in self._verified or self._directory.read_mode == "read":\n',
        new="    if False:\n",
        test=f"{STORE}::test_a_flipped_bit_is_found_before_the_first_read",
    ),
    Mutant(
        name="data that has lost its sidecar is thrown away though the log was cut",
        where="quiver:SegmentScan._uncommitted",
        old="    elif self.rebuild or info.wal_start < self.wal_cursor:\n",
        new="    elif self.rebuild:\n",
        test=f"{STORE}::test_a_lost_sidecar_is_rebuilt_when_the_log_does_not_have_the_data",
    ),
    Mutant(
        name="a segment that cannot be written is let go",
        where="quiver:OrderedQueue.step",
        old="            self._postpone(job, error)\n            return False\n        except Ex",
        new="            self.finish(job.item)\n            return False\n        except Ex",
        test=f"{WRITER}::test_a_write_that_fails_twice_is_kept_and_then_written",
    ),
    Mutant(
        name="a sealed segment does not hold back the log",
        where="quiver:SegmentWriter.lowest_wal_start",
        old="    return min((each.sealed.wal_start for each in self._work.items()), default=None)\n",
        new="    return None\n",
        test=f"{WRITER}::test_a_sealed_segment_holds_back_the_log_until_it_is_on_disk",
    ),
    Mutant(
        name="sealing forgets what it took",
        where="quiver:ActiveSegments.take",
        old="    self._byte_count -= stream.byte_count\n",
        new="",
        test=f"{OPEN}::test_sealing_removes_a_stream_and_the_next_part_starts_a_new_one",
    ),
    Mutant(
        name="a copy counts before its data is there",
        where="quiver:Uploader._put",
        old="((arrow_name(info.seq), data), (meta_name(info.seq), sidecar))",
        new="((meta_name(info.seq), sidecar), (arrow_name(info.seq), data))",
        test=f"{UPLOAD}::test_segments_are_uploaded_in_order_data_before_sidecar",
    ),
    Mutant(
        name="a note takes back what an earlier one said",
        where="quiver:commit_offset",
        old="    if existing is not None and existing.through >= note.through:\n",
        new="    if existing is not None and existing.through == note.through:\n",
        test=f"{INBOX}::test_a_note_never_lowers_an_earlier_offset",
    ),
    Mutant(
        name="a segment that a listing missed is taken for removed",
        where="quiver:_settled",
        old="    if not _has_holes(found):\n",
        new="    if True:\n",
        test=f"{READERS}::test_a_listing_that_missed_a_segment_before_another_is_repeated",
    ),
    Mutant(
        name="another directory passes under an old checkpoint",
        where="spark:SegmentOffsets.check_identity",
        old="        if (is_last and info.xxh3 != checksum) or (\n",
        new="        if (\n",
        test=f"{OFFSETS}::test_the_last_read_segment_is_recognised",
    ),
)
