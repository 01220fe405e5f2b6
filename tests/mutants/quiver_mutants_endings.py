"""Deliberate bugs in how Quiver ends, and in what it does about damaged segments; see `mutants.py`."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["QUIVER_ENDING_MUTANTS"]

DAMAGED = "tests/unit/quiver/segments/test_damaged_segments.py"
ENDINGS = "tests/unit/quiver/test_endings.py"
FAIR = "tests/unit/quiver/retention/test_fair_eviction.py"


QUIVER_ENDING_MUTANTS = (
    Mutant(
        name="a damaged segment is not put together again from the log",
        where="quiver:recover",
        old="    if rebuild_segments(store, offsets, fs, wal_dir) and first_seq is not None:\n",
        new="    if first_seq is not None:\n",
        test=f"{DAMAGED}::test_a_damaged_segment_is_rebuilt_from_the_log",
    ),
    Mutant(
        name="a segment that was set aside counts as never written",
        where="quiver:SubscriptionStore.reconcile",
        old="        holes = self.state.take_in(infos, quarantined_infos)\n",
        new="        holes = self.state.take_in(infos)\n",
        test=f"{DAMAGED}::test_offsets_distinguish_corrupt_from_missing_and_never_written",
    ),
    Mutant(
        name="dropping a subscriber by hand draws conclusions from what it does not see",
        where="quiver:drop_subscriber",
        old="            offsets.state.take_in(infos)\n",
        new="            offsets.reconcile(infos)\n",
        test=f"{DAMAGED}::test_dropping_a_subscriber_manually_loses_nothing_for_the_others",
    ),
    Mutant(
        name="a closed ack log is written to",
        where="quiver:OffsetLogWriter.sync",
        old="        if self._is_closed:\n",
        new="        if False:\n",
        test=f"{ENDINGS}::test_closed_offsets_write_nothing_more",
    ),
    Mutant(
        name="a wait for a writer that stopped never ends",
        where="quiver:OrderedQueue._check_running",
        old="    if self._stopping:\n        raise Unavailable(",
        new="    if False:\n        raise Unavailable(",
        test=f"{ENDINGS}::test_a_wait_for_segments_ends_when_the_writer_stops",
    ),
    Mutant(
        name="a core drops its own data though another has older",
        where="quiver:Reaper._may_drop_own",
        old="    return not is_others or now_s - self._wanted_s >= _PATIENCE_S\n",
        new="    return True\n",
        test=f"{FAIR}::test_a_core_that_needs_space_waits_for_the_core_with_the_oldest_data",
    ),
)
