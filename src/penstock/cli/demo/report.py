"""The demo's totals: compares the producers' journals with the tables, and prints the result."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.cli.demo.producer import BAD_AT, BAD_EVERY, COLUMNS, Journal, Sums, checksum_of, rebuild
from penstock.cli.demo.run import ROWS, TOTALS, DemoFailed, Outcome, Plan
from penstock.cli.output import print_pairs, print_table
from penstock.spark import AuditReport, audit_pipeline, load_delta, load_spec, read_letters, table_of
from penstock.units import format_duration, format_size

Numbers: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]
Checksums: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint64]]
Flags: TypeAlias = np.ndarray[tuple[int], np.dtype[np.bool_]]

_MADE_BY: Final = r'^\{"producer":(?P<producer>\d{1,6}),"number":(?P<number>\d{1,12}),'
_NUMBERS: Final = 10**12
"""More than the number of records of any producer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """Records with producer, number, size and checksum. An unknown producer is -1."""

    producer: Numbers
    number: Numbers
    size: Numbers
    checksum: Checksums

    @classmethod
    def of(cls, values: pa.ChunkedArray) -> Records:
        """Parse records from their bytes."""
        made = pc.struct_field(pc.extract_regex(values, _MADE_BY), [0])
        number = pc.struct_field(pc.extract_regex(values, _MADE_BY), [1])
        raw = [value or b"" for value in values.to_pylist()]
        return cls(
            producer=_integers(made),
            number=_integers(number),
            size=np.fromiter(map(len, raw), np.int64, len(raw)),
            checksum=np.fromiter(map(checksum_of, raw), np.uint64, len(raw)),
        )

    def __len__(self) -> int:
        return len(self.producer)

    def __add__(self, other: Records) -> Records:
        return Records(
            producer=np.concatenate([self.producer, other.producer]),
            number=np.concatenate([self.number, other.number]),
            size=np.concatenate([self.size, other.size]),
            checksum=np.concatenate([self.checksum, other.checksum]),
        )

    @property
    def distinct(self) -> int:
        return len(np.unique(self.producer * _NUMBERS + self.number))

    @property
    def bad(self) -> Flags:
        """Which records were produced so that they do not decode."""
        flags: Flags = self.number % BAD_EVERY == BAD_AT
        return flags

    def sums(self, chosen: Flags) -> Sums:
        return Sums(
            records=int(chosen.sum()),
            size_bytes=int(self.size[chosen].sum()),
            checksum=int(self.checksum[chosen].sum(dtype=np.uint64)),
        )


def _integers(texts: pa.ChunkedArray) -> Numbers:
    whole: Numbers = pc.fill_null(texts.cast(pa.string()).cast(pa.int64()), -1).to_numpy()
    return whole


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalBalance:
    """The comparison of the producers' journals with the tables.

    It does not use the pipeline's ledger, which `penstock audit` checks.
    """

    produced: int
    acknowledged: Sums
    stored: Sums
    """The acknowledged records in the tables: rows and dead letters."""
    rows: int
    letters: int
    unacknowledged: int
    """Stored records whose producer was killed before it received the acknowledgement."""
    duplicates: int
    foreign: int
    """Stored records that were never produced."""
    misplaced: int
    """Bad records among the rows, and good ones among the dead letters."""
    clicks: int
    """The sum of clicks in the table of totals."""

    @property
    def balanced(self) -> bool:
        """Whether every acknowledged record is stored exactly once, unchanged, and counted once."""
        return (
            self.acknowledged == self.stored
            and self.duplicates == self.foreign == self.misplaced == 0
            and self.clicks == self.rows
        )

    @property
    def never_durable(self) -> int:
        """Records that a producer had not stored when it was killed."""
        return self.produced - self.acknowledged.records - self.unacknowledged

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "in_flight_when_killed": self.never_durable}


def close_books(
    journals: Mapping[int, Journal], rows: Records, letters: Records, clicks: int
) -> JournalBalance:
    """Compare every stored record with the journal of its producer."""
    stored = rows + letters
    offered, acked = np.zeros(len(stored), np.bool_), np.zeros(len(stored), np.bool_)
    for producer, journal in journals.items():
        mine = stored.producer == producer
        offered |= mine & (stored.number < journal.offered_end)
        acked |= mine & _within(stored.number, journal.intervals)
    return JournalBalance(
        produced=sum(journal.offered_end for journal in journals.values()),
        acknowledged=sum((journal.acked for journal in journals.values()), Sums()),
        stored=stored.sums(acked),
        rows=len(rows),
        letters=len(letters),
        unacknowledged=int((offered & ~acked).sum()),
        duplicates=len(stored) - stored.distinct,
        foreign=int((~offered).sum()),
        misplaced=int(rows.bad.sum()) + int((~letters.bad).sum()),
        clicks=clicks,
    )


def _within(numbers: Numbers, intervals: tuple[tuple[int, int], ...]) -> Flags:
    """Return which numbers are in one of the half-open ranges, which are ascending and disjoint."""
    edges = np.array(intervals, np.int64).reshape(-1)
    flags: Flags = np.searchsorted(edges, numbers, side="right") % 2 == 1
    return flags


def read_books(plan: Plan) -> JournalBalance:
    """Compare the tables with the journals. Raise `DemoFailed` if a table is missing."""
    spec = load_spec(plan.pipeline_file)
    tables = {name: table_of(sink) for name, sink in spec.outputs.items()}
    rows, totals = (load_delta(table) for name in (ROWS, TOTALS) if (table := tables[name]) is not None)
    letters = table_of(spec.letters) if spec.letters is not None else None
    if rows is None or totals is None or letters is None:
        raise DemoFailed(f"the table {ROWS} or {TOTALS} is missing, although everything is delivered")
    events = rebuild(rows.to_pyarrow_dataset().to_table(columns=list(COLUMNS)))
    clicks = totals.to_pyarrow_dataset().to_table(columns=["clicks"]).column("clicks")
    dead = read_letters(letters, ["value"]).column("value")
    return close_books(
        plan.journals(), Records.of(events), Records.of(dead), int(pc.sum(clicks).as_py() or 0)
    )


def print_totals(balance: JournalBalance, outcome: Outcome) -> None:
    rows = [
        ("acknowledged to producers", *_cells(balance.acknowledged)),
        ("of these, in the tables", *_cells(balance.stored)),
    ]
    print_table(("", "events", "bytes", "checksum"), rows, right=(1, 2, 3))
    lacking = balance.acknowledged.records - balance.stored.records
    wrong = (
        f"{max(0, lacking):,} missing, {balance.duplicates:,} twice, {balance.foreign:,} from nowhere, "
        f"{balance.misplaced:,} in the wrong table"
    )
    print_pairs(
        [
            ("stored", f"{balance.rows:,} rows, {balance.letters:,} dead letters: {wrong}"),
            ("totals", f"{TOTALS} adds up to {balance.clicks:,} clicks, for {balance.rows:,} rows"),
            ("killed", _driver_kill(outcome)),
            ("killed", _producer_kill(balance, outcome)),
            ("time", _speed(balance, outcome)),
        ]
    )


def _cells(sums: Sums) -> tuple[str, str, str]:
    return f"{sums.records:,}", f"{sums.size_bytes:,}", f"{sums.checksum:016x}"


def _driver_kill(outcome: Outcome) -> str:
    if not outcome.interrupted:
        return "the Spark driver, between two micro-batches"
    moment = "when its rows were stored and its totals were not" if outcome.half_stored else "in the middle"
    return f"the Spark driver in micro-batch {outcome.interrupted[0]}, {moment}; it was run again"


def _producer_kill(balance: JournalBalance, outcome: Outcome) -> str:
    if not outcome.last.producer_kills:
        return "no producer: it had ended before"
    return (
        f"a producer with {balance.never_durable + balance.unacknowledged:,} events not acknowledged yet: "
        f"{balance.unacknowledged:,} of them are stored, {balance.never_durable:,} are not; either is right"
    )


def _speed(balance: JournalBalance, outcome: Outcome) -> str:
    size = format_size(balance.acknowledged.size_bytes)
    return f"{size} in {format_duration(outcome.last.elapsed_s)}, with two starts of Spark"


def audit_of(plan: Plan) -> AuditReport:
    """Audit the pipeline record by record, as `penstock audit --deep` does."""
    return audit_pipeline(load_spec(plan.pipeline_file), sink=None, deep=True)


def print_next(plan: Plan, *, kept: bool) -> None:
    """Print suggested commands; if the files are not kept, those for a run that keeps them."""
    if kept:
        file, queue, table = str(plan.pipeline_file), plan.queue, plan.table(TOTALS)
    else:
        file, queue, table = "demo/clicks.yaml", "demo/queue", f"demo/tables/{TOTALS}"
    script = f"from deltalake import DeltaTable; print(DeltaTable({table!r}).to_pandas())"
    steps = [
        ("check it again", f"penstock audit {shlex.quote(file)} --deep"),
        ("run it further", f"penstock run {shlex.quote(file)}"),
        ("see the queue", f"penstock buffer stat {shlex.quote(queue)}"),
        ("read a table", f'python -c "{script}"'),
        ("read on", "docs/README.md: pipelines, formats, what is promised and how it is tested"),
    ]
    if not kept:
        steps.insert(0, ("keep the files", "penstock demo --keep --data demo, then:"))
    print_pairs(steps, "Where to look next")
