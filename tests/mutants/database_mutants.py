"""Deliberate bugs in the database of time series and in what feeds it; see `mutants.py`."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["DATABASE_MUTANTS"]

POSITIONS = "tests/crash/test_position_damage.py"
DATABASE = "tests/unit/timeseries/test_database.py"
DAMAGE = "tests/unit/timeseries/test_damage.py"
COMPACTION = "tests/unit/timeseries/test_compaction.py"
FEEDING = "tests/unit/services/test_feed.py"
API = "tests/unit/servers/timeseries/test_api.py"
JSON_LIMITS = "tests/unit/spark/pipeline/test_json_limits.py"
HOURS = "tests/unit/timeseries/test_many_hours.py"
START = "tests/unit/spark/pipeline/test_start.py"
REDRIVE = "tests/unit/spark/pipeline/test_redrive.py"
RETENTION = "tests/unit/timeseries/test_retention.py"
WRITES = "tests/unit/servers/timeseries/test_writes.py"
SLATE_CRASH = "tests/crash/timeseries/test_slate_crash.py"

LOOKUP = (
    "            (bucket, part, directory[bucket].lookup(part.labels, part.metadata))\n"
    "            for bucket, part in write.parts.items()\n"
)

DATABASE_MUTANTS = (
    Mutant(
        name="a server is ready although its storage takes no write",
        where="servers:check_writable",
        old="    if database.storage_wait_s >= _STALLED_S:\n",
        new="    if False:\n",
        test=f"{WRITES}::test_it_is_not_ready_while_the_storage_accepts_no_write[flush]",
    ),
    Mutant(
        name="a relay does not notice that its queue went back",
        where="services:RelayTarget.position",
        old="    if remembered is not None and remembered.seq > (seq or 0):\n        _LOGGER",
        new="    if False:\n        _LOGGER",
        test="tests/unit/services/test_relay_position.py::test_a_rolled_back_queue_is_reported",
    ),
    Mutant(
        name="an open does not wait for an answer to a first read",
        where="coordinator:SlateStorage.open",
        old="        await asyncio.wait_for(_first_read(storage), open_timeout_s)\n",
        new="        pass\n",
        test="tests/crash/test_database_damage.py::test_an_open_ends_when_a_file_has_no_bytes",
    ),
    Mutant(
        name="a relay forgets its last record when its batch was consumed",
        where="services:RelayTarget.position",
        old=" or known)",
        new=")",
        test="tests/process/test_relay.py::test_a_topic_that_was_made_anew_is_noticed_when_everything_was_consumed[8]",
    ),
    Mutant(
        name="Spark decodes JSON of any depth that it takes by itself",
        where="spark:_decode_text",
        old="        options |= _json_limits(_WRAPPED_LEVELS)\n",
        new="",
        test=f"{JSON_LIMITS}::test_records_are_decoded_within_the_limits_of_stored_json_whatever_is_configured",
    ),
    Mutant(
        name="lines that a ledger has lost are not missed",
        where="spark:Ledger.without_line",
        old="    return [batch for batch in done if batch not in known]\n",
        new="    return [batch for batch in done if not known]\n",
        test="tests/unit/spark/pipeline/test_ledger.py::test_lines_that_a_finished_micro_batch_has_lost_are_reported[cut]",
    ),
    Mutant(
        name="a lost origin of a pipeline is not reported",
        where="spark:Pipeline._origin",
        old="    if started:\n        _log.warning(",
        new="    if started:\n        _log.debug(",
        test=f"{START}::test_a_lost_origin_is_reported",
    ),
    Mutant(
        name="a checkpoint without metadata begins another query over its micro-batches",
        where="spark:Pipeline._check_books",
        old="if app is None and (checkpoint.planned() or checkpoint.done()):",
        new="if False:",
        test=f"{START}::test_a_checkpoint_that_has_lost_its_query_is_refused",
    ),
    Mutant(
        name="a pipeline whose checkpoint cannot be listed does not start again",
        where="spark:Pipeline._check_books",
        old="if not checkpoint.is_local:",
        new="if False:",
        test=f"{START}::test_a_checkpoint_that_cannot_be_listed_is_started_without_the_comparison",
    ),
    Mutant(
        name="a redrive takes a number that the queue knows",
        where="spark:RedriveDriver._next_number",
        old="max([*plans, *done, queued or 0], default=0)",
        new="max(plans, default=0)",
        test=f"{REDRIVE}::test_a_redrive_whose_letters_are_lost_does_not_swallow_the_next",
    ),
    Mutant(
        name="a redrive that was cut short is finished under another identity",
        where="spark:RedriveDriver._check_identity",
        old="if unfinished and (done or len(plans) > 1):",
        new="if False:",
        test=f"{REDRIVE}::test_an_interrupted_redrive_is_not_finished_under_another_identity",
    ),
    Mutant(
        name="a feed continues on a queue that is behind its database",
        where="services:Feed._continues",
        old="    if last >= following:\n",
        new="    if last >= following + 2**64:\n",
        test=f"{POSITIONS}::test_no_damage_to_queue_or_database_loses_a_record_silently[queue-older-3]",
    ),
    Mutant(
        name="a feed trusts the number of its last batch without its name",
        where="services:Feed._continues",
        old="found is not None and found != stored.location",
        new="found is None",
        test=f"{POSITIONS}::test_no_damage_to_queue_or_database_loses_a_record_silently[queue-older-20]",
    ),
    Mutant(
        name="a feed begins after batches that left the queue and are not in its database",
        where="services:Feed._continues",
        old="    missing = index.first - (last + 1)\n",
        new="    missing = 0\n",
        test=f"{FEEDING}::test_a_database_that_is_older_than_the_queue_is_refused_until_the_gap_is_accepted",
    ),
    Mutant(
        name="letters of single records count as batches that were set aside",
        where="buffer:dead_sequences",
        old=" if is_own(info.key, folder)",
        new="",
        test=f"{FEEDING}::test_letters_of_records_do_not_hide_that_a_database_is_older_than_the_queue",
    ),
    Mutant(
        name="a new series gets the largest id that is stored",
        where="timeseries:load_bucket",
        old="series.next_id = max(named, streamed, in_blocks) + 1",
        new="series.next_id = max(named, streamed, in_blocks, 0)",
        test=f"{DATABASE}::test_ids_continue_after_the_largest_after_a_restart",
    ),
    Mutant(
        name="samples whose labels are lost do not keep their id",
        where="timeseries:load_bucket",
        old="series.next_id = max(named, streamed, in_blocks) + 1",
        new="series.next_id = named + 1",
        test=f"{RETENTION}::test_ids_are_never_given_twice_even_if_all_that_names_them_is_lost",
    ),
    Mutant(
        name="a longer retention counts for hours that were written with a shorter one",
        where="timeseries:Retention.changed_to",
        old="    spans = {self._closed(span, last, retention_ms) for span in self._spans}\n",
        new="    spans: set[Span] = set()\n",
        test=f"{RETENTION}::test_hours_that_were_written_to_keep_their_shorter_retention_and_later_ones_get_"
        "the_longer",
    ),
    Mutant(
        name="the floor is not stored with what is deleted",
        where="timeseries:SeriesFlusher.flush",
        old="        operations.insert(0, self.retention.put())\n",
        new="        pass\n",
        test=f"{RETENTION}::test_the_floor_is_stored_with_what_is_deleted",
    ),
    Mutant(
        name="a write that gives up keeps its hours reserved",
        where="timeseries:BucketLoader.hold",
        old="        self._directory.release(held)\n",
        new="        pass\n",
        test=f"{HOURS}::test_an_hour_that_cannot_be_read_refuses_the_writes_that_need_it_and_is_tried_again",
    ),
    Mutant(
        name="each writer reads an hour for itself",
        where="timeseries:BucketLoader._loading",
        old="    task = self._loads.get(bucket)\n",
        new="    task = None\n",
        test=f"{HOURS}::test_hours_are_read_in_parallel_once_while_others_write",
    ),
    Mutant(
        name="a flush works on the threads that queries use",
        where="timeseries:SeriesFlusher._in_thread",
        old="run_in_executor(self._thread, call)",
        new="run_in_executor(None, call)",
        test=f"{HOURS}::test_a_flush_does_not_wait_for_threads_that_others_use",
    ),
    Mutant(
        name="writers that wait keep readers out",
        where="servers:_kind",
        old="return _READING if route.scope in _READS else _WRITING",
        new="return _WRITING",
        test=f"{WRITES}::test_writers_waiting_for_the_storage_do_not_block_readers",
    ),
    Mutant(
        name="a body counts only while it is unpacked",
        where="servers:WriteApi.otlp",
        old="        taken = await self._applied(found.series, _NO_FAMILIES)\n        del body, found\n",
        new="        del body\n    taken = await self._applied(found.series, _NO_FAMILIES)\n",
        test=f"{WRITES}::test_a_body_counts_until_its_write_is_applied",
    ),
    Mutant(
        name="a bucket is changed before the next one is checked",
        where="timeseries:SeriesDelta._take",
        old=(
            "    looked_up = [\n"
            "        (bucket, part, directory[bucket].lookup(part.labels, part.metadata))\n"
            "        for bucket, part in write.parts.items()\n"
            "    ]\n"
        ),
        new=(
            "    looked_up = (\n"
            "        (bucket, part, directory[bucket].lookup(part.labels, part.metadata))\n"
            "        for bucket, part in write.parts.items()\n"
            "    )\n"
        ),
        test=f"{DATABASE}::test_a_refused_series_leaves_nothing_of_its_write_in_any_bucket",
    ),
    Mutant(
        name="a bucket is forgotten while its delta waits for the flush or a write needs it",
        where="timeseries:SeriesIndex.forget",
        old="        if not self._buckets[bucket].reserved\n        and self",
        new="        if self",
        test=f"{DATABASE}::test_a_bucket_stays_while_a_write_that_needs_it_is_queued",
    ),
    Mutant(
        name="a bucket that is dropped is compacted and comes back",
        where="timeseries:SeriesFlusher._is_due",
        old="if bucket in self._damaged or self.retention.is_expired(bucket, now_ms):",
        new="if bucket in self._damaged:",
        test=f"{DATABASE}::test_a_bucket_that_was_stored_without_an_end_is_deleted_when_retention_is_set",
    ),
    Mutant(
        name="compacted samples win over blocks",
        where="timeseries:BucketReader.rows",
        old="parts += await asyncio.to_thread(within, self._of_blocks(page, wanted))",
        new="parts = await asyncio.to_thread(within, self._of_blocks(page, wanted)) + parts",
        test=f"{DATABASE}::test_a_late_sample_wins_over_a_compacted_one_and_is_compacted_again",
    ),
    Mutant(
        name="a compaction is over after its first step",
        where="timeseries:Compaction.is_last",
        old="    return end == len(self.streams)\n",
        new="    return True\n",
        test=f"{COMPACTION}::test_each_flush_takes_its_share_and_what_is_read_stays",
    ),
    Mutant(
        name="every step of a compaction takes the blocks away",
        where="timeseries:compaction_operations",
        old="    return [*puts, *(Delete(key) for key in compaction.blocks if compaction.is_last(end))]\n",
        new="    return [*puts, *(Delete(key) for key, _ in blocks)]\n",
        test=f"{COMPACTION}::test_the_last_step_takes_the_blocks_away_and_no_other",
    ),
    Mutant(
        name="the compaction of one hour continues with another",
        where="timeseries:SeriesFlusher._compaction_of",
        old="return compaction if compaction is not None and compaction.bucket == bucket else None",
        new="return compaction",
        test=f"{COMPACTION}::test_an_hour_that_expires_during_its_compaction_is_dropped_and_the_next_one_compacted",
    ),
    Mutant(
        name="compaction does not keep up with a load",
        where="timeseries:SeriesFlusher._wanted",
        old="    return 2 * delta.samples if due",
        new="    return 0 * delta.samples if due",
        test=f"{COMPACTION}::test_compaction_keeps_up_with_a_load",
    ),
    Mutant(
        name="a late sample has its whole hour rewritten at once",
        where="timeseries:SeriesFlusher._wanted",
        old="    return 2 * delta.samples if due",
        new="    return 2 * delta.samples if True or due",
        test=f"{COMPACTION}::test_a_late_sample_does_not_rewrite_a_whole_hour_in_one_flush",
    ),
    Mutant(
        name="an hour that is always due prevents the compaction of others",
        where="timeseries:SeriesFlusher._dequeue_blocks",
        old="    blocks = self.blocks.pop(compaction.bucket)\n",
        new="    blocks = self.blocks[compaction.bucket]\n",
        test=f"{COMPACTION}::test_hours_that_are_due_take_turns",
    ),
    Mutant(
        name="what streams hold does not count for a step",
        where="timeseries:Compactor._next_streams",
        old="            sample_count += len(rows[-1])\n",
        new="",
        test=f"{COMPACTION}::test_what_streams_hold_already_counts_too",
    ),
    Mutant(
        name="a matcher that a missing label satisfies is left to the inverted index",
        where="timeseries:BucketReader._candidates",
        old="if not one.negative and not one.accepts_missing]",
        new="if not one.negative]",
        test=f"{DATABASE}::test_selectors_find_what_a_scan_of_everything_finds",
    ),
    Mutant(
        name="the sequence of a queue is stored in a batch of its own",
        where="timeseries:SeriesFlusher.flush",
        old="    await self._storage.apply([*drops, *step.operations, *operations])\n",
        new=(
            "    await self._storage.apply([*drops, *step.operations, *operations[:-1]])\n"
            "    await self._storage.apply(operations[-1:])\n"
        ),
        test=f"{SLATE_CRASH}::test_a_process_that_dies_at_any_operation_loses_and_doubles_nothing[held]",
    ),
    Mutant(
        name="a batch is acknowledged when it is flushed",
        where="services:Feed._settle_all",
        old="await offer.handle.wait(Durability.DURABLE)",
        new="await offer.handle.wait(Durability.FLUSHED)",
        test=f"{FEEDING}::test_nothing_is_acknowledged_before_it_is_durable",
    ),
    Mutant(
        name="a letter is written after its batch",
        where="services:FedTimeSeries.write_batch",
        old=(
            "    if refused:\n"
            "        await set_aside(refused)\n"
            "    handle = await self._database.write(\n"
            "        series, sequence=position.sequence, source=position.source, location=position.location\n"
            "    )\n"
        ),
        new=(
            "    handle = await self._database.write(\n"
            "        series, sequence=position.sequence, source=position.source, location=position.location\n"
            "    )\n"
            "    await self._database.sync()\n"
            "    if refused:\n"
            "        await set_aside(refused)\n"
        ),
        test=f"{FEEDING}::test_a_letter_that_cannot_be_stored_delays_its_batch",
    ),
    Mutant(
        name="a stopped database tells senders to give up",
        where="timeseries",
        old='    (Fenced, 503, "unavailable"),\n    (OutcomeUnknown, 503, "unavailable"),\n',
        new="",
        test=f"{API}::test_a_fenced_server_says_so_and_stops",
    ),
    Mutant(
        name="a bucket that cannot be compacted stops the database",
        where="timeseries:SeriesFlusher._compact",
        old="    except Corrupt as error:",
        new="    except ZeroDivisionError as error:",
        test=f"{DATABASE}::test_a_bucket_that_cannot_be_compacted_is_left_as_it_is_and_writes_continue",
    ),
    Mutant(
        name="the id of labels that do not decode is given again",
        where="timeseries:_load_labels",
        old="            unread.add(series_id)\n",
        new="            pass\n",
        test=f"{DAMAGE}::test_the_id_of_damaged_labels_is_not_given_again_though_nothing_else_names_it",
    ),
    Mutant(
        name="the fingerprint of a series without labels keeps it out indefinitely",
        where="timeseries:_load_fingerprints",
        old="        if named in series.labels:\n",
        new="        if True:\n",
        test=f"{DAMAGE}::test_a_series_whose_labels_are_damaged_or_lost_is_written_under_a_new_id",
    ),
    Mutant(
        name="an hour that cannot be read when it is over stops every flush",
        where="timeseries:SeriesFlusher._drops",
        old='    except Corrupt as damage:\n        self.damage.report(bucket, [f"it has expired',
        new='    except ZeroDivisionError as damage:\n        self.damage.report(bucket, [f"it has expired',
        test=f"{DAMAGE}::test_an_expired_hour_that_cannot_be_read_stays_and_later_ones_are_dropped",
    ),
    Mutant(
        name="labels that do not decode are missing from an answer that does not say so",
        where="timeseries:BucketReader._leave_out",
        old="        raise damage\n",
        new="        return\n",
        test=f"{DAMAGE}::test_without_a_list_of_warnings_damage_is_an_error_that_names_hour_and_record",
    ),
    Mutant(
        name="a damaged inverted index fails the query",
        where="timeseries:BucketReader._candidates",
        old="            continue  # fall back to the labels, which takes longer\n",
        new="            raise\n",
        test=f"{DAMAGE}::test_a_damaged_record_of_the_inverted_index_changes_no_answer",
    ),
    Mutant(
        name="senders drop what a damaged hour refuses",
        where="servers:response_to",
        old="if isinstance(error, Corrupt) and request is not None and request.path in _SENDERS:",
        new="if False:",
        test=f"{WRITES}::test_senders_keep_a_write_that_fails_because_of_the_storage",
    ),
)
