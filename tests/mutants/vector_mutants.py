"""Deliberate bugs in the vector database; see `mutants.py`."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["VECTOR_MUTANTS"]

STORE = "tests/unit/vector/test_store.py"
DAMAGE = "tests/unit/vector/test_damage.py"
SEARCH = "tests/unit/vector/test_search.py"
FORMATS = "tests/unit/vector/test_formats.py"
RECALL = "tests/unit/vector/test_recall.py"
LIMITS = "tests/unit/vector/test_limits.py"
API = "tests/unit/servers/vector/test_api.py"
SLATE_CRASH = "tests/crash/vector/test_slate_crash.py"


VECTOR_MUTANTS = (
    Mutant(
        name="the block of the ids is not stored with them",
        where="vector:VectorFlusher._plan",
        old="    operations += self._blocks()\n",
        new="",
        test=f"{STORE}::test_everything_is_there_after_a_restart_and_ids_continue",
    ),
    Mutant(
        name="the position of the source is not in the batch",
        where="vector:VectorFlusher._plan",
        old="        operations.append(Put(record_prefix(RecordType.POSITION), ",
        new="        print(Put(record_prefix(RecordType.POSITION), ",
        test=f"{STORE}::test_everything_is_there_after_a_restart_and_ids_continue",
    ),
    Mutant(
        name="the position of the source is stored in a batch of its own",
        where="vector:VectorFlusher.flush",
        old="    await self._storage.apply(operations)\n",
        new=(
            "    await self._storage.apply(operations[:-1])\n    await self._storage.apply(operations[-1:])\n"
        ),
        test=f"{SLATE_CRASH}::test_a_process_that_dies_at_any_operation_loses_and_doubles_nothing[held]",
    ),
    Mutant(
        name="a vector that was replaced stays alive",
        where="vector:VectorFlusher._plan",
        old="        held.rows.die(gone)\n",
        new="        pass\n",
        test=f"{STORE}::test_the_last_write_to_an_id_wins_inside_a_flush_and_across_flushes",
    ),
    Mutant(
        name="a flusher continues after a failure",
        where="vector:VectorFlusher.flush",
        old="    self._is_poisoned = True\n",
        new="",
        test=f"{STORE}::test_a_flusher_that_failed_does_not_continue",
    ),
    Mutant(
        name="a write is taken vector by vector",
        where="vector:VectorDelta._take",
        old="            self.collection.check(entry)\n",
        new="            self.collection.check(entry)\n        self.entries[external_id] = entry\n",
        test=f"{STORE}::test_one_wrong_vector_refuses_the_whole_write",
    ),
    Mutant(
        name="a collection is opened as whatever the caller says",
        where="vector:agreed_collection",
        old="    if differences := collection.differences(claim):\n",
        new="    if differences := collection.differences(Claim()):\n",
        test=f"{STORE}::test_a_collection_that_was_created_differently_is_not_opened",
    ),
    Mutant(
        name="deaths show in snapshots that were given out",
        where="vector:Rows.die",
        old="    self.alive = self.alive.copy()\n",
        new="",
        test=f"{STORE}::test_an_old_snapshot_stays_as_it_was_while_lists_are_cut_and_rows_are_compacted",
    ),
    Mutant(
        name="forgotten ids stay among the deletions",
        where="vector:VectorFlusher._deletions",
        old="    held.dead = (held.dead | BitMap64(newly)) - forgotten\n",
        new="    held.dead = held.dead | BitMap64(newly)\n",
        test=f"{STORE}::test_deleted_ids_are_noted_until_no_list_holds_them",
    ),
    Mutant(
        name="the older entry of a list wins",
        where="vector:merge_postings",
        old="    newest = entries[::-1]\n",
        new="    newest = entries\n",
        test=f"{FORMATS}::test_the_newer_entry_of_a_list_wins_whatever_is_merged_first",
    ),
    Mutant(
        name="merged ids lose their byte order",
        where="vector:merge_postings",
        old="[entries for entries, _ in split], dtype=_ENTRY)",
        new="[entries for entries, _ in split])",
        test=f"{FORMATS}::test_the_newer_entry_of_a_list_wins_whatever_is_merged_first",
    ),
    Mutant(
        name="quick scores decide",
        where="vector:Index._best",
        old=" + 2 * self._error(query, slots)\n",
        new="\n",
        test=f"{SEARCH}::test_an_exact_search_finds_exactly_the_best",
    ),
    Mutant(
        name="neq wants the field to be there",
        where="vector:mask",
        old="    return ~same if isinstance(wanted, Neq) else same\n",
        new="    return ~same & (codes >= 0) if isinstance(wanted, Neq) else same\n",
        test=f"{SEARCH}::test_filters_leave_what_matches",
    ),
    Mutant(
        name="lists without an allowed row count as compared",
        where="vector:Index._nearest",
        old="    while begin < len(order) and (filled < nprobe or sum(map(len, taken)) < k):\n",
        new="    while begin < nprobe and begin < len(order):\n",
        test=f"{RECALL}::test_a_filter_whose_vectors_are_far_from_the_query_still_finds_k_of_them",
    ),
    Mutant(
        name="dot products are searched by centroids alone",
        where="vector:Index._ordered",
        old="        reach = np.float32(length) * self.radii\n",
        new="        reach = np.float32(0) * self.radii\n",
        test=f"{RECALL}::test_dot_products_of_vectors_of_very_different_lengths_are_found",
    ),
    Mutant(
        name="merges of a list are not bounded",
        where="vector:VectorFlusher._lists",
        old="                one.merges += 1\n",
        new="",
        test=f"{LIMITS}::test_a_record_is_rewritten_after_too_many_merges_also_across_restarts",
    ),
    Mutant(
        name="lists that may hold something better are not looked at",
        where="vector:Index._probed",
        old="rest[bounds[rest] < bound]",
        new="rest[:0]",
        test=f"{RECALL}::test_the_usual_search_finds_nineteen_of_twenty_also_where_there_are_no_groups",
    ),
    Mutant(
        name="any number of searches may be under way",
        where="vector:Readers.place",
        old="    self._running += 1\n",
        new="",
        test=f"{LIMITS}::test_more_searches_than_the_cap_are_unavailable",
    ),
    Mutant(
        name="an acknowledgement does not wait for the storage",
        where="servers:VectorApi._apply",
        old="            if level > Durability.APPLIED:\n",
        new="            if level > Durability.DURABLE:\n",
        test=f"{API}::test_an_acknowledged_write_is_durable_and_found",
    ),
    Mutant(
        name="ids begin again where the block is damaged",
        where="vector:_check_block",
        old="        blocks.skip_past(max(first, last))\n",
        new="        pass\n",
        test=f"{DAMAGE}::test_ids_continue_in_the_block_after_the_largest_that_any_record_names",
    ),
    Mutant(
        name="what is lost cannot be deleted",
        where="vector:VectorFlusher._deletions_of_records",
        old=" is not None or was_lost):\n",
        new=" is not None):\n",
        test=f"{DAMAGE}::test_a_vector_that_is_damaged_everywhere_is_named_and_the_rest_works[delete]",
    ),
)
