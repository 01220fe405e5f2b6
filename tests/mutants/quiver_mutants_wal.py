"""Deliberate bugs in the log, the intake and the recovery of Quiver; see `mutants.py`."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["QUIVER_WAL_MUTANTS"]

ADMISSION = "tests/unit/quiver/test_admission.py"
ENGINE = "tests/unit/quiver/test_engine.py"
INTAKE = "tests/unit/quiver/test_append.py"
WAL = "tests/unit/quiver/wal/test_wal.py"
CRASH = "tests/crash/quiver/test_wal_crash.py"


QUIVER_WAL_MUTANTS = (
    Mutant(
        name="the cursor passes what is still open",
        where="quiver:Memtable.needed",
        old="        lowest = (self._open.lowest_wal_start(), self._segment_writer.lowest_wal_start())\n",
        new="        lowest = (self._segment_writer.lowest_wal_start(),)\n",
        test=f"{ENGINE}::test_the_cursor_stays_at_the_oldest_bundle_that_is_open",
    ),
    Mutant(
        name="the cursor passes what is sealed and not written",
        where="quiver:Memtable.needed",
        old="        lowest = (self._open.lowest_wal_start(), self._segment_writer.lowest_wal_start())\n",
        new="        lowest = (self._open.lowest_wal_start(),)\n",
        test=f"{ENGINE}::test_the_cursor_stays_at_a_segment_that_cannot_be_written",
    ),
    Mutant(
        name="what is committed is taken from the log again",
        where="quiver:Recovered._parts",
        old="        if entry.wal_seq in self._committed.get((part.slot, part.fingerprint.hex()), ()):\n",
        new="        if False:\n",
        test=f"{ENGINE}::test_only_the_uncommitted_part_of_an_entry_is_read",
    ),
    Mutant(
        name="an entry counts as committed when one of its slots is",
        where="quiver:Recovered._parts",
        old="        if entry.wal_seq in self._committed.get((part.slot, part.fingerprint.hex()), ()):\n",
        new="        if any(entry.wal_seq in numbers for numbers in self._committed.values()):\n",
        test=f"{ENGINE}::test_only_the_uncommitted_part_of_an_entry_is_read",
    ),
    Mutant(
        name="a processed segment goes while the log still has its bundles",
        where="quiver:RemovableSegments.may_remove",
        old="        return self._store.get(seq).wal_end <= self._wal.cursor\n",
        new="        return True\n",
        test=f"{ENGINE}::test_a_segment_is_deleted_only_when_the_log_is_truncated_after_it",
    ),
    Mutant(
        name="a cursor beyond the log is believed",
        where="quiver:QuiverLayout.head",
        old="    position = max(self.floor, self.position(before) if before.file else self.base)\n",
        new="    position = self.position(before) if before.file else self.base\n",
        test=f"{WAL}::test_a_cursor_beyond_the_log_does_not_hide_later_entries",
    ),
    Mutant(
        name="a log that ends before what was durable is not compared with the acknowledgements",
        where="quiver:recover",
        old="    replay.expect(offsets.state.logged[0])\n",
        new="",
        test="tests/crash/quiver/test_damage_sweep.py"
        "::test_a_log_truncated_above_its_cursor_is_reported_from_the_offset_log",
    ),
    Mutant(
        name="how far the log is durable is not noted before a bundle is accepted",
        where="quiver:Appender._deliver",
        old="        self._logged_file.reach(*self._logged)\n",
        new="",
        test="tests/crash/quiver/test_damage_sweep.py"
        "::test_bundles_accepted_just_before_a_crash_are_counted_when_the_log_lost_them[cut]",
    ),
    Mutant(
        name="what was in an empty file of the log is not counted",
        where="quiver:_size",
        old="is_empty = damage.end is not None and damage.end <= damage.start",
        new="is_empty = False",
        test="tests/crash/quiver/test_damage_sweep.py::"
        "test_bundles_of_a_rotated_log_file_that_is_empty_are_counted_for_every_subscriber",
    ),
    Mutant(
        name="bundles that the middle of the log lost are not counted",
        where="quiver:WalReplay.gaps",
        old="    jumps = list(self._jumps)\n",
        new="    jumps = list(self._jumps[:0])\n",
        test="tests/crash/quiver/test_damage_sweep.py"
        "::test_bundles_lost_in_the_middle_of_a_log_are_counted_once_for_every_subscriber",
    ),
    Mutant(
        name="a damaged log is counted again at every start",
        where="quiver:_uncounted",
        old=' if f"{_COUNTED}{gap.first}" not in names',
        new="",
        test="tests/crash/quiver/test_damage_sweep.py"
        "::test_bundles_lost_in_the_middle_of_a_log_are_counted_once_for_every_subscriber",
    ),
    Mutant(
        name="delivered payloads stay in the log until it rotates",
        where="quiver:DiskSpace.remove_delivered_log",
        old="    is_delivered = not self._store.infos() and self._is_log_covered\n",
        new="    is_delivered = False\n",
        test="tests/unit/quiver/delivery/test_delivered_payloads.py"
        "::test_maintenance_leaves_no_delivered_payload_once_everything_is_acknowledged",
    ),
    Mutant(
        name="delivered payloads stay in the log after a clean shutdown",
        where="quiver:Core._clear_log",
        old="            self.wal.clear()\n",
        new="            pass\n",
        test="tests/unit/quiver/delivery/test_delivered_payloads.py"
        "::test_a_clean_shutdown_leaves_no_delivered_payload_and_no_file_made_ahead",
    ),
    Mutant(
        name="a new file takes the active name before the old one is safe under its own",
        where="quiver:QuiverLayout.install",
        old="        fs.sync_dir(directory)\n        self._move_unsynced = False\n",
        new="        self._move_unsynced = False\n",
        test=f"{CRASH}::test_a_power_cut_during_a_rotation_never_leaves_a_file_without_a_name",
    ),
    Mutant(
        name="a writer is answered before the sync",
        where="quiver:Appender.append",
        old="        entry = Entry(buffers, byte_count, 1, self._config.syncs, context=accepted)\n",
        new="        entry = Entry(buffers, byte_count, 1, False, context=accepted)\n",
        test=f"{ENGINE}::test_open_data_is_read_from_the_log",
    ),
    Mutant(
        name="after a failed sync nobody is accepted any more",
        where="quiver:Appender._submit",
        old="        committer.resume()\n",
        new="",
        test=f"{INTAKE}::test_a_failed_sync_is_reported_and_the_next_bundle_is_accepted",
    ),
    Mutant(
        name="bundles of the log are renewed however old they are",
        where="quiver:Recovered.pending",
        old="if self.expired_before_ns is not None and found.entry.ingest_ns < self.expired_before_ns:",
        new="if False:",
        test=f"{ENGINE}::test_bundles_of_the_log_that_are_too_old_are_not_renewed",
    ),
    Mutant(
        name="the layout hash is a constant",
        where="quiver:layout_hash",
        old='    return hashlib.blake2b(f"{text}xxh3-64 seed 0\\n".encode(), digest_size=16).digest()\n',
        new="    return bytes(16)\n",
        test=f"{WAL}::test_the_layout_hash_follows_the_slot_table",
    ),
    Mutant(
        name="a bundle counts for one of its places",
        where="quiver:footprint",
        old="return FRAME_BYTES + (2 * byte_count if has_wal else byte_count)",
        new="return FRAME_BYTES + byte_count",
        test=f"{ADMISSION}::test_bundles_of_any_size_stay_within_the_cap",
    ),
    Mutant(
        name="the same room is given to everybody who asks",
        where="quiver:DiskSpace.reserve",
        old="        self._quota.charge(_RESERVED, self._footprint(byte_count))\n",
        new="",
        test=f"{ADMISSION}::test_space_is_reserved_once",
    ),
    Mutant(
        name="what is left of the log keeps large bundles out indefinitely",
        where="quiver:DiskSpace._cut_active_log",
        old="            self._appender.rotate()\n            self._flusher.cut_log()\n",
        new="            pass\n",
        test=f"{ADMISSION}::test_space_is_freed_without_loss_before_data_is_dropped",
    ),
    Mutant(
        name="data is dropped before the log is cut",
        where="quiver:DiskSpace._reclaim",
        old="        if self._reaper.reclaim(needed_bytes, may_drop=False):\n",
        new="        if self._reaper.reclaim(needed_bytes):\n",
        test=f"{ADMISSION}::test_space_is_freed_without_loss_before_data_is_dropped",
    ),
    Mutant(
        name="a bundle that was refused keeps its room",
        where="quiver:Quiver._accept",
        old="    finally:\n        self._core.admission.release(bundle.byte_count)\n",
        new="    finally:\n        pass\n",
        test=f"{ADMISSION}::test_a_bundle_that_is_not_accepted_releases_its_space",
    ),
    Mutant(
        name="marks of the log keep its files indefinitely",
        where="quiver:Appender.rotate",
        old="            self._committer.rotate(self._skip_marks)\n",
        new="            self._committer.rotate()\n",
        test=f"{ADMISSION}::test_marks_of_the_log_do_not_block_bundles",
    ),
    Mutant(
        name="marks from before a restart keep the log indefinitely",
        where="quiver:Core._replay",
        old="        self.memtable.add((), end=self.wal.active_start)\n",
        new="        pass\n",
        test=f"{ADMISSION}::test_an_old_log_is_removed_when_the_log_is_disabled",
    ),
    Mutant(
        name="the log of a closed directory is rotated",
        where="quiver:CloseGuard.wait_idle",
        old="self._idle.wait_for(lambda: all(one == threading.get_ident() for one in self._busy))",
        new="pass",
        test=f"{ADMISSION}::test_close_waits_for_a_thread_that_frees_space_and_admits_no_other",
    ),
    Mutant(
        name="a full device keeps the oldest from going",
        where="quiver:DiskSpace._free_log",
        old='            self._throttle.warn("cannot write open segments to free log space", error)\n',
        new="            raise\n",
        test=f"{ADMISSION}::test_a_full_device_does_not_prevent_deletion_of_the_oldest",
    ),
    Mutant(
        name="numbers begin again when the log is cut to nothing",
        where="quiver:recover",
        old=(
            "        numbers.append(replay.end)\n"
            "    found.next_wal_seq = max(offsets.state.next_wal_seq, 1 + max(numbers))\n"
        ),
        new="        pass\n    found.next_wal_seq = 1 + max(numbers)\n",
        test="tests/crash/quiver/test_admission_crash.py::test_a_crash_at_every_call_loses_and_duplicates_nothing",
    ),
    Mutant(
        name="writers that wait hold the threads that readers need",
        where="quiver:AsyncQuiver._reserve_space",
        old="admission.wait_for_quota(byte_count))",
        new="admission.wait_for_quota(byte_count, wait_s=60))",
        test=f"{ADMISSION}::test_waiting_writers_do_not_prevent_a_reader_from_freeing_space",
    ),
)
