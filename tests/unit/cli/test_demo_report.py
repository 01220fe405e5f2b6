"""The demo's totals, and how they are printed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.cli.demo.producer import BAD_AT, Journal, Sums, event, is_bad
from penstock.cli.demo.report import JournalBalance, Records, close_books, print_next, print_totals
from penstock.cli.demo.run import Live, Outcome, Plan

END = 2 * BAD_AT
LATER = END - 5
"""Records from this number on are not acknowledged."""


def events(producer: int = 0) -> list[bytes]:
    return [event(producer, number, END, 0) for number in range(END)]


GOOD = [value for number, value in enumerate(events()) if not is_bad(number)]
BAD = [value for number, value in enumerate(events()) if is_bad(number)]


def books(rows: list[bytes], letters: list[bytes], clicks: int | None = None) -> JournalBalance:
    acked = events()[:LATER]
    journals = {0: Journal(offered_end=END, acked=Sums.of(acked), intervals=((0, LATER),))}
    return close_books(
        journals,
        Records.of(pa.chunked_array([rows], pa.binary())),
        Records.of(pa.chunked_array([letters], pa.binary())),
        len(rows) if clicks is None else clicks,
    )


def test_consistent_journals_and_tables_balance() -> None:
    balance = books(GOOD, BAD)
    assert balance.balanced
    assert (balance.rows, balance.letters) == (END - 1, 1)
    assert balance.acknowledged == balance.stored == Sums.of(events()[:LATER])


def test_unacknowledged_records_may_be_stored_or_not() -> None:
    some = books(GOOD[:-2], BAD)
    assert some.balanced
    assert (some.unacknowledged, some.never_durable) == (3, 2)
    none = books(GOOD[:-5], BAD)
    assert none.balanced
    assert (none.unacknowledged, none.never_durable) == (0, 5)


@pytest.mark.parametrize(
    "change",
    [
        lambda rows, letters: (rows[1:], letters),
        lambda rows, letters: (rows, letters[1:]),
        lambda rows, letters: (rows + rows[:1], letters),
        lambda rows, letters: (rows, letters * 2),
        lambda rows, letters: (rows + rows[-1:], letters),
        lambda rows, letters: (rows[1:] + rows[1:2], letters),
        lambda rows, letters: ([rows[0].replace(b"user-0", b"user-1"), *rows[1:]], letters),
        lambda rows, letters: ([rows[0] + b" ", *rows[1:]], letters),
        lambda rows, letters: ([*rows, event(9, 0, END, 0)], letters),
        lambda rows, letters: ([*rows, event(0, END, END, 0)], letters),
        lambda rows, letters: (rows, [*letters, b"no event at all"]),
        lambda rows, letters: (rows + letters, []),
        lambda rows, letters: (rows[1:], letters + rows[:1]),
    ],
    ids=[
        "row lost",
        "letter lost",
        "row twice",
        "letter twice",
        "unacknowledged row twice",
        "one lost and another twice",
        "changed",
        "longer",
        "of an unknown producer",
        "never offered",
        "foreign letter",
        "bad record among the rows",
        "good record among the letters",
    ],
)
def test_a_lost_duplicate_changed_foreign_or_misplaced_record_does_not_balance(
    change: Callable[[list[bytes], list[bytes]], tuple[list[bytes], list[bytes]]],
) -> None:
    assert not books(*change(GOOD, BAD)).balanced


@pytest.mark.parametrize("difference", [-1, 1])
def test_totals_that_count_a_row_twice_or_not_at_all_do_not_balance(difference: int) -> None:
    assert not books(GOOD, BAD, len(GOOD) + difference).balanced


def test_acknowledged_ranges_may_have_gaps() -> None:
    journal = Journal(offered_end=6, acked=Sums.of(events()[1:2] + events()[3:5]), intervals=((1, 2), (3, 5)))
    rows = Records.of(pa.chunked_array([events()[:6]], pa.binary()))
    balance = close_books({0: journal}, rows, Records.of(pa.chunked_array([], pa.binary())), 6)
    assert balance.balanced
    assert balance.unacknowledged == 3


SUMS = Sums(records=90, size_bytes=900, checksum=0xABC)
BALANCE = JournalBalance(
    produced=100,
    acknowledged=SUMS,
    stored=SUMS,
    rows=92,
    letters=1,
    unacknowledged=3,
    duplicates=0,
    foreign=0,
    misplaced=0,
    clicks=92,
)
DONE = Live(phase="checking", elapsed_s=60.0, producer_kills=1, driver_kills=1)
OUTCOME = Outcome(last=DONE, interrupted=(4,), half_stored=True)


def test_the_totals_report_what_the_kills_interrupted(capsys: pytest.CaptureFixture[str]) -> None:
    print_totals(BALANCE, OUTCOME)
    told = capsys.readouterr().out
    assert told.count("0000000000000abc") == 2
    assert "92 rows, 1 dead letters: 0 missing, 0 twice" in told
    assert "micro-batch 4, when its rows were stored and its totals were not; it was run again" in told
    assert "10 events not acknowledged yet: 3 of them are stored, 7 are not" in told


def test_kills_that_interrupted_nothing_are_reported_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    idle = replace(OUTCOME, last=replace(DONE, producer_kills=0), interrupted=(), half_stored=False)
    print_totals(BALANCE, idle)
    told = capsys.readouterr().out
    assert "between two micro-batches" in told
    assert "no producer" in told


@pytest.mark.parametrize("kept", [True, False])
def test_the_next_steps_name_files_that_exist_or_how_to_get_them(
    capsys: pytest.CaptureFixture[str], kept: bool
) -> None:
    folder = Path("/some where/demo")
    plan = Plan(folder=folder, store=None, producers=1, records=1000, seconds=1.0, since_ms=0)
    print_next(plan, kept=kept)
    told = capsys.readouterr().out
    assert ("penstock audit '/some where/demo/clicks.yaml' --deep" in told) is kept
    assert ("penstock demo --keep --data demo" in told) is not kept
    for verb in ("penstock audit", "penstock run", "penstock buffer stat", "DeltaTable("):
        assert verb in told
