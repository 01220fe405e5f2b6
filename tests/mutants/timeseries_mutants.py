"""Deliberate bugs in the time series' formats and in PromQL; see `mutants.py`."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["TIMESERIES_MUTANTS"]

MODEL = "tests/unit/timeseries/test_model.py"
GORILLA = "tests/unit/timeseries/test_gorilla.py"
SELECTORS = "tests/unit/timeseries/test_promql_selectors.py"
FUNCTIONS = "tests/unit/timeseries/test_promql_functions.py"
OPERATORS = "tests/unit/timeseries/test_promql_operators.py"
LIMITS = "tests/unit/timeseries/test_query_limits.py"
PUBLISHED = "tests/unit/timeseries/test_promql_published.py"
REMOTE_WRITE = "tests/unit/timeseries/test_remote_write.py"

TIMESERIES_MUTANTS = (
    Mutant(
        name="a fingerprint of bare texts joins different labels",
        where="timeseries:Labels.fingerprint",
        old='digest.update(struct.pack("<II", len(name), len(value)) + name + value)',
        new="digest.update(name + value)",
        test=f"{MODEL}::test_a_fingerprint_tells_apart_what_only_joins_to_the_same_text",
    ),
    Mutant(
        name="the oldest operand of a merge wins",
        where="timeseries:merge_streams",
        old="encode(Samples.joined(decode_many(filled)))",
        new="encode(Samples.joined(decode_many(filled[::-1])))",
        test=f"{GORILLA}::test_the_newest_operand_wins_a_timestamp",
    ),
    Mutant(
        name="a window is carried from one stream into the next",
        where="timeseries:_windows",
        old="opening = own_stream != current or own_lead < lead or own_trail < trail",
        new="opening = not current or own_lead < lead or own_trail < trail",
        test=f"{GORILLA}::test_many_are_encoded_as_each_alone",
    ),
    Mutant(
        name="any NaN ends a series",
        where="timeseries:is_stale",
        old="stale: Mask = bits == np.uint64(STALE_BITS)",
        new="stale: Mask = np.isnan(values)",
        test=f"{SELECTORS}::test_nan_is_a_value",
    ),
    Mutant(
        name="a sample counts at the fifth minute still",
        where="timeseries:latest",
        old="(stamps > times - lookback_ms)",
        new="(stamps >= times - lookback_ms)",
        test=f"{SELECTORS}::test_a_series_comes_back_after_its_gap",
    ),
    Mutant(
        name="a range is closed at the left",
        where="timeseries:Windows.over",
        old="rows.positions(ends - range_ms), rows.positions(ends)",
        new="rows.positions(ends - range_ms - 1), rows.positions(ends)",
        test=f"{SELECTORS}::test_every_step_of_a_range_query_sees_a_window_open_at_the_left",
    ),
    Mutant(
        name="a reset of a counter is a loss",
        where="timeseries:_extrapolated",
        old="            change = change + _summed(windows, _lost_to_resets(windows.rows.values))\n",
        new="            pass\n",
        test=f"{FUNCTIONS}::test_a_reset_is_added_back",
    ),
    Mutant(
        name="a counter is extended below zero",
        where="timeseries:_extrapolated",
        old="to_start = np.minimum(to_start, to_zero)",
        new="to_start = np.minimum(to_start, np.inf)",
        test=f"{FUNCTIONS}::test_an_increase_is_not_extended_below_zero",
    ),
    Mutant(
        name="group_right turns the operator round",
        where="timeseries:between_vectors",
        old="sides = (one_values, many_values) if swapped else (many_values, one_values)",
        new="sides = (many_values, one_values)",
        test=f"{OPERATORS}::test_one_to_many_keeps_the_sides_of_the_operator",
    ),
    Mutant(
        name="a block is unpacked before its size is looked at",
        where="timeseries:unpacked_size",
        old="    if claimed > bytes_max:\n",
        new="    if claimed > bytes_max and len(cramjam.snappy.decompress_raw(body)) > bytes_max:\n",
        test=f"{REMOTE_WRITE}::test_the_size_is_checked_before_anything_is_unpacked",
    ),
    Mutant(
        name="every selector of a query has the whole budget",
        where="timeseries:_within",
        old="        budget.charge(len(kept[-1]))\n",
        new="        budget.check()\n",
        test=f"{LIMITS}::test_samples_count_over_all_selectors_of_a_query",
    ),
    Mutant(
        name="the time is not looked at while pages are read",
        where="timeseries:BucketReader._pages",
        old="        self._budget.check()\n        yield page\n",
        new="        yield page\n",
        test=f"{LIMITS}::test_time_is_checked_for_every_page_that_is_read",
    ),
    Mutant(
        name="the time is not looked at between windows",
        where="timeseries:Windows.fold",
        old='        self.check()\n        with np.errstate(all="ignore"):\n            values[row, step]',
        new='        with np.errstate(all="ignore"):\n            values[row, step]',
        test=f"{LIMITS}::test_time_is_checked_between_pieces_of_work",
    ),
    Mutant(
        name="a reader waits for its place without end",
        where="timeseries:TimeSeries._place",
        old=(
            "        async with asyncio.timeout(budget.seconds_left):\n"
            "            await self._querying.acquire()\n"
        ),
        new="        await self._querying.acquire()\n",
        test=f"{LIMITS}::test_a_reader_without_a_slot_is_unavailable",
    ),
    Mutant(
        name="histograms of two metrics are one",
        where="timeseries:histogram_quantile",
        old="group_by([labels.drop((BUCKET_LABEL,))",
        new="group_by([labels.without_name().drop((BUCKET_LABEL,))",
        test=f"{PUBLISHED}::test_published_expectations_hold",
    ),
    Mutant(
        name="a label that a query makes may have any length",
        where="timeseries:checked_labels",
        old='size > LABEL_BYTES_MAX:\n            raise ExecutionError(\n                f"{maker} makes',
        new='size > 2**40:\n            raise ExecutionError(\n                f"{maker} makes',
        test=f"{LIMITS}::test_a_query_makes_no_label_that_could_not_be_stored",
    ),
    Mutant(
        name="labels that a query makes cost nothing",
        where="timeseries:Budget.charge_labels",
        old="        self.charge(labels_cost(one) + names // _SAMPLE_BYTES)\n",
        new="        self.charge(0)\n",
        test=f"{LIMITS}::test_labels_that_series_share_are_charged_for_each_series_of_the_answer",
    ),
    Mutant(
        name="names of labels that a query makes cost nothing",
        where="timeseries:Budget.charge_labels",
        old="labels_cost(one) + names // _SAMPLE_BYTES",
        new="labels_cost(one)",
        test=f"{LIMITS}::test_names_of_labels_that_a_query_makes_are_charged",
    ),
    Mutant(
        name="count_values makes a label of any length",
        where="timeseries:count_values",
        old='(checked_labels(one, "count_values()") for one in made)',
        new="made",
        test=f"{LIMITS}::test_count_values_makes_no_label_that_could_not_be_stored",
    ),
    Mutant(
        name="nothing ends the matching of an expression",
        where="timeseries:Pattern.matches",
        old="            check()\n",
        new="            pass\n",
        test=f"{LIMITS}::test_the_timeout_ends_the_matching_of_an_expression",
    ),
)
