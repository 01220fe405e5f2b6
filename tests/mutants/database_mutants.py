"""Deliberate bugs in the database of time series and in what feeds it; see `mutants.py`."""

from __future__ import annotations

from tests.mutants.mutants import Mutant

__all__ = ["DATABASE_MUTANTS"]

DATABASE = "tests/unit/timeseries/test_database.py"
FEEDING = "tests/unit/services/test_feeding.py"
API = "tests/unit/server/test_timeseries_api.py"

LOOKUP = (
    "            (bucket, part, directory[bucket].lookup(part.labels, part.metadata))\n"
    "            for bucket, part in write.parts.items()\n"
)

DATABASE_MUTANTS = (
    Mutant(
        name="a new series gets the largest id that is stored",
        file="timeseries/records.py",
        old="*series.fingerprints.values()), default=-1) + 1",
        new="*series.fingerprints.values()), default=0)",
        test=f"{DATABASE}::test_ids_go_on_behind_the_largest_after_a_restart",
    ),
    Mutant(
        name="a bucket is changed before the next one is checked",
        file="timeseries/delta.py",
        old=f"        looked_up = [\n{LOOKUP}        ]\n",
        new=f"        looked_up = (\n{LOOKUP}        )\n",
        test=f"{DATABASE}::test_a_refused_series_leaves_nothing_of_its_write_in_any_bucket",
    ),
    Mutant(
        name="a bucket is forgotten while its delta waits for the flush or a write needs it",
        file="timeseries/directory.py",
        old="            if not self._buckets[bucket].reserved\n            and self",
        new="            if self",
        test=f"{DATABASE}::test_a_bucket_stays_while_a_write_that_needs_it_is_queued",
    ),
    Mutant(
        name="a bucket that is dropped is folded and comes back",
        file="timeseries/flusher.py",
        old="if bucket in self._damaged or self._is_over(bucket, now_ms):",
        new="if bucket in self._damaged:",
        test=f"{DATABASE}::test_a_bucket_that_was_stored_without_an_end_is_deleted_when_retention_is_set",
    ),
    Mutant(
        name="folded samples win over blocks",
        file="timeseries/reading.py",
        old="parts = [folded, *(decode_block(block).of(wanted) for block in blocks)]",
        new="parts = [*(decode_block(block).of(wanted) for block in blocks), folded]",
        test=f"{DATABASE}::test_a_late_sample_wins_over_a_folded_one_and_folds_again",
    ),
    Mutant(
        name="a matcher that a missing label satisfies is left to the inverted index",
        file="timeseries/reading.py",
        old="if not one.negative and not one.accepts_missing]",
        new="if not one.negative]",
        test=f"{DATABASE}::test_selectors_find_what_a_scan_of_everything_finds",
    ),
    Mutant(
        name="a batch is acknowledged when it is flushed",
        file="services/feeding.py",
        old="await offer.handle.wait(Durability.DURABLE)",
        new="await offer.handle.wait(Durability.FLUSHED)",
        test=f"{FEEDING}::test_nothing_is_acknowledged_before_it_is_durable",
    ),
    Mutant(
        name="a letter is written after its batch",
        file="services/timeseries_feed.py",
        old="        if refused:\n            await set_aside(refused)\n"
        "        handle = await self._database.write(series, sequence=sequence)\n",
        new="        handle = await self._database.write(series, sequence=sequence)\n"
        "        await self._database.sync()\n        if refused:\n            await set_aside(refused)\n",
        test=f"{FEEDING}::test_a_letter_that_cannot_be_stored_holds_its_batch_back",
    ),
    Mutant(
        name="a stopped database tells senders to give up",
        file="server/timeseries/app.py",
        old="if isinstance(error, FlushError | Shutdown):",
        new="if isinstance(error, Shutdown):",
        test=f"{API}::test_a_fenced_server_says_so_and_stops",
    ),
    Mutant(
        name="a feed goes on behind a batch that is refused",
        file="services/timeseries_feed.py",
        old="        await handle.epoch()",
        new="        ",
        test=f"{FEEDING}::test_no_batch_is_stored_behind_one_that_the_database_refuses",
    ),
    Mutant(
        name="a bucket that cannot be folded stops the database",
        file="timeseries/flusher.py",
        old="        except Corrupt as error:",
        new="        except ZeroDivisionError as error:",
        test=f"{DATABASE}::test_a_bucket_that_cannot_be_folded_is_left_as_it_is_and_writes_go_on",
    ),
)
