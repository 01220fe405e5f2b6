"""Deliberate bugs in the append log and in topics; see `mutants.py`."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["TOPIC_MUTANTS"]

PROMISES = "tests/mutants/test_topic_promises.py"
LOG_SCAN = "tests/unit/storage/test_log_scan.py"
GROUP_COMMIT = "tests/unit/storage/test_group_commit.py"
WRITE = "tests/unit/topics/test_engine_write.py"
GATHERING = "tests/unit/topics/write/test_append_batches.py"
LONE_WRITE = "tests/unit/topics/write/test_lone_write.py"
RETENTION = "tests/unit/topics/test_engine_retention.py"
DURABILITY = "tests/unit/topics/test_engine_durability.py"
RECOVERY = "tests/unit/topics/checkpoints/test_recovery.py"
RELOCATION = "tests/unit/topics/checkpoints/test_cold_relocation.py"
FANOUT = "tests/unit/servers/topics/test_broadcaster.py"
DISPATCH = "tests/unit/servers/topics/test_scheduler.py"
STRONG = "tests/unit/servers/topics/test_strong_watch.py"
WEBSOCKET = "tests/unit/servers/topics/test_websocket.py"
QUEUE = "tests/unit/topics/test_engine_queue.py"
QUEUE_RESTART = "tests/unit/topics/test_engine_queue_restart.py"
LETTERS = "tests/unit/topics/queues/test_dead_letters.py"
WORK = "tests/unit/topics/queues/test_work.py"
QUEUE_FAULTS = "tests/unit/topics/queues/test_faults.py"
ROUTERS = "tests/unit/topics/routers/test_routers.py"
ROUTER_FAULTS = "tests/unit/topics/routers/test_faults.py"
ROUTER_RECOVERY = "tests/unit/topics/routers/test_recovery.py"
STEPS = "tests/unit/topics/topic/test_wall_clock_steps.py"
APPEND = "tests/unit/buffer/test_append.py"
JSON_TEXT = "tests/unit/foundation/test_jsontext.py"
BAD_SECTORS = "tests/unit/topics/segments/test_bad_sectors.py"
FILE_VIEW = "tests/unit/storage/test_file_view.py"
UNREADABLE = "tests/process/test_unreadable_records.py"
STORED = "tests/unit/topics/read/test_deep_records.py"
RELAY_DRAFT = "tests/unit/services/test_relay_batch.py"


TOPIC_MUTANTS = (
    # Damaged media
    Mutant(
        name="one bad sector costs everything that is read with it",
        where="storage:FileView._beginning",
        old="            elif stop > page_end:\n                stop = page_end\n",
        new="",
        test=f"{FILE_VIEW}::test_only_the_pages_with_a_bad_sector_are_zeros",
    ),
    Mutant(
        name="a truncated file returns fewer bytes than requested",
        where="storage:FileView.read",
        old="        data += bytes(length - len(data))\n",
        new="",
        test=f"{FILE_VIEW}::test_a_file_that_is_truncated_while_it_is_read_returns_zeros",
    ),
    Mutant(
        name="a bad sector at the end of a log is taken for a torn write",
        where="storage:_Scanner._resume",
        old="    if bad is None and not vouched",
        new="    if not vouched",
        test=f"{FILE_VIEW}::test_a_log_with_a_bad_sector_at_its_end_is_damaged_and_not_cut",
    ),
    Mutant(
        name="numbers in a part of the log that cannot be read are given out again",
        where="storage:_Scanner._resume",
        old="        end = max(min(bad[1], bound), stop + _used(view[stop:bound]))",
        new="        end = stop",
        test=f"{FILE_VIEW}::test_a_log_with_a_bad_sector_at_its_end_is_damaged_and_not_cut",
    ),
    Mutant(
        name="a log file that could not be read is removed with the others",
        where="storage:AppendLog._is_damaged",
        old="number in self._keep or (isinstance(view, FileView) and bool(view.bad))",
        new="number in self._keep",
        test=f"{BAD_SECTORS}::test_a_checkpoint_stores_readable_records_and_keeps_the_file",
    ),
    Mutant(
        name="what a broken log file cannot give back is carried over as zeros",
        where="storage:AppendLog._keep_in_memory",
        old="            self._uncarried = error",
        new="            pass",
        test=f"{BAD_SECTORS}::test_unreadable_bytes_of_a_broken_file_are_not_delivered_as_records",
    ),
    Mutant(
        name="zeros where a log was cut are given out as records",
        where="topics:_count_sound",
        old="        sound = u64[ends] != 0\n",
        new="        sound = u64[ends] == u64[ends]\n",
        test=f"{BAD_SECTORS}::test_zeros_in_a_truncated_log_are_not_delivered",
    ),
    Mutant(
        name="a log frame with a bad sector in its middle is given out",
        where="topics:_count_sound",
        old="frames.file is None or frames.file.bad:",
        new="frames.file is None:",
        test=f"{BAD_SECTORS}::test_a_record_that_is_larger_than_a_bad_sector_is_not_delivered",
    ),
    Mutant(
        name="verify stops reading a segment at its first bad sector",
        where="topics:SegmentCheck._around_bad",
        old="    if not isinstance(store, LocalSegmentStore):",
        new="    if isinstance(store, LocalSegmentStore):",
        test=f"{BAD_SECTORS}::test_verify_names_every_bad_file_and_range_and_checks_the_others",
    ),
    Mutant(
        name="a backup gives up at the first file that it cannot read",
        where="topics:_Copy._take_part",
        old="        if not isinstance(error.__cause__, MediaError):\n            raise\n",
        new="        raise\n",
        test=f"{BAD_SECTORS}::test_backup_names_every_bad_file_and_range",
    ),
    Mutant(
        name="a bad sector in a snapshot ends the start",
        where="topics:load_latest",
        old="        except (Damaged, MediaError, NotFound) as error:",
        new="        except (Damaged, NotFound) as error:",
        test=f"{BAD_SECTORS}::test_the_snapshot_before_is_used_when_the_newest_cannot_be_read",
    ),
    Mutant(
        name="a bad sector beside the log ends the start",
        where="storage:read_extent",
        old="    except MediaError:\n        return Extent(readable=False)\n",
        new="",
        test=f"{BAD_SECTORS}::test_a_start_reports_files_beside_the_log_and_does_without_them",
    ),
    Mutant(
        name="a start is silent about an extent that cannot be read",
        where="topics:_Recovery._read_log",
        old="    if not extent.readable:\n",
        new="    if False:\n",
        test=f"{BAD_SECTORS}::test_a_start_reports_files_beside_the_log_and_does_without_them",
    ),
    Mutant(
        name="fsck of a queue stops at an object that it cannot read",
        where="buffer:_side",
        old='    except errors.Corrupt as error:\n        advice = "restore',
        new='    except errors.Rejected as error:\n        advice = "restore',
        test="tests/unit/buffer/test_fsck.py::"
        "test_objects_that_the_device_cannot_read_are_named_and_the_others_are_checked",
    ),
    Mutant(
        name="inspect stops at a sidecar that it cannot read",
        where="quiver:LocalSegments._read",
        old="        except MediaError as error:\n            self._sidecars.damaged[name] = error\n",
        new="",
        test="tests/unit/quiver/segments/test_damaged_segments.py::"
        "test_an_unreadable_sidecar_is_damage_and_the_other_segments_are_listed",
    ),
    Mutant(
        name="acknowledgements that cannot be read at the end of a file are not reported",
        where="quiver:_replay_file",
        old="for start, end in view.bad]",
        new="for start, end in ()]",
        test="tests/unit/quiver/segments/test_damaged_segments.py::"
        "test_fsck_continues_after_an_unreadable_sidecar_log_and_acknowledgements",
    ),
    # Logs that lost their end
    Mutant(
        name="the extent of a log is not compared with the log",
        where="storage:lost_bytes",
        old="        if number in ends and end >= durable:\n",
        new="        if number in ends:\n",
        test=f"{RECOVERY}::test_a_log_that_ends_before_its_snapshot_is_reported_and_no_number_is_reused",
    ),
    Mutant(
        name="what a snapshot knows to be durable is not compared with the log",
        where="storage:lost_bytes",
        old="            durable = max(durable, synced.offset)\n",
        new="            durable = max(durable, 0)\n",
        test=f"{RECOVERY}::test_a_log_that_ends_before_its_snapshot_is_reported_and_no_number_is_reused",
    ),
    Mutant(
        name="the offset in the extent is not kept up to date",
        where="storage:AppendLog._reached",
        old="        self._extent.reach(self._frames_end)\n",
        new="        self._extent.reach(0)\n",
        test=f"{RECOVERY}::test_a_loss_of_records_synced_after_the_last_snapshot_is_reported",
    ),
    Mutant(
        name="numbers that were lost with the log are assigned again",
        where="topics:_Recovery._replay",
        old="        topic.log.mark_log_lost(lost)\n",
        new="",
        test=f"{RECOVERY}::test_a_log_that_ends_before_its_snapshot_is_reported_and_no_number_is_reused",
    ),
    Mutant(
        name="a log that lost all its files is no log",
        where="topics:log_groups",
        old="os.path.basename(path) in (CURRENT, EXTENT) or ",
        new="",
        test=f"{RECOVERY}::test_a_log_that_lost_all_its_files_before_the_first_snapshot_is_reported",
    ),
    Mutant(
        name="a topic that is created after a loss begins at one",
        where="topics:Catalog.create",
        old="    if self.lost_seq:\n",
        new="    if False:\n",
        test=f"{RECOVERY}::test_a_topic_whose_creation_was_lost_does_not_reuse_acknowledged_numbers",
    ),
    Mutant(
        name="the log does not keep where a topic began after a loss",
        where="topics:_Recovery._create_topics",
        old="topic.log.mark_log_lost(change.lost_seq)",
        new="pass",
        test=f"{RECOVERY}::test_a_topic_whose_creation_was_lost_does_not_reuse_acknowledged_numbers",
    ),
    Mutant(
        name="a snapshot does not keep where new topics begin after a loss",
        where="topics:store",
        old="        lost_seq=cut.lost_seq,\n",
        new="",
        test=f"{RECOVERY}::test_a_topic_whose_creation_was_lost_does_not_reuse_acknowledged_numbers",
    ),
    Mutant(
        name="lease numbers that were lost with the log are given again",
        where="topics:_Recovery._replay",
        old="    self._skip_lost_leases(topic)\n",
        new="",
        test=f"{RECOVERY}::test_no_lease_number_that_was_lost_with_the_log_is_reused",
    ),
    Mutant(
        name="a start removes segments of topics that nothing names",
        where="topics:_Recovery._check_segments",
        old="    if self._strangers and not self._problems:\n",
        new="    if False:\n",
        test=f"{RECOVERY}::test_a_start_fails_over_segments_that_neither_snapshot_nor_log_names",
    ),
    Mutant(
        name="segments are looked for only where an older snapshot has them",
        where="topics:_Recovery._from_snapshot",
        old="if self._loaded.rejected or self._has_left(entry.id, named):",
        new="if self._loaded.rejected:",
        test=f"{RECOVERY}::test_without_the_newest_snapshot_moved_segments_are_found_too",
    ),
    Mutant(
        name="a log file that could not be started costs the reserve",
        where="storage:AppendLog._start_file",
        old="            self._broken = was_broken\n",
        new="            pass\n",
        test="tests/unit/storage/test_append_log.py::"
        "test_a_device_that_fills_up_at_any_call_of_a_rotation_leaves_the_reserve",
    ),
    Mutant(
        name="a relay continues in a queue that lost its batches",
        where="services:RelayTarget._check_queue",
        old="end <= remembered.number",
        new="end < 0",
        test="tests/unit/services/test_relay_position.py::test_a_queue_rolled_back_without_its_transaction_log_is_refused",
    ),
    Mutant(
        name="a loss is forgotten when the log is opened",
        where="storage:ExtentFile.settle",
        old="        if file.end >= durable:\n",
        new="        if True:\n",
        test=f"{RECOVERY}::test_a_loss_is_known_after_a_crash_before_it_was_recorded",
    ),
    Mutant(
        name="a snapshot does not keep what was lost",
        where="topics:_capture_topic",
        old="        lost=tuple(floors.lost),\n",
        new="",
        test=f"{RECOVERY}::test_a_log_that_ends_before_its_snapshot_is_reported_and_no_number_is_reused",
    ),
    Mutant(
        name="verify takes a missing CURRENT for a part that nobody reads",
        where="topics:LogCheck._check_files",
        old="read = damage.file >= group.start.file if whole else (damage.file, damage.end) > group.start",
        new="read = damage.end is None or (damage.file, damage.end) > group.start",
        test="tests/unit/topics/tools/test_verify.py::test_a_current_that_is_missing_or_damaged_is_a_problem",
    ),
    # Clocks, keys, probes
    Mutant(
        name="a lease after a restart is not bounded by its own length",
        where="topics:LeaseTable.settle",
        old="        job.until_ms = min(job.until_ms, now_ms + (job.length_ms or LEASE_MS_MAX))\n",
        new="        job.until_ms = min(job.until_ms, now_ms + LEASE_MS_MAX)\n",
        test=f"{STEPS}::test_a_restart_with_the_clock_set_back_extends_a_lease_by_at_most_its_own_length",
    ),
    Mutant(
        name="leases end by the wall clock",
        where="clock:SteadyClock.steady_ms",
        old="    return self._start_ms + round((self._clock.monotonic() - self._start_s) * 1000)\n",
        new="    return self._clock.now_ms()\n",
        test=f"{STEPS}::test_a_lease_ends_after_its_length_whatever_the_wall_clock_says",
    ),
    Mutant(
        name="a refused router is described to any key",
        where="servers:RouterApi.put",
        old="    with contextlib.suppress(RouterNotFound):  # a refusal would reveal its topics\n",
        new="    if False:\n",
        test="tests/contract/topics/test_key_names.py"
        "::test_a_router_that_leads_outside_the_key_is_not_described_to_it",
    ),
    Mutant(
        name="a refused router tells a key the topics of a cycle outside its prefix",
        where="servers:RouterApi._redacted",
        old="    return error if all(map(principal.may_name, names)) else instead\n",
        new="    return error\n",
        test="tests/contract/topics/test_key_names.py"
        "::test_a_cycle_outside_the_key_is_refused_without_its_names",
    ),
    Mutant(
        name="a config names any topic for dead letters",
        where="topics:_finder",
        old="        return _inside if _finders(shown.cls) else None\n",
        new="        return None\n",
        test="tests/unit/servers/topics/test_names_in_requests.py::test_names_are_found_at_every_depth",
    ),
    Mutant(
        name="ready although no write succeeds",
        where="topics:WalShard._fail",
        old="        self.fault = entry.error\n",
        new="        self.fault = None\n",
        test="tests/unit/topics/test_engine_failures.py"
        "::test_a_server_whose_log_accepts_no_writes_is_not_ready_until_it_accepts_them_again",
    ),
    Mutant(
        name="a deletion on a full disk makes the server ready",
        where="topics:WalShard._decide_all",
        old="            is_ordinary = is_ordinary or not entry.urgent\n",
        new="            is_ordinary = True\n",
        test="tests/unit/topics/test_engine_failures.py"
        "::test_a_deletion_on_a_full_disk_does_not_make_the_server_ready",
    ),
    Mutant(
        name="ready although the server must be restarted",
        where="topics:WalShard._decide_all",
        old="    if is_ordinary and not self._unpublished:\n",
        new="    if is_ordinary:\n",
        test="tests/unit/topics/test_engine_failures.py::test_a_server_that_must_be_restarted_is_not_ready",
    ),
    Mutant(
        name="clients read the paths of the server",
        where="errors:public_text",
        old="            text = text.replace(path, _PLACE)\n",
        new="            pass\n",
        test="tests/unit/test_public_text.py::test_no_server_names_the_file_that_a_system_call_failed_on",
    ),
    Mutant(
        name="a path after a colon is shown",
        where="errors",
        old="|(?<=:)(?!//))/",
        new=")/",
        test="tests/unit/test_public_text.py::"
        "test_a_path_is_found_after_a_colon_and_in_directories_named_like_versions",
    ),
    # JSON that enters, and records that were stored before there were limits
    Mutant(
        name="brackets in strings count as levels",
        where="jsontext:_brackets",
        old="    places = places[np.searchsorted(quotes, places) % 2 == 0]\n",
        new="",
        test=f"{JSON_TEXT}::test_brackets_in_strings_do_not_count_as_levels",
    ),
    Mutant(
        name="an escaped quote ends a string",
        where="jsontext:_quotes",
        old="[lengths % 2 == 1]",
        new="[lengths < 0]",
        test=f"{JSON_TEXT}::test_brackets_in_strings_do_not_count_as_levels",
    ),
    Mutant(
        name="an unreadable record is passed without a dead letter",
        where="services:Relay._relay",
        old="            for bad, text in batch.dead_letters:\n",
        new="            for bad, text in batch.dead_letters[:0]:\n",
        test=f"{UNREADABLE}::test_relay_sets_unreadable_records_aside_names_them_and_moves_the_others",
    ),
    Mutant(
        name="a page with a deep record cannot be read",
        where="topics:read_list",
        old="        decoded, deep = decode_list(decoder, body)\n",
        new="        decoded, deep = decoder.decode(body), None\n",
        test=f"{UNREADABLE}::test_diff_names_unreadable_records_prints_the_others_and_ends_with_1",
    ),
    Mutant(
        name="an event with a deep record ends a watch",
        where="topics:event_of",
        old="        batch, deep = decode_list(_DECODE_RECORD, frame.data)\n",
        new="        batch, deep = _DECODE_RECORD.decode(frame.data), None\n",
        test=f"{STORED}::test_an_event_of_a_watch_has_deep_records_as_text",
    ),
    Mutant(
        name="a deep job ends its worker",
        where="topics:job_of",
        old="    except RecursionError:\n",
        new="    except ZeroDivisionError:\n",
        test=f"{STORED}::test_a_worker_gets_deep_jobs_as_text",
    ),
    Mutant(
        name="a deep job never becomes a dead letter",
        where="topics:_own",
        old="    except RecursionError:\n",
        new="    except ZeroDivisionError:\n",
        test=f"{STORED}::test_a_deep_job_becomes_a_dead_letter_with_its_meta",
    ),
    Mutant(
        name="a router stops at deep meta",
        where="topics:_members",
        old="    except RecursionError:  # stored before there was a limit on nesting\n",
        new="    except ZeroDivisionError:\n",
        test=f"{STORED}::test_a_router_gives_a_copy_of_deep_meta_its_origin",
    ),
    Mutant(
        name="a deep record ends the Spark source",
        where="spark:_read_page",
        old="        found = read_page(content)\n",
        new="        raise\n        found = read_page(content)\n",
        test=f"{STORED}::test_a_page_of_the_spark_source_has_deep_records_as_text",
    ),
    # The append log
    Mutant(
        name="ack before fsync",
        where="storage:AppendLog._write",
        old="            file.write_durably_at(self._end, buffers)\n            return\n",
        new="            file.write_at(self._end, buffers)\n            return\n",
        test=f"{DURABILITY}::test_fsync_keeps_everything_it_acknowledged",
    ),
    Mutant(
        name="a sync is taken to cover what was only written",
        where="storage:AppendLog._write",
        old="        if sync and self._durable == self._end:\n",
        new="        if sync:\n",
        test=f"{PROMISES}::test_a_sync_covers_everything_that_was_written_before_it",
    ),
    Mutant(
        name="a file is used after a failed sync",
        where="storage:AppendLog.sync",
        old="self._active().datasync()\n    except BaseException:\n        self._break()\n",
        new="self._active().datasync()\n    except BaseException:\n",
        test=f"{PROMISES}::test_a_sync_that_failed_is_not_believed_the_second_time",
    ),
    Mutant(
        name="what was delivered from a broken file is not carried over",
        where="storage:AppendLog._replace_broken",
        old="self._start_file(bytes(self._views[self._number][self._durable : self._end]), byte_count)",
        new='self._start_file(b"", byte_count)',
        test=f"{PROMISES}::test_a_sync_that_failed_is_not_believed_the_second_time",
    ),
    Mutant(
        name="a rotation without a sync of the old file",
        where="storage:AppendLog._rotate",
        old='    self.sync()\n    self._start_file(b"", byte_count)\n',
        new='    self._start_file(b"", byte_count)\n',
        test=f"{PROMISES}::test_a_rotation_leaves_nothing_behind_that_is_not_durable",
    ),
    Mutant(
        name="a log file is current before its name is durable",
        where="storage:NumberedLayout.install",
        old=(
            "    fs.rename(staged, os.path.join(directory, file_name(number)))\n    fs.sync_dir(directory)\n"
        ),
        new="    fs.rename(staged, os.path.join(directory, file_name(number)))\n",
        test=f"{PROMISES}::test_a_power_cut_never_takes_away_the_file_that_is_current",
    ),
    Mutant(
        name="marks without their salt are believed",
        where="storage:find_marks",
        old="        if value is not None and value ^ salt <= offset:\n",
        new="        if value is not None:\n",
        test=f"{LOG_SCAN}::test_bytes_of_a_record_that_look_like_marks_and_frames_are_ignored",
    ),
    Mutant(
        name="a torn tail is taken for damage",
        where="storage:_Scanner._resume",
        old="    if bad is None and not vouched and not any(position > stop for _, position in marks):\n",
        new="    if _is_zero(view[stop:bound]):\n",
        test=f"{LOG_SCAN}::test_a_torn_tail_is_cut_and_nothing_before_it_is_lost",
    ),
    Mutant(
        name="damage is taken for a torn tail",
        where="storage:_Scanner._resume",
        old="    if bad is None and not vouched and not any(position > stop for _, position in marks):\n",
        new="    if bad is None and not vouched:\n",
        test=f"{LOG_SCAN}::test_a_later_sync_confirms_earlier_writes",
    ),
    Mutant(
        name="what was built on a failed commit is committed",
        where="storage:GroupCommitter._commit",
        old="    if batch[0].generation <= self._failed:\n",
        new="    if batch[0].generation < self._failed:\n",
        test=f"{GROUP_COMMIT}::test_after_a_failure_everything_fails_until_resume",
    ),
    Mutant(
        name="a single entry overtakes queued entries",
        where="storage:GroupCommitter._commit_alone",
        old="    if not is_single or self._submitted - self._taken != 1 or not self.is_quick:\n",
        new="    if not is_single or not self.is_quick:\n",
        test=f"{GROUP_COMMIT}::test_the_order_is_kept_by_any_committing_thread",
    ),
    Mutant(
        name="a write made by who is told of another overtakes those behind it",
        where="topics:WalShard.is_quiet",
        old="    if self._waiting or self._is_deciding or self._will_hand_over",
        new="    if self._waiting or self._will_hand_over",
        test=f"{LONE_WRITE}::test_a_write_made_during_other_callbacks_does_not_overtake_their_writes",
    ),
    Mutant(
        name="lone writes never share a commit",
        where="topics:WalShard.is_quiet",
        old="self._is_deciding or self._will_hand_over or self._last_turn_count > 1:\n",
        new="self._is_deciding:\n",
        test=f"{LONE_WRITE}::test_a_second_write_of_the_same_turn_waits_for_the_others",
    ),
    Mutant(
        name="what waits never rises",
        where="topics:_Place.band_at",
        old="    aged = self.priority + _AGEING_PER_MS * min(",
        new="    aged = self.priority + 0 * min(",
        test="tests/unit/topics/schedule/test_ready_set.py::test_a_waiting_topic_rises_band_by_band_until_it_is_served",
    ),
    # Writing and reading
    Mutant(
        name="records are published before their commit",
        where="topics:Writer._submit",
        old="    frames = topic.log.moved_floors()\n    reserved = 0\n",
        new="    topic.keep_in_memory(batch, now_ms=0)\n    frames, reserved = [], 0\n",
        test=f"{WRITE}::test_nothing_is_visible_before_its_commit[fsync]",
    ),
    Mutant(
        name="a write among others of its turn is published in part",
        where="topics:_encode_alike",
        old="    flags = own | common | MORE\n",
        new="    flags = own | common\n",
        test=f"{GATHERING}::test_a_torn_commit_keeps_whole_writes_only[60]",
    ),
    Mutant(
        name="a change overtakes the writes of its turn",
        where="topics:WalShard.submit",
        old="    if self._deferred:\n        self.flush_pending()\n",
        new="",
        test=f"{GATHERING}::test_a_change_in_the_same_turn_follows_the_writes_in_the_log",
    ),
    Mutant(
        name="what was gathered outlives a failure that it built on",
        where="topics:WalShard._fail",
        old="            self.flush_pending()  # they depend on the failed entry as well\n",
        new="",
        test=f"{GATHERING}::test_writes_that_are_gathered_when_a_commit_fails_fail_with_it",
    ),
    Mutant(
        name="sequences are not taken back after a failed commit",
        where="topics:WalShard._fail",
        old="            self.on_failure(self)\n",
        new="",
        test=f"{PROMISES}::test_after_a_failed_commit_the_next_write_takes_its_sequences",
    ),
    Mutant(
        name="a key is unknown while its write is under way",
        where="topics:Writer.append",
        old="    if topic is not None and (key is None or key not in topic.writing):\n",
        new="    if topic is not None:\n",
        test=f"{WRITE}::test_concurrent_writes_with_one_key_append_once",
    ),
    Mutant(
        name="a reservation is not synced",
        where="topics:Writer._submit",
        old="        sync=gathered.durability in _SYNCED or reserved > 0,\n",
        new="        sync=gathered.durability in _SYNCED,\n",
        test=f"{DURABILITY}::test_disk_reserves_before_it_runs_out",
    ),
    Mutant(
        name="a reader that waits is not woken",
        where="topics:Topic.publish",
        old="    self.subscribers.notify()\n",
        new="",
        test=f"{PROMISES}::test_a_reader_that_waits_is_woken_by_what_is_published",
    ),
    # Retention and deletion
    Mutant(
        name="nothing is logged of what expired",
        where="topics:TopicLog.moved_floors",
        old="    if now == self._logged_floors or not self._has_logged_records():\n",
        new="    if now:\n",
        test=f"{PROMISES}::test_what_had_expired_does_not_come_back_with_a_longer_life",
    ),
    Mutant(
        name="a deletion moves the floor",
        where="topics:TopicLog.delete",
        old="        self.delete_below = max(self.delete_below, before)\n",
        new=(
            "        self.delete_below = max(self.delete_below, before)\n"
            "        self.floors.raise_cap(removed)\n"
        ),
        test=f"{RETENTION}::test_a_deletion_never_causes_a_tombstone",
    ),
    Mutant(
        name="a cap counts sequences",
        where="topics:TopicLog.retain",
        old=(
            "        if config.cap_records and index.live > config.cap_records:\n"
            "            removed += self._record(index.evict_to_count(config.cap_records), "
        ),
        new=(
            "        if config.cap_records:\n"
            "            oldest_seq = index.head_seq + 1 - config.cap_records\n"
            "            removed += self._record(index.delete_prefix(oldest_seq), "
        ),
        test=f"{RETENTION}::test_the_cap_counts_live_records_not_sequences",
    ),
    Mutant(
        name="a topic that rejects is evicted from",
        where="topics:TopicLog.retain",
        old='    if config.discard == "old":\n',
        new="    if config.discard:\n",
        test=f"{RETENTION}::test_a_topic_that_rejects_is_never_evicted_from",
    ),
    # Checkpoints
    Mutant(
        name="a snapshot names records that are not durable",
        where="topics:LocalSegmentStore._continue",
        old="        file.write(buffers)\n        file.datasync()\n",
        new="        file.write(buffers)\n",
        test=f"{PROMISES}::test_everything_that_a_snapshot_names_survives_a_power_cut",
    ),
    Mutant(
        name="log files go before the snapshot that does without them",
        where="topics:Maintenance._store",
        old="    self._retract()\n    try:\n",
        new=(
            "    self._retract()\n"
            "    for folder, shard in zip(self._folders, self._wal.shards, strict=True):\n"
            "        shard.log.drop_before(cut.wal[folder].file)\n"
            "    try:\n"
        ),
        test=f"{PROMISES}::test_the_log_is_there_until_the_snapshot_that_does_without_it_is_durable",
    ),
    Mutant(
        name="log files go that the snapshot before still needs",
        where="topics:Maintenance._make",
        old="    needed, self._needed = self._needed, cut.wal\n",
        new="    needed = self._needed = cut.wal\n",
        test=f"{RECOVERY}::test_an_unreadable_snapshot_is_reported_and_the_previous_one_is_used",
    ),
    Mutant(
        name="deletions stay in the log",
        where="topics:store",
        old="        _store_deletions(topic_cut, tier)\n",
        new="",
        test=f"{PROMISES}::test_a_deletion_outlives_the_log_that_told_of_it",
    ),
    Mutant(
        name="hot records go before it is known that they are cold",
        where="topics:store",
        old="        _record_moves(topic_cut, copied)\n",
        new=(
            "        _record_moves(topic_cut, copied)\n"
            "        for entry in topic_cut.moved:\n"
            "            tier.drop_hot(entry)\n"
        ),
        test=f"{RELOCATION}::test_hot_data_stays_until_the_snapshot_that_says_cold_is_durable",
    ),
    # Recovery
    Mutant(
        name="half of a write is recovered",
        where="topics:_Recovery._read_log",
        old="    found = _without_half_writes(found)\n",
        new="",
        test=f"{RECOVERY}::test_an_incomplete_write_is_cut_off",
    ),
    Mutant(
        name="an old log that no snapshot names is replayed",
        where="topics:_Recovery.run",
        old="    groups = [group for group in there if not self._is_covered(group)]\n",
        new="    groups = list(there)\n",
        test=f"{RECOVERY}::test_an_old_config_does_not_come_back_with_an_old_log[0]",
    ),
    # From a topic into a queue, and through Spark
    Mutant(
        name="two relays at once both append",
        where="buffer:TransactionGuard.is_committed",
        old="    if last != version and self._follows is not None:\n",
        new="    if last is None and self._follows is not None:\n",
        test=f"{APPEND}::test_a_competing_write_that_wins_the_swap_is_detected",
    ),
    Mutant(
        name="a relay passes over a gap in silence",
        where="services:RelayBatch._gap",
        old='    if self.on_gap == "fail":\n',
        new='    if self.on_gap == "never":\n',
        test=f"{RELAY_DRAFT}::test_a_gap_fails_and_leaves_the_batch_unchanged",
    ),
    Mutant(
        name="a relay takes a new topic for the old one with a gap",
        where="services:RelayBatch._gap",
        old='    if tombstone.reason == "recreated" or page.next_from_seq < self.through:\n',
        new="    if page.next_from_seq < 0:\n",
        test=f"{RELAY_DRAFT}::test_a_topic_that_starts_over_is_never_a_gap",
    ),
    Mutant(
        name="a relay does not look whether the last record is still the same",
        where="services:Relay._check_identity",
        old="found.seq == known.seq and found.ts_ms != known.ts_ms:\n",
        new="found.seq != known.seq and found.ts_ms != known.ts_ms:\n",
        test="tests/process/test_relay.py::test_a_topic_that_was_made_anew_is_noticed",
    ),
    Mutant(
        name="an idempotency key for whatever rows come the second time",
        where="spark:chunk_key",
        old="    digest.update(body)\n",
        new="",
        test="tests/unit/spark/sinks/test_topic.py::test_a_key_differs_by_step_and_contents_and_fits",
    ),
    # Queues
    Mutant(
        name="a token is not compared",
        where="topics:LeaseTable.leased",
        old="    return job if not lease_id or lease_id == job.lease_id else None\n",
        new="    return job\n",
        test=f"{QUEUE}::test_a_stale_lease_id_acks_nothing",
    ),
    Mutant(
        name="anybody may ack a job that is held",
        where="topics:LeaseTable.leased",
        old="    if job is None or job.state != LEASED or job.node != node:\n",
        new="    if job is None or job.state != LEASED:\n",
        test=f"{QUEUE}::test_an_ack_permanently_deletes_only_jobs_that_the_node_holds",
    ),
    Mutant(
        name="a lease runs out while its ack is being committed",
        where="topics:LeaseTable.leave",
        old="    self._set(seq, job, LEAVING)\n",
        new="    pass\n",
        test=f"{QUEUE}::test_a_job_whose_ack_is_being_committed_is_not_delivered",
    ),
    Mutant(
        name="lease numbers are given out before they are reserved",
        where="topics:LeaseAllocator._begin_to_reserve",
        old="    queue.reserving = topic.commit([frame], apply=apply, sync=True)\n",
        new="    apply()\n    queue.reserving = topic.commit([], sync=False)\n",
        test=f"{QUEUE_RESTART}::test_a_lease_number_is_never_reused",
    ),
    Mutant(
        name="a job is deleted before its dead letter is durable",
        where="topics:DeadLetters._move_one",
        old="        await letters.sync()\n",
        new="        pass\n",
        test=f"{LETTERS}::test_after_a_power_failure_at_any_point_the_job_is_in_the_queue_or_the_dead_letters",
    ),
    Mutant(
        name="a claim that failed keeps its jobs",
        where="topics:LeaseAllocator.claim",
        old="    except BaseException:\n        self.release(topic, queue, requests)\n",
        new="    except BaseException:\n",
        test=f"{QUEUE_RESTART}::test_a_durable_claim_that_cannot_be_logged_delivers_nothing",
    ),
    Mutant(
        name="a worker is not woken when a job comes back",
        where="topics:Queues.nack",
        old="    queue.returned.notify()\n    await self._log(LeaseEvent.RELEASED, topic, [job.at(seq)",
        new="    await self._log(LeaseEvent.RELEASED, topic, [job.at(seq)",
        test=f"{WORK}::test_a_waiting_stream_is_woken_immediately",
    ),
    Mutant(
        name="a stream that hangs is given jobs indefinitely",
        where="topics:WorkerSession.takes_jobs",
        old="    return self.is_open and not self.expired\n",
        new="    return self.is_open\n",
        test=f"{WORK}::test_another_node_does_not_keep_a_stream_alive",
    ),
    Mutant(
        name="a worker that is late is never heard again",
        where="topics:LeaseTable.hear",
        old="        session.expired.clear()\n        self._unresponsive.discard(session)\n    return",
        new="        pass\n    return",
        test=f"{WORK}::test_a_late_worker_continues_after_its_next_message",
    ),
    Mutant(
        name="one stream of a node answers for the others",
        where="topics:LeaseTable._is_from",
        old="    return session.lost(seq, lease_id) if job is None else job.session is session\n",
        new="    return job is not None or session.lost(seq, lease_id)\n",
        test=f"{WORK}::test_a_stream_that_hangs_is_not_mistaken_for_another_one_of_the_same_node",
    ),
    Mutant(
        name="jobs are dealt to a stream that is gone",
        where="topics:ClaimRequest.missing",
        old="    is_active = not self.has_left and (self.session is None or self.session.takes_jobs)\n",
        new="    is_active = True\n",
        test=f"{WORK}::test_a_stream_that_closes_while_its_claim_batch_is_served_holds_nothing",
    ),
    Mutant(
        name="what was dealt to somebody who left stays with it",
        where="topics:Queues._join",
        old="        self._allocator.release(topic, queue, [request])\n",
        new="",
        test=f"{WORK}::test_jobs_of_a_client_that_left_before_the_response_are_returned",
    ),
    Mutant(
        name="a snapshot does not know of claims that were not logged",
        where="topics:Topic.version",
        old=" if self.queue is None else self.log.version + self.queue.leases.version",
        new="",
        test=f"{QUEUE_RESTART}::test_a_claim_after_a_checkpoint_is_in_the_next_snapshot",
    ),
    Mutant(
        name="leases come back that ended while they were not durable",
        where="topics:_Recovery._control",
        old="                topic.queue.leases.end_leases()\n",
        new="                pass\n",
        test=f"{QUEUE_FAULTS}::test_a_crash_before_current_leases_are_logged_brings_back_no_ended_ones",
    ),
    Mutant(
        name="leases that are held when they become durable are not logged",
        where="topics:Catalog._reconfigure.apply",
        old="        logged.extend(log_leases(topic, now_ms))\n",
        new="        pass\n",
        test=f"{QUEUE_FAULTS}::test_current_leases_become_durable_with_the_config_even_if_its_caller_is_cancelled",
    ),
    Mutant(
        name="a stop does not wait for dead letters",
        where="topics:Engine.close",
        old="        await self._queues.settle()\n",
        new="        pass\n",
        test=f"{QUEUE_FAULTS}::test_a_stop_waits_for_dead_letters_that_are_being_written",
    ),
    Mutant(
        name="a claim that failed counts as a delivery",
        where="topics:LeaseTable.give_back",
        old="    job.deliveries -= 1\n",
        new="    pass\n",
        test=f"{QUEUE_FAULTS}::test_a_claim_that_cannot_be_logged_does_not_count_as_a_delivery",
    ),
    Mutant(
        name="a letter that is refused is tried first indefinitely",
        where="topics:LeaseTable._park",
        old="    self._stuck.append(seq)\n",
        new="    self._stuck.appendleft(seq)\n",
        test=f"{QUEUE_FAULTS}::test_an_unreadable_job_does_not_block_other_letters",
    ),
    Mutant(
        name="jobs that are evicted stay in the table",
        where="topics:LeaseTable.refresh",
        old="        self._drop(heappop(lows))\n",
        new="        heappop(lows)\n",
        test=f"{QUEUE_FAULTS}::test_jobs_removed_from_the_front_are_dropped_without_a_scan_of_the_others",
    ),
    # Routers
    Mutant(
        name="a cut is taken while copies are on their way",
        where="topics:Maintenance._make",
        old="    async with self._routing.still():\n        cut = self._capture(last)\n",
        new="    cut = self._capture(last)\n",
        test=f"{ROUTER_RECOVERY}::test_a_checkpoint_waits_for_copies_in_flight",
    ),
    Mutant(
        name="a durable copy refers to a source that is not",
        where="topics:_is_referable",
        old="    if durability not in _REFERABLE or (dest.config.durable and not source.config.durable):\n",
        new="    if durability not in _REFERABLE:\n",
        test=f"{ROUTER_RECOVERY}::test_a_durable_copy_of_a_less_durable_source_is_stored_by_value",
    ),
    Mutant(
        name="the log takes a cursor forward again that went back",
        where="topics:_Recovery.run",
        old="        moved=self._has_moved() or self._routers.lowered or any(self._lost.values()),\n",
        new="        moved=self._has_moved() or any(self._lost.values()),\n",
        test=f"{ROUTER_RECOVERY}::test_a_cursor_that_is_ahead_of_its_source_goes_back_permanently",
    ),
    Mutant(
        name="a cursor counts without the copies behind it",
        where="topics:CopyFrame.frame",
        old="flags=MORE if follows else 0",
        new="flags=0",
        test=f"{ROUTER_RECOVERY}::test_a_cursor_is_truncated_together_with_its_incomplete_copies",
    ),
    Mutant(
        name="the segments of a deleted source go before its copies have some",
        where="topics:Maintenance.remove_files",
        old="    if topic.is_referred:\n",
        new="    if False:\n",
        test=f"{ROUTERS}::test_the_segments_of_a_deleted_source_stay_until_its_copies_are_stored",
    ),
    Mutant(
        name="a full destination is passed over",
        where="topics:_take",
        old="            picked.blocked, picked.cursor = True, seq - 1\n            return False\n",
        new="            picked.cursor = seq\n            continue\n",
        test=f"{ROUTERS}::test_a_full_destination_delays_the_router_and_loses_nothing",
    ),
    Mutant(
        name="a start forgets that a source is referred to by routers",
        where="topics:_Recovery.run",
        old="        self._topics[source_id].is_referred = True\n",
        new="        pass\n",
        test=f"{ROUTER_FAULTS}::test_a_source_deleted_after_a_restart_stays_until_its_copies_are_stored",
    ),
    Mutant(
        name="copies of a disk router whose originals are gone are passed over in silence",
        where="topics:_Recovery._lose_copies",
        old="is not Durability.FSYNC and not was_stored:",
        new="is not Durability.FSYNC:",
        test=f"{ROUTER_FAULTS}::test_a_copy_whose_original_was_in_a_missing_segment_is_reported",
    ),
    Mutant(
        name="a reader gives up on a router that ended before the last record came",
        where="topics:Routing.catch_up",
        old="        if router.cursor == before and not _reached_target(task):\n",
        new="        if router.cursor == before:\n",
        test=f"{ROUTER_FAULTS}::test_a_write_in_the_commit_of_a_pass_is_in_the_next_diff",
    ),
    Mutant(
        name="a backup leaves the originals of routers out",
        where="topics:_Copy.take",
        old="    for topic_id in missing.keys() - left_out:\n",
        new="    for topic_id in missing.keys() - removed:\n",
        test=f"{ROUTER_FAULTS}::test_a_backup_waits_for_a_snapshot_that_does_not_need_missing_originals",
    ),
    Mutant(
        name="a pass of a router looks at everything there is",
        where="topics:select",
        old="        left -= stop - start\n",
        new="",
        test=f"{ROUTER_FAULTS}::test_a_pass_that_copies_nothing_examines_few_records_and_yields",
    ),
    Mutant(
        name="copies of routers gather in memory without a bound",
        where="topics:ReplicaMemoryLimit.has_room",
        old="    return self._total < self._bound\n",
        new="    return True\n",
        test=f"{ROUTER_FAULTS}::test_copies_wait_in_the_source_when_checkpoints_fail",
    ),
    Mutant(
        name="a router without room tries at every tick",
        where="topics:RouterBackoff.fail",
        old="min(2 * self._pauses.get(router, REST_MIN_S / 2), REST_MAX_S)",
        new="REST_MIN_S",
        test=f"{ROUTER_FAULTS}::test_a_router_without_room_backs_off",
    ),
    Mutant(
        name="a router that rests does not see that there is room",
        where="topics:RouterBackoff.due",
        old="        if until_s <= now_s or look != _look(router)\n",
        new="        if until_s <= now_s\n",
        test=f"{ROUTER_FAULTS}::test_a_destination_that_gets_room_is_served_by_the_next_tick",
    ),
    Mutant(
        name="a router that went with its topic is changed",
        where="topics:RouterRegistry._record.apply",
        old="    if source.deleted or dest.deleted or (known is not None and known.stopped):\n",
        new="    if source.deleted or dest.deleted:\n",
        test=f"{ROUTER_FAULTS}::test_a_change_that_is_decided_after_its_topic_was_deleted_is_refused",
    ),
    Mutant(
        name="lost ranges of routers gather in a queue",
        where="topics:TopicLog.mark_lost",
        old="    self.trims.fold(self.floors, self.index.earliest_seq)\n",
        new="",
        test=f"{ROUTER_FAULTS}::test_lost_ranges_of_a_queue_do_not_accumulate",
    ),
    Mutant(
        name="what a router lost becomes rows",
        where="topics:TopicIndex.stretches",
        old="        if low - end - 1 <= HOLE_ROWS_MAX:\n",
        new="        if True:\n",
        test=f"{ROUTER_FAULTS}::test_ranges_lost_between_live_records_take_no_segment_rows",
    ),
    # Live delivery
    Mutant(
        name="a watcher whose connection was full is forgotten",
        where="servers:Subscriber.writable",
        old="subscription.feed.is_gone:\n            self.broadcaster.put(subscription)\n",
        new="subscription.feed.is_gone:\n            pass\n",
        test=f"{FANOUT}::test_nothing_is_written_to_a_connection_that_is_full_and_everything_when_it_is_not",
    ),
    Mutant(
        name="a full connection is written to all the same",
        where="servers:Subscription.visit",
        old="    if self.is_over or not subscriber.is_writable:\n",
        new="    if self.is_over:\n",
        test=f"{FANOUT}::test_nothing_is_written_to_a_connection_that_is_full_and_everything_when_it_is_not",
    ),
    Mutant(
        name="a watcher behind the head waits for the next publish",
        where="servers:Subscription.take",
        old="    if page.to_seq != end_seq:\n        subscriber.continue_later(self)\n",
        new="    if page.to_seq != end_seq:\n        pass\n",
        test=f"{FANOUT}::test_a_turn_ends_at_its_byte_limit",
    ),
    Mutant(
        name="what was read for one turn is sent in the next",
        where="servers:Broadcaster._turn",
        old="    turn.end()\n",
        new="    turn.size = 0\n",
        test=f"{FANOUT}::test_a_record_deleted_after_delivery_to_others_is_not_sent_from_memory",
    ),
    Mutant(
        name="the last event id takes a client forward",
        where="servers:Session.rewind",
        old="min(place.cursor, seen.get(name, place.cursor))",
        new="seen.get(name, place.cursor)",
        test=f"{FANOUT}::test_an_id_only_moves_a_client_back",
    ),
    # Scheduling
    Mutant(
        name="what is put off is forgotten",
        where="servers:DeliveryScheduler.end",
        old="    if len(self._ready):\n        self._check_soon()\n",
        new="",
        test=f"{DISPATCH}::test_deferred_topics_are_delivered_completely_when_the_pressure_falls",
    ),
    Mutant(
        name="what waits for more of its own is forgotten",
        where="servers:Delays._wait",
        old="                self._back(item)\n",
        new="",
        test=f"{DISPATCH}::test_under_pressure_a_recently_served_topic_is_coalesced",
    ),
    Mutant(
        name="priorities do not matter",
        where="servers:DeliveryScheduler._enter",
        old="    self._ready.mark(channel, channel.priority, self._now_ms())\n",
        new="    self._ready.mark(channel, 0, self._now_ms())\n",
        test=f"{DISPATCH}::test_the_most_urgent_topic_goes_first",
    ),
    Mutant(
        name="that topics are put off is a reason to put off more",
        where="servers:DeliveryScheduler.take",
        old="    if channel.priority >= 0:\n",
        new="    if True:\n",
        test=f"{DISPATCH}::test_wait_times_are_reported_unless_the_topic_was_deferred",
    ),
    # Origins
    Mutant(
        name="an origin in the destination is not looked for",
        where="topics:_take",
        old="is_once and router.dedup_window.takes(seq, router.dest)",
        new="False",
        test=f"{ROUTERS}::test_exactly_once_makes_no_copy_whose_origin_is_in_the_destination",
    ),
    Mutant(
        name="the origin of a deleted record keeps a copy away",
        where="topics:DedupWindow.takes",
        old="return place is not None and dest.log.index.locate(place) is not None",
        new="return place is not None",
        test=f"{ROUTERS}::test_a_deleted_origin_does_not_prevent_a_copy",
    ),
    Mutant(
        name="a pass that failed forgets the origins that it met",
        where="topics:DedupWindow.takes",
        old="self._places.get(source_seq)",
        new="self._places.pop(source_seq, None)",
        test=f"{ROUTERS}::test_an_origin_counts_even_after_a_failed_pass",
    ),
    Mutant(
        name="topics that appeared while a watch was cut off begin at their head",
        where="topics:_Watching._create",
        old="        self._body.topics[name] = _Start()\n",
        new="        pass\n",
        test="tests/unit/topics/client/test_watch.py"
        "::test_topics_that_appeared_before_the_first_event_are_not_skipped",
    ),
    # Synced records only
    Mutant(
        name="what is not synced is pushed",
        where="topics:DurableWatermark.ask",
        old="    self._asked_seq = topic.log.index.head_seq\n    self._pending,",
        new="    self._synced_seq = self._asked_seq = topic.log.index.head_seq\n    self._pending,",
        test=f"{STRONG}::test_a_record_is_pushed_as_soon_as_it_is_synced",
    ),
    Mutant(
        name="a sync counts for what came behind it",
        where="topics:DurableWatermark._decided",
        old="        self._synced_seq = self._asked_seq\n",
        new="        self._synced_seq = self._topic.index.head_seq\n",
        test=f"{STRONG}::test_records_written_after_the_sync_wait_for_the_next_one",
    ),
    Mutant(
        name="a sync that failed counts",
        where="topics:DurableWatermark.failed",
        old="    self._failed = True\n",
        new="    self._failed = False\n",
        test=f"{STRONG}::test_a_failed_sync_is_retried_after_a_second_and_nothing_is_pushed_before",
    ),
    Mutant(
        name="a copy counts as synced before its source is",
        where="topics:DurableWatermark.ask",
        old="self._shards if topic.log.has_chunks else (topic.shard,)",
        new="(topic.shard,)",
        test=f"{STRONG}::test_a_copy_waits_for_the_sync_of_its_original",
    ),
    Mutant(
        name="a page continues after its bound",
        where="topics:PageCursor.step",
        old="    bound = self._last_seq() + 1\n",
        new="    bound = self._index.head_seq + 1\n",
        test="tests/unit/topics/read/test_bounded_pages.py::test_pages_up_to_a_bound_equal_unbounded_pages_cut_off_there",
    ),
    Mutant(
        name="publishes overtake one that has no place yet",
        where="servers:WebSocket._is_full",
        old="        self._barrier is not None\n        or ",
        new="        ",
        test=f"{WEBSOCKET}::test_publishes_keep_their_order_whether_or_not_they_have_a_key",
    ),
)
