"""Deliberate bugs in the acknowledgements, deliveries and retention of Quiver; see `mutants.py`."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["QUIVER_ACK_MUTANTS"]

BOOK = "tests/unit/quiver/offsets/test_offsets_store.py"
DELIVERIES = "tests/unit/quiver/delivery/test_deliveries.py"
SWEEP = "tests/unit/quiver/retention/test_reaper.py"
DAMAGE = "tests/unit/quiver/offsets/test_offsets_damage.py"
CRASH = "tests/crash/quiver/test_ack_crash.py"


QUIVER_ACK_MUTANTS = (
    Mutant(
        name="a segment is deletable before what permits it is synced",
        where="quiver:OffsetLog.is_durable",
        old="    return self._is_trusted and number <= self._log.synced_number\n",
        new="    return self._is_trusted\n",
        test=f"{BOOK}::test_a_segment_is_deletable_only_after_a_sync_of_its_acks",
    ),
    Mutant(
        name="what was read back is relied on at once",
        where="quiver:OffsetLog.__init__",
        old="    self._is_trusted = replayed.records == 0\n",
        new="    self._is_trusted = True\n",
        test=f"{BOOK}::test_replayed_records_are_not_trusted_before_a_checkpoint_of_this_process",
    ),
    Mutant(
        name="the ack log continues in a file whose sync failed",
        where="quiver:OffsetLogWriter._write",
        old="    except BaseException:\n        self._give_up()\n        raise\n",
        new="    except BaseException:\n        raise\n",
        test=f"{BOOK}::test_a_failed_sync_makes_nothing_deletable_and_the_next_one_goes_into_a_new_file",
    ),
    Mutant(
        name="the mark passes a segment that is not all resolved",
        where="quiver:Progress.settle",
        old="    if self.resolved_in(seq) < bundle_count:\n        return False\n",
        new="",
        test=f"{BOOK}::test_the_mark_stops_before_a_segment_that_is_not_fully_resolved",
    ),
    Mutant(
        name="segment numbers start again when every file is gone",
        where="quiver:OffsetState.apply",
        old="    self.highest_seq = max(self.highest_seq, _segment_of(record))\n",
        new="",
        test=f"{BOOK}::test_numbers_are_not_reused_after_everything_was_deleted",
    ),
    Mutant(
        name="a segment is deleted that somebody registered for meanwhile",
        where="quiver:SubscriptionStore.mark_deleted",
        old="        chosen = [seq for seq in seqs if self.state.is_finished(seq)]\n",
        new="        chosen = list(seqs)\n",
        test=f"{BOOK}::test_a_subscriber_that_registers_before_the_deletion_keeps_the_segment",
    ),
    Mutant(
        name="a claim that ran out is still answered",
        where="quiver:LeaseTable.end",
        old="    if held is None or held.token != claim.token or now_s >= held.expires_s:\n",
        new="    if held is None or held.token != claim.token:\n",
        test=f"{DELIVERIES}::test_a_stale_claim_resolves_nothing_even_before_its_expiry_is_processed",
    ),
    Mutant(
        name="any claim on a bundle answers for its holder",
        where="quiver:LeaseTable.end",
        old="    if held is None or held.token != claim.token or now_s >= held.expires_s:\n",
        new="    if held is None or now_s >= held.expires_s:\n",
        test=f"{DELIVERIES}::test_a_claim_that_expires_goes_to_the_next_consumer",
    ),
    Mutant(
        name="a segment is dropped out of somebody's hands",
        where="quiver:Deliveries.drop",
        old="(not force and seq in self.claimed_segments())",
        new="False",
        test=f"{DELIVERIES}::test_a_segment_with_a_live_claim_is_not_dropped",
    ),
    Mutant(
        name="files are removed before the sync",
        where="quiver:Reaper._remove",
        old="    if self._offsets.state.tombstoned:\n        self._offsets.sync()\n",
        new="",
        test=f"{SWEEP}::test_segments_that_every_subscriber_processed_are_deleted",
    ),
    Mutant(
        name="a damaged checkpoint takes the place of the good one before it",
        where="quiver:OffsetLog.__init__",
        old="    self._keep_newest = replayed.is_newest\n",
        new="    self._keep_newest = True\n",
        test=f"{DAMAGE}::test_a_damaged_checkpoint_does_not_take_the_place_of_the_one_before_it",
    ),
    Mutant(
        name="log files go that the checkpoint before still needs",
        where="quiver:OffsetLog.checkpoint",
        old="        self._log.drop_through(self._checkpoint_number)\n",
        new="        self._log.drop_through(saved.last_number)\n",
        test=f"{DAMAGE}::test_abandoned_files_stay_while_a_checkpoint_needs_them",
    ),
    Mutant(
        name="the old log file and the new one change names in one sync",
        where="quiver:OffsetLogWriter._move_aside",
        old="    self._fs.sync_dir(self._directory)\n    last = max(",
        new="    last = max(",
        test=f"{CRASH}::test_a_power_cut_while_a_file_is_abandoned_loses_nothing_that_was_synced",
    ),
    Mutant(
        name="segments that go missing before anybody subscribed are not reported",
        where="quiver:OffsetState._missing",
        old="    if not self.subscribers and not self.known:\n        return []\n",
        new="    if not self.subscribers or not self.known:\n        return []\n",
        test="tests/crash/quiver/test_damage_sweep.py"
        "::test_a_segment_missing_before_any_subscription_is_reported_once",
    ),
)
