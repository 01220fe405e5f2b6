"""Deliberate bugs of the buffer, of pipelines, and of what every package stands on."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

PROMISES = "tests/mutants/test_promises.py"
FAULTS = "tests/crash/test_buffer_faults.py"
TRANSACTIONS = "tests/crash/test_transaction_faults.py"
LOCAL_CRASH = "tests/crash/test_local_store_crash.py"
LOST = "tests/unit/buffer/test_lost_manifest.py"
FILE_ACCESS = "tests/process/test_file_access.py"


def _promise(test: str) -> str:
    return f"{PROMISES}::{test}"


MUTANTS = (
    # Publishing
    Mutant(
        name="ack before the manifest is written",
        where="buffer:Producer._commit",
        old="        landed = await self._appender.append(uploads)\n",
        new=(
            "        for upload in uploads:\n"
            "            self._settle(upload, WriteOutcome(sequence=0))\n"
            "        landed = await self._appender.append(uploads)\n"
        ),
        test=_promise("test_an_ack_comes_after_the_manifest_write"),
    ),
    Mutant(
        name="a new name counts before anything is stored under it",
        where="buffer:BatchUpload._put",
        old="    await retry(lambda: self._store.put(location, parts),",
        new=(
            "    self.minted_ms, self.location, self._stored_at = minted_ms, location, started\n"
            "    await retry(lambda: self._store.put(location, parts),"
        ),
        test=_promise("test_a_batch_that_could_not_be_stored_anew_is_never_referenced"),
    ),
    Mutant(
        name="reference before the data is stored",
        where="buffer:Producer._seal",
        old="    self._spawn(self._run_upload(upload))\n",
        new=(
            "    upload.finished = True\n"
            "    self._wake_committer.set()\n"
            "    self._spawn(self._run_upload(upload))\n"
        ),
        test=_promise("test_the_data_is_stored_before_it_is_referenced"),
    ),
    Mutant(
        name="a batch is called finished before it is stored",
        where="buffer:BatchUpload.run",
        old="        await self._put(floor_ms)\n        self.error = None\n",
        new="        self.finished, self.error = True, None\n        await self._put(floor_ms)\n",
        test=_promise("test_batches_are_queued_in_the_order_of_their_calls"),
    ),
    Mutant(
        name="append again without looking",
        where="buffer:ManifestAppender._append",
        old="            landed = await self._settle(open_attempts, snapshot)\n",
        new="            landed = None\n",
        test=_promise("test_a_lost_answer_does_not_append_twice"),
    ),
    Mutant(
        name="a conflict is believed to be somebody else's",
        where="buffer:ManifestAppender._attempt",
        old="        self._manifest_conflicts.inc()\n        raise\n",
        new=("        self._manifest_conflicts.inc()\n        open_attempts.clear()\n        raise\n"),
        test=_promise("test_a_conflict_with_oneself_does_not_append_twice"),
    ),
    Mutant(
        name="an unknown append is taken for lost",
        where="buffer:resolve_attempt",
        old="        return AppendOutcome.LOST\n    return AppendOutcome.DEQUEUED\n",
        new="        return AppendOutcome.LOST\n    return AppendOutcome.LOST\n",
        test=_promise("test_without_a_ledger_a_dequeued_append_is_unknown_and_not_repeated"),
    ),
    Mutant(
        name="the ledger is not asked",
        where="buffer:resolve_by_dequeued_log",
        old="    location = dequeued.get(attempt.last)\n",
        new="    location = None\n",
        test=_promise("test_an_append_that_was_dequeued_before_the_second_look_is_found_in_the_ledger"),
    ),
    Mutant(
        name="the ledger is not written",
        where="buffer:Dequeuer._edit",
        old="            if before is not None:\n                await before(base)\n",
        new="",
        test=_promise("test_an_append_that_was_dequeued_before_the_second_look_is_found_in_the_ledger"),
    ),
    Mutant(
        name="the ledger is written after the dequeue",
        where="buffer:Dequeuer._edit",
        old=(
            "            if before is not None:\n"
            "                await before(base)\n"
            "            self._adopt(await self._write(raw, base))\n"
        ),
        new=(
            "            self._adopt(await self._write(raw, base))\n"
            "            if before is not None:\n"
            "                await before(base)\n"
        ),
        test=_promise("test_the_ledger_knows_an_entry_before_it_leaves_the_queue"),
    ),
    Mutant(
        name="the ledger is replaced whatever somebody else wrote",
        where="buffer:Dequeuer._write_dequeued_log",
        old="await self.file.write_side(self.file.dequeued_path, log.raw, version)",
        new="await self.file.store.put(self.file.dequeued_path, log.raw)",
        test=_promise("test_a_superseded_consumer_cannot_make_the_ledger_forget"),
    ),
    Mutant(
        name="a producer that is stopped calls everything not queued",
        where="buffer:Producer._give_up",
        old="    if self._appender.in_doubt:\n",
        new="    if self._appender.in_doubt and not self._closing:\n",
        test=f"{FAULTS}::test_a_producer_stopped_during_its_manifest_write_says_that_the_outcome_is_unknown",
    ),
    Mutant(
        name="tasks that a loop cancels leave their callers waiting",
        where="buffer:Producer._on_done",
        old="    elif task.cancelled():\n",
        new="    elif task.cancelled():\n        return\n    elif False:\n",
        test="tests/unit/buffer/test_producer.py::test_a_program_whose_other_task_fails_ends_with_its_producer",
    ),
    Mutant(
        name="a producer accepts calls while it closes",
        where="buffer:Producer.close",
        old="        return\n    self._closing = True\n",
        new="        return\n",
        test=f"{FAULTS}::test_nothing_is_accepted_while_a_producer_closes",
    ),
    Mutant(
        name="a finished batch overtakes an unfinished one",
        where="buffer:Producer._ready",
        old="        if not upload.finished:\n            break\n",
        new="        if not upload.finished:\n            continue\n",
        test=_promise("test_batches_are_queued_in_the_order_of_their_calls"),
    ),
    Mutant(
        name="the flush interval is not looked at while calls come in",
        where="buffer:Producer._fill_batches",
        old="        while self._take_waiting() or self._is_due():\n",
        new="        while self._take_waiting():\n",
        test=_promise("test_a_queue_that_never_runs_empty_does_not_starve_the_flush_interval"),
    ),
    Mutant(
        name="the age of a batch is counted from produce",
        where="buffer:Producer._take_waiting",
        old=(
            "        self._open.add(*item)\n"
            "        self._incoming.popleft()\n"
            "        self._admission.leave_queue()\n"
        ),
        new=(
            "        self._open.add(*item)\n"
            "        self._incoming.popleft()\n"
            "        self._admission.leave_queue()\n"
            "        if self._clock.monotonic() - item[0].accepted_at >= self._flush_interval_s:\n"
            "            return True\n"
        ),
        test=_promise("test_calls_that_waited_for_an_upload_share_a_batch"),
    ),
    Mutant(
        name="a definite conflict is taken for an unknown outcome",
        where="buffer:ManifestAppender._attempt",
        old="        if conflict.definite:\n",
        new="        if False:\n",
        test=_promise("test_a_definite_conflict_is_no_unknown_outcome_under_a_foreign_consumer"),
    ),
    Mutant(
        name="under contention an append starts from the cached manifest",
        where="buffer:ManifestAppender._base",
        old="    if not self._contended:\n",
        new="    if True:\n",
        test="tests/unit/buffer/test_producer.py"
        "::test_after_a_conflict_appends_start_from_a_fresh_manifest_while_others_write",
    ),
    Mutant(
        name="no backpressure",
        where="buffer:Admission.enter",
        old="    if not self._waiting and self._fits(size):\n",
        new="    if True:\n",
        test=_promise("test_a_full_producer_holds_back_its_callers"),
    ),
    # Consuming
    Mutant(
        name="dequeue before delivery",
        where="buffer:Consumer.next_batch",
        old="            self._prefetcher.taken()\n",
        new=(
            "            self._prefetcher.taken()\n"
            "            await self._dequeuer.dequeue(upcoming[0].sequence)\n"
        ),
        test=_promise("test_what_was_delivered_and_not_acknowledged_comes_again"),
    ),
    Mutant(
        name="the position moves before the fetch succeeded",
        where="buffer:Consumer.next_batch",
        old="            self._prefetcher.plan(upcoming)\n",
        new=(
            "            self._prefetcher.plan(upcoming)\n"
            "            self._progress.handed_out = upcoming[0].sequence\n"
        ),
        test=_promise("test_a_failed_fetch_delivers_the_same_batch_again"),
    ),
    Mutant(
        name="the epoch is not checked on dequeue",
        where="buffer:Dequeuer.dequeue.cut",
        old="    nonlocal removed\n    self._check_epoch(snapshot)\n",
        new="    nonlocal removed\n",
        test=_promise("test_a_superseded_consumer_cannot_dequeue"),
    ),
    Mutant(
        name="the epoch is not checked on read",
        where="buffer:Dequeuer.entries",
        old="            self._check_epoch(snapshot)\n            self._adopt(snapshot)\n",
        new="            self._adopt(snapshot)\n",
        test=_promise("test_a_superseded_consumer_is_given_nothing"),
    ),
    Mutant(
        name="a new consumer does not take a new epoch",
        where="buffer:Dequeuer.initialize.bump",
        old="    mine = next_epoch(snapshot.footer.epoch)\n",
        new="    mine = snapshot.footer.epoch\n",
        test=_promise("test_a_superseded_consumer_is_given_nothing"),
    ),
    Mutant(
        name="the ack frontier moves before its dequeue",
        where="buffer:Consumer.ack",
        old=(
            "        await self._dequeuer.dequeue(sequence)\n"
            "        self._acks_since_dequeue = 0\n"
            "    else:\n"
            "        self._acks_since_dequeue += 1\n"
            "    self._progress.ack(sequence)\n"
        ),
        new=(
            "        self._progress.ack(sequence)\n"
            "        await self._dequeuer.dequeue(sequence)\n"
            "        self._acks_since_dequeue = 0\n"
            "    else:\n"
            "        self._acks_since_dequeue += 1\n"
            "        self._progress.ack(sequence)\n"
        ),
        test=_promise("test_an_ack_whose_dequeue_failed_can_be_repeated"),
    ),
    Mutant(
        name="a resumed consumer starts at the beginning",
        where="buffer:Consumer.initialize",
        old="    self._progress = Progress(last_acked)\n",
        new="    self._progress = Progress(None)\n    last_acked = None\n",
        test=_promise("test_a_resumed_consumer_starts_behind_what_was_acknowledged"),
    ),
    # Transactions
    Mutant(
        name="the book is not written before a dequeue",
        where="buffer:Dequeuer._write_sides",
        old="        await TransactionLog(self.file).enter(committed)\n",
        new="        pass\n",
        test=_promise("test_a_transaction_is_known_when_its_entries_have_left_the_queue"),
    ),
    Mutant(
        name="the book and the ledger are written after the dequeue",
        where="buffer:Dequeuer._edit",
        old=(
            "            if before is not None:\n"
            "                await before(base)\n"
            "            self._adopt(await self._write(raw, base))\n"
        ),
        new=(
            "            self._adopt(await self._write(raw, base))\n"
            "            if before is not None:\n"
            "                await before(base)\n"
        ),
        test=_promise("test_the_book_knows_a_transaction_before_its_entries_leave_the_queue"),
    ),
    Mutant(
        name="a transaction is not looked up again after a conflict",
        where="buffer:ManifestAppender._append",
        old="            if is_done is not None and await is_done(snapshot):\n",
        new="            if backoff.attempts == 0 and is_done is not None and await is_done(snapshot):\n",
        test=_promise("test_two_runs_of_one_version_at_the_same_moment_append_once"),
    ),
    Mutant(
        name="the queue itself is not searched for a transaction",
        where="buffer:TransactionLog.last_version",
        old="    queued = newest_version(snapshot.raw, app)\n",
        new="    queued = None\n",
        test=f"{TRANSACTIONS}::test_an_append_that_is_repeated_after_any_fault_goes_in_once"
        "[crash-after-the-call]",
    ),
    Mutant(
        name="entries are appended without their tag",
        where="buffer:append_batches",
        old='        tail = b"" if transaction is None else encode_tag(transaction)\n',
        new='        tail = b""\n',
        test=_promise("test_a_transaction_is_known_when_its_entries_have_left_the_queue"),
    ),
    Mutant(
        name="a version below the last is appended",
        where="buffer:TransactionGuard.is_committed",
        old="    if last is not None and last > version:\n",
        new="    if last is not None and last < 0:\n",
        test=_promise("test_a_version_below_the_last_is_refused"),
    ),
    Mutant(
        name="a stored batch at the floor is appended as it is",
        where="buffer:StoredAppend.is_stale",
        old="    return minted_ms <= floor_ms or",
        new="    return minted_ms < floor_ms or",
        test=_promise("test_a_stored_batch_at_the_floor_is_copied_before_it_is_referenced"),
    ),
    Mutant(
        name="the book can be lowered",
        where="buffer:merge_versions",
        old="if version > known.get(app, -1)}",
        new="if version != known.get(app, -1)}",
        test=_promise("test_the_book_is_never_lowered"),
    ),
    # Collecting garbage
    Mutant(
        name="a collector takes the batches of a queue below its prefix",
        where="buffer:candidates",
        old="        ms = batch_minted_ms(info.key) if is_own(info.key, prefix) else None\n",
        new="        ms = batch_minted_ms(info.key)\n",
        test=_promise("test_a_queue_below_the_prefix_keeps_its_unread_batches"),
    ),
    Mutant(
        name="garbage is deleted without publishing a floor",
        where="buffer:GarbageCollector._below_own_floor",
        old="    floor = await self._raise_floor(max(ms for _, ms in found))\n",
        new="    floor = NO_FLOOR.raised(max(ms for _, ms in found), -1)\n",
        test=_promise("test_a_batch_whose_producer_stalled_past_the_grace_period_is_not_lost"),
    ),
    Mutant(
        name="garbage is deleted without sealing the floor",
        where="buffer:GarbageCollector._below_own_floor",
        old="    entries = await self._queue.seal()\n",
        new="    entries = await self._queue.entries()\n",
        test=_promise("test_a_batch_whose_producer_stalled_past_the_grace_period_is_not_lost"),
    ),
    Mutant(
        name="the floor is read once and never again",
        where="buffer:ManifestAppender._freshen",
        old="    if self._floor is None or self._floor[0] != epoch:\n",
        new="    if self._floor is None:\n",
        test=_promise("test_a_batch_whose_producer_stalled_past_the_grace_period_is_not_lost"),
    ),
    Mutant(
        name="a batch minted in the very millisecond of the floor is kept",
        where="buffer:BatchUpload.is_stale",
        old="    return self.minted_ms <= floor_ms or",
        new="    return self.minted_ms < floor_ms or",
        test=_promise("test_a_batch_whose_producer_stalled_past_the_grace_period_is_not_lost"),
    ),
    Mutant(
        name="a new name is taken from a slow clock alone",
        where="buffer:BatchUpload._put",
        old="    minted_ms = max(self._clock.now_ms(), floor_ms + 1)\n",
        new="    minted_ms = self._clock.now_ms()\n",
        test=_promise("test_a_producer_whose_clock_is_behind_names_its_batches_above_the_floor"),
    ),
    Mutant(
        name="references that came in before the seal are not looked at",
        where="buffer:_unreferenced",
        old="    return [key for key in keys if key not in kept]\n",
        new="    return [key for key in keys if kept is not None]\n",
        test=_promise("test_a_batch_appended_just_before_the_seal_is_spared"),
    ),
    Mutant(
        name="a clock that was wrong at the start stops every retention",
        where="clock:SteadyClock.cautious_ms",
        old="for last_s, one in leads if last_s >= now_s - age_ms / 1000)",
        new="for last_s, one in [(0, 0), *leads] if last_s <= now_s)",
        test="tests/unit/foundation/test_clock.py"
        "::test_a_clock_that_was_wrong_at_the_start_delays_nothing_for_longer_than_its_age",
    ),
    Mutant(
        name="a clock set forward ends a grace period",
        where="clock:SteadyClock.cautious_ms",
        old="    return self.steady_ms() + min(least_ms, lead_ms)\n",
        new="    return self.steady_ms() + lead_ms\n",
        test="tests/unit/buffer/test_gc.py"
        "::test_a_clock_set_forward_makes_no_batch_garbage_before_its_grace_period",
    ),
    Mutant(
        name="no grace period",
        where="buffer:candidates",
        old="        if now_ms - ms >= grace_ms and now_ms - info.modified_ms >= grace_ms:\n",
        new="        if now_ms >= ms:\n",
        test=_promise("test_a_young_batch_is_not_garbage"),
    ),
    Mutant(
        name="batches newer than the oldest entry are collected",
        where="buffer:candidates",
        old=" or (oldest_ms is not None and ms >= oldest_ms):\n",
        new=":\n",
        test=_promise("test_a_batch_not_older_than_the_oldest_entry_is_not_garbage"),
    ),
    Mutant(
        name="the floor can be lowered",
        where="buffer:Floor.raised",
        old="floor_ms=max(self.floor_ms, floor_ms)",
        new="floor_ms=floor_ms",
        test=_promise("test_the_floor_is_never_lowered"),
    ),
    # Stores
    Mutant(
        name="a file is renamed into place before its bytes are durable",
        where="storage:stage",
        old="                file.write(group)\n            file.datasync()\n",
        new="                file.write(group)\n",
        test=f"{LOCAL_CRASH}::test_a_fault_at_any_file_call_loses_and_invents_nothing[DiskFault.CRASH_AFTER]",
    ),
    Mutant(
        name="a rename is not made durable",
        where="storage:publish",
        old="        fs.sync_dir(os.path.dirname(target))\n",
        new="        pass\n",
        test=f"{LOCAL_CRASH}::test_a_fault_at_any_file_call_loses_and_invents_nothing[DiskFault.CRASH_AFTER]",
    ),
    Mutant(
        name="what is read is not made durable",
        where="objects:ObjectDirectory._read",
        old=(
            "        data = self._fs.read_into(path, start, length, _memory)\n"
            "    self._settle(os.path.dirname(path))\n"
        ),
        new="        data = self._fs.read_into(path, start, length, _memory)\n",
        test=f"{LOCAL_CRASH}::test_what_was_read_once_is_there_after_a_power_cut",
    ),
    Mutant(
        name="a directory store replaces without comparing",
        where="objects:ObjectDirectory.put_if_match",
        old="        if current != version:\n",
        new="        if current == Version():\n",
        test=_promise("test_a_stale_version_does_not_replace_a_file"),
    ),
    Mutant(
        name="a directory store compares without a lock",
        where="objects:ObjectDirectory.put_if_match",
        old="    with self._writing(key), self._lock(key):\n        current =",
        new="    with self._writing(key):\n        current =",
        test=_promise("test_two_writers_of_one_file_cannot_both_replace_the_same_version"),
    ),
    Mutant(
        name="a conditional write without an answer counts as lost",
        where="objects:_unknown",
        old="        return OutcomeUnknown(\n",
        new="        return Conflict(\n",
        test=_promise("test_a_conditional_write_without_a_definite_answer_is_unknown"),
    ),
    Mutant(
        name="the holder of a data directory is not said to be stopped",
        where="storage:DirectoryLock._holder",
        old="described(int(text)) if",
        new='f"process {text}" if',
        test=f"{FILE_ACCESS}::test_a_data_directory_in_use_names_the_holder_and_whether_it_is_stopped",
    ),
    Mutant(
        name="files are created indefinitelyybody to read",
        where="storage:DataModes",
        old="    file: int = 0o600\n",
        new="    file: int = 0o644\n",
        test=f"{FILE_ACCESS}::test_under_any_umask_only_the_owner_can_use_what_is_created",
    ),
    Mutant(
        name="a wait for a lock outlasts its deadline",
        where="storage:FileLock._is_taken",
        old="            if left_s <= 0:\n",
        new="            if left_s <= -12:\n",
        test=f"{FILE_ACCESS}::test_a_producer_that_cannot_get_the_lock_names_the_holder_within_its_deadline[True]",
    ),
    Mutant(
        name="whoever may read a lock file may hold the lock",
        where="storage:_Locks.open",
        old="        _close_to_readers(fd)\n",
        new="",
        test=f"{FILE_ACCESS}::test_an_old_lock_file_loses_the_read_bits_of_those_who_may_not_write",
    ),
    # Settings
    Mutant(
        name="unknown keys of settings are ignored",
        where="config:_Decoder._dataclass",
        old=" for key in value if key not in fields\n",
        new=" for key in () if key not in fields\n",
        test="tests/unit/foundation/test_config.py::test_an_unknown_key_names_its_place_and_the_closest_key",
    ),
    Mutant(
        name="a wrong secret is shown",
        where="config:_Decoder._scalar",
        old="    if hint is Secret:  # do not show the value\n",
        new="    if hint is None:\n",
        test="tests/unit/foundation/test_config.py::test_a_wrong_secret_is_not_shown_in_the_error",
    ),
    Mutant(
        name="a repeated key of a file is accepted",
        where="config:_strict_loader",
        old="                if key_node.value in seen:\n",
        new="                if key_node.value is seen:\n",
        test="tests/unit/foundation/test_config.py::test_a_wrong_file_is_refused_with_its_name",
    ),
    Mutant(
        name="None passes for any size and duration",
        where="units:convert_units",
        old="        if value is None and unit.optional:\n",
        new="        if value is None:\n",
        test="tests/unit/foundation/test_units.py::test_a_wrong_field_is_named_in_the_error",
    ),
    Mutant(
        name="a database without keys listens for other machines",
        where="servers:check_reach",
        old="    if has_keys or allowed or is_loopback(host):\n",
        new="    if has_keys or allowed or host:\n",
        test="tests/unit/servers/vector/test_api.py::test_a_server_reachable_from_other_machines_needs_keys",
    ),
    # Codecs
    Mutant(
        name="no cap on a stream of unknown size",
        where="codec:_decompress_stream",
        old="                if total > bytes_max:\n",
        new="                if total < 0:\n",
        test=_promise("test_a_frame_cannot_grow_beyond_the_cap"),
    ),
    Mutant(
        name="no cap on a declared size",
        where="codec:decompress",
        old="    if declared is not None and declared > bytes_max:\n",
        new="    if declared is not None and declared < 0:\n",
        test=_promise("test_a_frame_cannot_grow_beyond_the_cap"),
    ),
    Mutant(
        name="the length table is believed",
        where="codec:_by_table",
        old="    return Block(data, lengths, starts, heads) if bool((lengths == table).all()) else None\n",
        new="    return Block(data, table.astype('<u4'), starts)\n",
        test=_promise("test_a_wrong_length_table_does_not_move_the_records"),
    ),
    Mutant(
        name="holes in the numbering are accepted",
        where="buffer:_index_tail",
        old="        if sequence != expected:\n",
        new="        if sequence < expected:\n",
        test=_promise("test_a_hole_in_the_numbering_is_not_a_manifest"),
    ),
    # Speed that must not change the result
    Mutant(
        name="a guessed header is believed without the walk before it",
        where="codec:_by_many_walks",
        old=" and bool((arrivals[:-1] == begins[1:]).all())",
        new="",
        test="tests/unit/codec/test_block.py"
        "::test_data_that_looks_like_headers_never_changes_where_records_are",
    ),
    Mutant(
        name="the edited ledger is not cut to its length",
        where="buffer:DequeuedLog.after",
        old="manifest.dequeue(self.raw, oldest + dropped - 1) if dropped else self.raw",
        new="self.raw",
        test="tests/unit/buffer/test_side_objects.py"
        "::test_a_ledger_edited_in_place_is_byte_for_byte_the_one_encoded_in_full",
    ),
    Mutant(
        name="looking ahead decodes known entries again",
        where="buffer:EntryIndex.after",
        old="before.get(self.first + number) or self[number]",
        new="self[number]",
        test=_promise("test_looking_ahead_decodes_each_entry_once"),
    ),
    Mutant(
        name="every conflict makes the attempts before it certain",
        where="buffer:ManifestAppender._settle",
        old="        if attempt.refused and outcome is not AppendOutcome.LANDED:\n",
        new="        if outcome is not AppendOutcome.LANDED:\n",
        test=_promise("test_a_lost_reply_stays_unknown_next_to_definite_conflicts_and_is_not_repeated"),
    ),
    # Lost and older objects
    Mutant(
        name="a lost manifest is taken for a queue that never began",
        where="buffer:ManifestFile._absent",
        old="    first = ended.next_sequence and ended.next_sequence + len(stored)\n",
        new="    first = 0\n",
        test=f"{LOST}::test_after_a_lost_manifest_no_number_and_no_epoch_is_used_again",
    ),
    Mutant(
        name="batches without a manifest are not reported",
        where="buffer:ManifestFile._absent",
        old="    if (first or earlier) and not self._is_reported:\n",
        new="    if first and not self._is_reported:\n",
        test=f"{LOST}::test_batches_without_a_manifest_and_a_ledger_are_reported",
    ),
    Mutant(
        name="a manifest is not held against its ledger",
        where="buffer:ManifestFile.read",
        old="    if raw_dequeued is not None and snapshot.version is not None:\n",
        new="    if False:\n",
        test=f"{LOST}::test_a_manifest_older_than_its_ledger_is_refused_by_both_sides",
    ),
    Mutant(
        name="an older epoch passes",
        where="buffer:_check_against_dequeued_log",
        old="    elif known and 0 < ended.epoch - footer.epoch < 2**63:\n",
        new="    elif False:\n",
        test=f"{LOST}::test_an_older_epoch_is_refused",
    ),
    Mutant(
        name="fsck takes every dead letter for sound",
        where="buffer:_check_letter",
        old="    if deep:\n",
        new="    if False:\n",
        test="tests/crash/test_dead_letter_records_damage.py::"
        "test_damage_to_the_letters_of_single_records_is_reported",
    ),
    Mutant(
        name="a transaction is appended to an older manifest",
        where="buffer:TransactionLog.last_version",
        old="queued < logged:",
        new="False:",
        test=f"{LOST}::test_an_older_manifest_beside_a_current_book_is_refused",
    ),
    Mutant(
        name="an append of another writer is an older manifest",
        where="buffer:TransactionLog._check_age",
        old="if (await self._file.read()).version == snapshot.version:",
        new="if True:",
        test=f"{LOST}::test_an_append_between_manifest_and_book_is_not_an_older_manifest",
    ),
    Mutant(
        name="a collection is silent about batches that nobody consumed",
        where="buffer:GarbageCollector._report_strays",
        old="    if strays and strays != self._strays:\n",
        new="    if False:\n",
        test=f"{LOST}::test_a_collection_reports_batches_that_an_older_manifest_lacks",
    ),
    Mutant(
        name="shards without a layout are a new queue",
        where="buffer:read_layout",
        old="        await _check_unsharded(store, manifest_path)\n",
        new="",
        test=f"{LOST}::test_shards_without_a_layout_are_refused",
    ),
    Mutant(
        name="a conflict that decides nothing is definite",
        where="objects:_lost",
        old='definite=fault.status in (404, 412) or fault.code == "BlobAlreadyExists",',
        new="definite=fault.status in (404, 409, 412),",
        test="tests/unit/objects/test_errors.py::"
        "test_a_conflict_is_definite_if_the_store_says_that_the_object_existed",
    ),
)
