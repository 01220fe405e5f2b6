"""Deliberate bugs in the append log and in topics; see `mutants.py`."""

from __future__ import annotations

from tests.mutants.mutants import Mutant

__all__ = ["TOPIC_MUTANTS"]

PROMISES = "tests/mutants/test_topic_promises.py"
LOG_SCAN = "tests/unit/files/test_log_scan.py"
GROUP_COMMIT = "tests/unit/files/test_group_commit.py"
WRITE = "tests/unit/topics/test_engine_write.py"
RETENTION = "tests/unit/topics/test_engine_retention.py"
DURABILITY = "tests/unit/topics/test_engine_durability.py"
RECOVERY = "tests/unit/topics/test_recovery.py"
RELOCATION = "tests/unit/topics/test_cold_relocation.py"


TOPIC_MUTANTS = (
    # The append log
    Mutant(
        name="ack before fsync",
        file="files/append_log.py",
        old="                file.write_durably_at(self._end, buffers)\n                return\n",
        new="                file.write_at(self._end, buffers)\n                return\n",
        test=f"{DURABILITY}::test_fsync_keeps_everything_it_acknowledged",
    ),
    Mutant(
        name="a sync is taken to cover what was only written",
        file="files/append_log.py",
        old="            if sync and self._durable == self._end:\n",
        new="            if sync:\n",
        test=f"{PROMISES}::test_a_sync_covers_everything_that_was_written_before_it",
    ),
    Mutant(
        name="a file goes on after a failed sync",
        file="files/append_log.py",
        old="self._active().datasync()\n        except BaseException:\n            self._break()\n",
        new="self._active().datasync()\n        except BaseException:\n",
        test=f"{PROMISES}::test_a_sync_that_failed_is_not_believed_the_second_time",
    ),
    Mutant(
        name="what was delivered from a broken file is not carried over",
        file="files/append_log.py",
        old="self._start_file(bytes(self._views[self._number][self._durable : self._end]), byte_count)",
        new='self._start_file(b"", byte_count)',
        test=f"{PROMISES}::test_a_sync_that_failed_is_not_believed_the_second_time",
    ),
    Mutant(
        name="a rotation without a sync of the old file",
        file="files/append_log.py",
        old='        self.sync()\n        self._start_file(b"", byte_count)\n',
        new='        self._start_file(b"", byte_count)\n',
        test=f"{PROMISES}::test_a_rotation_leaves_nothing_behind_that_is_not_durable",
    ),
    Mutant(
        name="a log file is current before its name is durable",
        file="files/append_log.py",
        old="            self._fs.rename(staged, path)\n            self._fs.sync_dir(self._directory)\n",
        new="            self._fs.rename(staged, path)\n",
        test=f"{PROMISES}::test_a_power_cut_never_takes_away_the_file_that_is_current",
    ),
    Mutant(
        name="marks without their salt are believed",
        file="files/log_file.py",
        old="        if value is not None and value ^ salt <= offset:\n",
        new="        if value is not None:\n",
        test=f"{LOG_SCAN}::test_bytes_of_a_record_that_look_like_marks_and_frames_are_not_taken_for_them",
    ),
    Mutant(
        name="a torn tail is taken for damage",
        file="files/log_scan.py",
        old="        if not vouched and not any(position > stop for _, position in marks):\n",
        new="        if _is_zero(self._views[number][stop:bound]):\n",
        test=f"{LOG_SCAN}::test_a_torn_tail_is_cut_and_nothing_before_it_is_lost",
    ),
    Mutant(
        name="damage is taken for a torn tail",
        file="files/log_scan.py",
        old="        if not vouched and not any(position > stop for _, position in marks):\n",
        new="        if not vouched:\n",
        test=f"{LOG_SCAN}::test_a_later_sync_vouches_for_what_was_only_written",
    ),
    Mutant(
        name="what was built on a failed commit is committed",
        file="files/group_commit.py",
        old="        if batch[0].generation <= self._failed:\n",
        new="        if batch[0].generation < self._failed:\n",
        test=f"{GROUP_COMMIT}::test_after_a_failure_everything_fails_until_it_is_resumed",
    ),
    # Writing and reading
    Mutant(
        name="records are published before their commit",
        file="topics/writing.py",
        old="        topic.take_off(batch)\n        self._catalog.tally(topic)\n        return append\n",
        new="        topic.take_off(batch)\n        topic.keep_in_memory(batch, now_ms=now_ms)\n"
        "        return append\n",
        test=f"{WRITE}::test_nothing_is_visible_before_its_commit[fsync]",
    ),
    Mutant(
        name="sequences are not taken back after a failed commit",
        file="topics/journal.py",
        old="                self.on_failure(self)\n",
        new="",
        test=f"{PROMISES}::test_after_a_failed_commit_the_next_write_takes_its_sequences",
    ),
    Mutant(
        name="a key is unknown while its write is under way",
        file="topics/writing.py",
        old="            if key is None:\n                return await self._append(",
        new="            if key is None or key in topic.writing:\n                return await self._append(",
        test=f"{WRITE}::test_concurrent_writes_with_one_key_append_once",
    ),
    Mutant(
        name="a reservation is not synced",
        file="topics/writing.py",
        old="            sync=sync or reserved > 0,\n",
        new="            sync=sync,\n",
        test=f"{DURABILITY}::test_disk_reserves_before_it_runs_out",
    ),
    Mutant(
        name="a reader that waits is not woken",
        file="topics/topic.py",
        old="        self.retain(now_ms)\n        self.waiters.wake()\n",
        new="        self.retain(now_ms)\n",
        test=f"{PROMISES}::test_a_reader_that_waits_is_woken_by_what_is_published",
    ),
    # Retention and deletion
    Mutant(
        name="nothing is logged of what expired",
        file="topics/topic.py",
        old="        if now == self._logged_floors or not self._kept_something():\n",
        new="        if now:\n",
        test=f"{PROMISES}::test_what_had_expired_does_not_come_back_with_a_longer_life",
    ),
    Mutant(
        name="a deletion moves the floor",
        file="topics/topic.py",
        old="            self.delete_below = max(self.delete_below, before)\n",
        new="            self.delete_below = max(self.delete_below, before)\n"
        "            self.floors.raise_cap(removed)\n",
        test=f"{RETENTION}::test_deleting_never_makes_a_tombstone",
    ),
    Mutant(
        name="a cap counts sequences",
        file="topics/topic.py",
        old="            if config.cap_records and index.live > config.cap_records:\n"
        "                removed += self._note(index.evict_to_count(config.cap_records), ",
        new="            if config.cap_records:\n"
        "                oldest_seq = index.head_seq + 1 - config.cap_records\n"
        "                removed += self._note(index.delete_prefix(oldest_seq), ",
        test=f"{RETENTION}::test_the_cap_counts_live_records_not_sequences",
    ),
    Mutant(
        name="a topic that rejects is evicted from",
        file="topics/topic.py",
        old='        if config.discard == "old":\n',
        new="        if config.discard:\n",
        test=f"{RETENTION}::test_a_topic_that_rejects_is_never_evicted_from",
    ),
    # Checkpoints
    Mutant(
        name="a snapshot names records that are not durable",
        file="topics/segment_store.py",
        old="            file.write(buffers)\n            file.datasync()\n",
        new="            file.write(buffers)\n",
        test=f"{PROMISES}::test_everything_that_a_snapshot_names_survives_a_power_cut",
    ),
    Mutant(
        name="log files go before the snapshot that does without them",
        file="topics/upkeep.py",
        old="        self._retract()\n        try:\n",
        new="        self._retract()\n"
        "        for folder, shard in zip(self._folders, self._journal.shards, strict=True):\n"
        "            shard.log.drop_before(cut.wal[folder].file)\n"
        "        try:\n",
        test=f"{PROMISES}::test_the_log_is_there_until_the_snapshot_that_does_without_it_is_durable",
    ),
    Mutant(
        name="log files go that the snapshot before still needs",
        file="topics/upkeep.py",
        old="        needed, self._needed = self._needed, cut.wal\n",
        new="        needed = self._needed = cut.wal\n",
        test=f"{RECOVERY}::test_a_snapshot_that_cannot_be_read_is_told_and_the_one_before_serves",
    ),
    Mutant(
        name="deletions stay in the log",
        file="topics/checkpoint.py",
        old="        _store_deletions(topic_cut, tier)\n",
        new="",
        test=f"{PROMISES}::test_a_deletion_outlives_the_log_that_told_of_it",
    ),
    Mutant(
        name="hot records go before it is known that they are cold",
        file="topics/checkpoint.py",
        old="        _record_moves(topic_cut, copied)\n",
        new="        _record_moves(topic_cut, copied)\n"
        "        for entry in topic_cut.moved:\n            tier.drop_hot(entry)\n",
        test=f"{RELOCATION}::test_hot_data_stays_until_the_snapshot_that_says_cold_is_durable",
    ),
    # Recovery
    Mutant(
        name="half of a write is recovered",
        file="topics/recovery.py",
        old="        found = _without_half_writes(found)\n",
        new="",
        test=f"{RECOVERY}::test_half_a_write_is_cut_off",
    ),
    Mutant(
        name="an old log that no snapshot names is replayed",
        file="topics/recovery.py",
        old="        groups = [group for group in there if not self._is_covered(group)]\n",
        new="        groups = list(there)\n",
        test=f"{RECOVERY}::test_an_old_config_does_not_come_back_with_an_old_log[0]",
    ),
)
