"""The reconciliation of a pipeline: balanced books, and every kind of damage with its exact sequences."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from penstock.findings import Severity
from penstock.spark.audit.ledger_reader import AuditFinding, Facts, ShardFacts, Span, TableFacts
from penstock.spark.audit.positions import Places, compare_places, windows
from penstock.spark.audit.reconcile import Balance, balance
from penstock.spark.pipeline.ledger import BatchLine


def line(
    batch: int,
    start: int,
    end: int,
    *,
    read: int,
    rows: int,
    dead: int = 0,
    skipped: int = 0,
    gaps: int = 0,
    one_to_one: bool = True,
) -> BatchLine:
    return BatchLine(
        batch=batch,
        start={0: start},
        end={0: end},
        read=read,
        dead=dead,
        skipped=skipped,
        gaps=gaps,
        rows={"t": rows},
        one_to_one={"t": one_to_one},
        at_ms=0,
    )


LINES = (
    line(0, 0, 2, read=20, rows=20),
    line(1, 2, 3, read=10, rows=7, dead=1),
    line(2, 3, 5, read=20, rows=18, skipped=2),
)
TABLE = TableFacts(place="lake/t", last=2, rows={0: 20, 1: 7, 2: 18}, row_count=45)
LETTERS = TableFacts(place="lake/dead", last=1, rows={1: 1}, row_count=1)
SHARD = ShardFacts(first=2, following=7, counts=dict.fromkeys(range(1, 7), 10))
FACTS = Facts(
    origin={0: 0},
    queue={0: SHARD},
    done=frozenset({0, 1, 2}),
    lines=LINES,
    sinks={"t": TABLE},
    letters=LETTERS,
    planned={0: {0: 2}, 1: {0: 3}, 2: {0: 5}},
    ends={0: 7},
)


def problems(found: Balance) -> list[AuditFinding]:
    return [finding for finding in found.findings if finding.severity is Severity.PROBLEM]


def notes(found: Balance) -> str:
    return "\n".join(f.text for f in found.findings if f.severity is Severity.NOTE)


def only(found: Balance) -> AuditFinding:
    assert not found.balanced
    (finding,) = problems(found)
    return finding


def with_table(**changes: object) -> Facts:
    return replace(FACTS, sinks={"t": replace(TABLE, **changes)})  # type: ignore[arg-type]


def test_every_record_is_delivered_dead_dropped_skipped_or_in_flight() -> None:
    found = balance(FACTS)
    assert found.balanced
    assert not found.findings
    (totals,) = found.sinks
    assert (
        totals.produced,
        totals.delivered,
        totals.dead,
        totals.dropped,
        totals.skipped,
        totals.in_flight,
    ) == (
        70,
        45,
        1,
        2,
        2,
        20,
    )
    assert totals.difference == 0
    assert (found.recounted, found.taken) == (30, 20)
    assert [(shard.next, shard.batches, shard.records) for shard in found.shards] == [(5, 2, 20)]


def test_a_pipeline_that_never_ran_has_everything_in_flight() -> None:
    never = replace(
        FACTS, lines=(), done=None, planned=None, origin={0: 2}, letters=None,
        sinks={"t": TableFacts(place="lake/t", last=None, rows={})},
    )  # fmt: skip
    found = balance(never)
    assert found.balanced
    assert (found.sinks[0].produced, found.in_flight) == (50, 50)


def test_a_lost_line_is_reported_with_its_sequences_and_the_rows_in_the_tables() -> None:
    finding = only(balance(replace(FACTS, lines=(LINES[0], LINES[2]))))
    assert finding.subject == "micro-batch 1"
    assert (
        finding.text == "has no line in the ledger: sequence 2, 10 records by the queue; of it t has 7 rows"
    )
    assert finding.spans == (Span(shard=0, first=2, last=2),)


def test_a_lost_first_line_begins_at_the_origin() -> None:
    finding = only(balance(replace(FACTS, lines=LINES[1:])))
    assert finding.spans == (Span(shard=0, first=0, last=1),)


def test_a_committed_batch_without_a_line_is_found_by_the_checkpoint() -> None:
    facts = replace(FACTS, lines=LINES[:1])
    found = balance(facts)
    assert [(f.subject, f.spans[0].first, f.spans[0].last) for f in problems(found)] == [
        ("micro-batch 1", 2, 2),
        ("micro-batch 2", 3, 4),
    ]
    assert found.shards[0].next == 5


def test_lost_lines_without_a_known_boundary_are_one_finding() -> None:
    lines = (LINES[0], replace_line(LINES[2], batch=40))
    facts = replace(FACTS, lines=lines, planned={40: {0: 5}}, done=frozenset({40}))
    subjects = [finding.subject for finding in problems(balance(facts))]
    assert "micro-batches 1 to 39" in subjects


def replace_line(of: BatchLine, **changes: object) -> BatchLine:
    import msgspec

    return msgspec.structs.replace(of, **changes)


def test_a_line_that_leaves_sequences_out_is_found() -> None:
    gap = replace_line(LINES[1], start={0: 3}, end={0: 4})
    found = balance(replace(FACTS, lines=(LINES[0], gap), done=frozenset({0, 1}), planned={1: {0: 4}}))
    assert any(
        f.text == "does not begin at the end of micro-batch 0: sequence 2 left out" for f in problems(found)
    )


def test_a_line_that_takes_sequences_twice_is_found() -> None:
    twice = replace_line(LINES[1], start={0: 1})
    found = balance(replace(FACTS, lines=(LINES[0], twice, LINES[2])))
    assert any("sequence 1 taken twice" in finding.text for finding in problems(found))


def test_a_first_line_elsewhere_than_the_origin_is_found() -> None:
    finding = only(balance(replace(FACTS, origin={0: 1})))
    assert finding.text == "does not begin at the pipeline's origin: sequence 0 taken twice"


def test_a_plan_that_differs_from_the_line_is_found() -> None:
    finding = only(balance(replace(FACTS, planned={2: {0: 6}})))
    assert "the ledger says sequences 3 to 4, the checkpoint sequences 3 to 5" in finding.text


def test_a_checkpoint_older_than_the_ledger_was_rolled_back() -> None:
    finding = only(balance(replace(FACTS, planned={0: {0: 2}}, done=frozenset({0}))))
    assert (finding.subject, finding.spans) == ("checkpoint", (Span(shard=0, first=2, last=4),))


def test_a_planned_batch_is_in_flight_and_not_a_problem() -> None:
    found = balance(replace(FACTS, planned={2: {0: 5}, 3: {0: 6}}))
    assert found.balanced
    assert "is planned and not delivered yet: sequence 5 in flight" in notes(found)


def test_a_line_whose_commit_is_not_there_yet_counts_as_delivered() -> None:
    found = balance(replace(FACTS, done=frozenset({0, 1})))
    assert found.balanced
    assert found.shards[0].next == 5


def test_a_table_that_is_ahead_of_the_ledger_is_being_committed() -> None:
    found = balance(with_table(rows={**(TABLE.rows or {}), 3: 10}, last=3, row_count=55))
    assert found.balanced
    assert found.sinks[0].delivered == 45


def test_a_batch_that_is_missing_in_a_table_is_named() -> None:
    found = balance(with_table(rows={0: 20, 2: 18}))
    assert only(found).text == (
        "micro-batch 1 delivered 7 rows by the ledger, and lake/t does not have it: sequence 2"
    )
    assert found.sinks[0].difference == 7


def test_a_batch_with_other_rows_is_named() -> None:
    found = balance(with_table(rows={0: 20, 1: 7, 2: 19}, row_count=46))
    assert "micro-batch 2 delivered 18 rows by the ledger, and lake/t has 19" in only(found).text
    assert found.sinks[0].difference == -1


def test_a_table_that_was_rolled_back_is_named() -> None:
    found = balance(with_table(rows={0: 20}, last=0, row_count=20))
    assert any("its last micro-batch is 0" in finding.text for finding in problems(found))


def test_rows_that_vanished_later_are_counted() -> None:
    assert "holds 44 rows, 1 fewer than were added" in only(balance(with_table(row_count=44))).text


def test_a_cleaned_history_is_a_note_and_not_a_problem() -> None:
    found = balance(with_table(rows={2: 18}, complete=False))
    assert found.balanced
    assert "2 micro-batches up to 1 could not be compared" in notes(found)


def test_a_history_that_is_wholly_cleaned_still_has_its_last_batch() -> None:
    assert balance(with_table(rows={}, complete=False, row_count=None)).balanced
    behind = balance(with_table(rows={}, complete=False, last=1, row_count=None))
    assert not behind.balanced


def test_a_sink_that_records_no_rows_is_judged_by_its_last_batch() -> None:
    assert balance(with_table(rows=None, row_count=None)).balanced
    assert "that 2 was delivered" in only(balance(with_table(rows=None, row_count=None, last=1))).text


def test_lost_dead_letters_are_named() -> None:
    found = balance(replace(FACTS, letters=replace(LETTERS, rows={}, row_count=0)))
    assert only(found).subject == "dead letters"
    assert found.sinks[0].difference == 1


def test_records_that_were_never_read_are_found_in_the_queue() -> None:
    counts = {**SHARD.counts, 4: 13}
    found = balance(replace(FACTS, queue={0: replace(SHARD, counts=counts)}))
    assert (
        "read 20 records, but the queue has 23 in sequences 3 to 4: 3 records never read" in only(found).text
    )
    assert found.sinks[0].difference == 3


def test_sequences_that_left_the_queue_undelivered_are_named() -> None:
    shard = ShardFacts(first=6, following=7, counts={6: 10})
    finding = only(balance(replace(FACTS, queue={0: shard})))
    assert finding.text == "sequence 5 left the queue and no micro-batch has delivered them"


def test_a_batch_in_flight_that_is_gone_is_named() -> None:
    broken = replace(SHARD, counts={5: 10}, broken={6: "is not in the store", 2: "is not in the store"})
    assert (
        "the batch of sequence 6 is not in the store" in only(balance(replace(FACTS, queue={0: broken}))).text
    )


def test_a_queue_that_is_shorter_than_what_was_delivered_is_another_one() -> None:
    shard = ShardFacts(first=0, following=3, counts={})
    assert "only up to 2" in only(balance(replace(FACTS, queue={0: shard}, ends={0: 3}))).text


def test_a_queue_that_grew_while_it_was_read_is_not_a_problem() -> None:
    shard = ShardFacts(first=2, following=4, counts={})
    assert balance(replace(FACTS, queue={0: shard}, ends={0: 9})).balanced


def test_gaps_are_reported_and_do_not_change_the_balance() -> None:
    lines = (LINES[0], line(1, 2, 3, read=0, rows=0, gaps=1), LINES[2])
    facts = replace(FACTS, lines=lines, sinks={"t": replace(TABLE, rows={0: 20, 2: 18}, row_count=38)})
    found = balance(facts)
    assert found.balanced
    assert found.gaps == 1
    assert "found a gap in the queue within sequence 2" in notes(found)


def test_a_sink_that_groups_rows_has_no_difference() -> None:
    lines = tuple(replace_line(one, one_to_one={"t": False}) for one in LINES)
    found = balance(replace(FACTS, lines=lines))
    assert found.balanced
    assert (found.sinks[0].dropped, found.sinks[0].difference) == (None, None)
    assert "do not correspond to records one to one" in notes(found)


def test_more_rows_than_records_are_found() -> None:
    facts = replace(FACTS, lines=(line(0, 0, 2, read=20, rows=21),), done=frozenset({0}), planned={0: {0: 2}})
    facts = replace(facts, sinks={"t": replace(TABLE, rows={0: 21}, row_count=21)})
    assert any("1 rows more than it read" in finding.text for finding in problems(balance(facts)))


def test_shards_are_distinguished() -> None:
    both = BatchLine(
        batch=0, start={0: 0, 1: 4}, end={0: 2, 1: 6}, read=9, rows={"t": 8}, one_to_one={"t": False}, at_ms=0
    )
    facts = replace(
        FACTS,
        origin={0: 0, 1: 4},
        queue={0: SHARD, 1: replace(SHARD, first=4)},
        lines=(both,),
        done=frozenset({0}),
        planned={0: {0: 2, 1: 6}},
        sinks={"t": TableFacts(place="lake/t", last=0, rows={0: 7})},
        ends={0: 7, 1: 7},
    )
    assert only(balance(facts)).text.endswith("sequences 0 to 1 of shard 0, sequences 4 to 5 of shard 1")


def test_lines_without_the_sink_do_not_count_for_it() -> None:
    earlier = replace_line(LINES[0], rows={"other": 20}, one_to_one={"other": True})
    facts = replace(
        FACTS, lines=(earlier, *LINES[1:]), sinks={"t": replace(TABLE, rows={1: 7, 2: 18}, row_count=25)}
    )
    found = balance(facts)
    assert found.balanced
    assert found.sinks[0].produced == 50


def places(*found: tuple[int, int]) -> Places:
    sequence, index = (np.array(column, np.int64) for column in zip(*found, strict=True))
    return Places(shard=np.zeros(len(found), np.int64), sequence=sequence, index=index)


NOTHING = Places.gather([])
WHOLE = [(sequence, index) for sequence in (3, 4) for index in range(10)]
PAIR = line(0, 3, 5, read=20, rows=20)


def test_records_that_are_all_present_once_give_no_finding() -> None:
    assert not compare_places("t", [PAIR], places(*WHOLE), NOTHING, FACTS)


def test_a_duplicate_record_is_named() -> None:
    (finding,) = compare_places("t", [PAIR], places(*WHOLE, (4, 7), (4, 7)), NOTHING, FACTS)
    assert finding.text == "2 rows too many in micro-batches 0 to 0, dead letters included: (4, 7)"


def test_a_record_in_the_table_and_in_the_dead_letters_is_a_duplicate() -> None:
    (finding,) = compare_places("t", [PAIR], places(*WHOLE), places((3, 0)), FACTS)
    assert "(3, 0)" in finding.text


def test_records_that_are_missing_are_named() -> None:
    there = [place for place in WHOLE if place not in ((3, 4), (4, 9))]
    (finding,) = compare_places("t", [PAIR], places(*there), NOTHING, FACTS)
    assert finding.text == "micro-batch 0 (sequences 3 to 4) lacks 2 records: (3, 4), (4, 9)"


def test_dead_letters_are_not_missing() -> None:
    lines = [line(0, 3, 5, read=20, rows=19, dead=1)]
    assert not compare_places("t", lines, places(*WHOLE[1:]), places(WHOLE[0], (3, -1)), FACTS)


def test_in_a_collected_batch_only_missing_inner_records_can_be_named() -> None:
    collected = replace(FACTS, queue={0: replace(SHARD, counts={})})
    there = [place for place in WHOLE if place not in ((3, 4), (4, 9))]
    (finding,) = compare_places("t", [PAIR], places(*there), NOTHING, collected)
    assert finding.text.endswith("lacks 2 records: (3, 4) and others")


def test_records_lost_beside_dropped_ones_are_counted() -> None:
    lines = [line(0, 3, 5, read=20, rows=15)]
    (finding,) = compare_places("t", lines, places(*WHOLE[:14]), NOTHING, FACTS)
    assert "lacks 1 records: they cannot be distinguished" in finding.text


def test_records_beyond_the_ledger_are_counted() -> None:
    (finding,) = compare_places("t", [line(0, 3, 5, read=20, rows=15)], places(*WHOLE), NOTHING, FACTS)
    assert "has 5 records more than the ledger says" in finding.text


def test_only_twenty_positions_are_listed() -> None:
    (finding,) = compare_places("t", [PAIR], places(*WHOLE, *WHOLE, *WHOLE), NOTHING, FACTS)
    assert finding.text.startswith("40 rows too many")
    assert finding.text.endswith("and 20 more")


def test_rows_of_other_micro_batches_are_ignored() -> None:
    assert not compare_places("t", [PAIR], places(*WHOLE, (5, 0), (5, 0), (2, 0)), NOTHING, FACTS)


def test_windows_are_runs_of_consecutive_lines_of_bounded_size() -> None:
    assert [[one.batch for one in window] for window in windows(LINES, records=30)] == [[0, 1], [2]]
    assert [[one.batch for one in window] for window in windows((LINES[0], LINES[2]))] == [[0], [2]]
    assert list(windows(())) == []
