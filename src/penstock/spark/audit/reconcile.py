"""The reconciliation: produced = delivered + dead-lettered + dropped + skipped + in flight.

Pure: it turns `Facts` into totals and findings. The two sides have different sources. Produced comes from the
queue: records are counted again if their batches are still stored. Delivered and dead-lettered come from the
tables. The pipeline's ledger connects the two, and replaces the queue or a table where their history ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from penstock.findings import Severity, problems_in
from penstock.spark.audit.ledger_reader import (
    AuditFinding,
    Facts,
    Span,
    TableFacts,
    spans_between,
    spans_text,
)
from penstock.spark.pipeline.ledger import BatchLine
from penstock.spark.sources.offsets import Offset

_EACH: Final = 10
"""A longer run of micro-batches without a line becomes one finding."""
_STOP: Final = "stop the pipeline and change nothing until the cause is known"


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkTotals:
    """The totals of one sink, in records. `dropped` is None if rows are not one to one with records."""

    name: str
    place: str
    produced: int
    delivered: int
    dead: int
    dropped: int | None
    skipped: int
    in_flight: int

    @property
    def difference(self) -> int | None:
        """The number of missing records, negative for surplus ones. None if `dropped` is None."""
        if self.dropped is None:
            return None
        return self.produced - self.delivered - self.dead - self.dropped - self.skipped - self.in_flight


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTotals:
    """The undelivered batches and records of a shard."""

    shard: int
    next: int
    """The first undelivered sequence."""
    batches: int
    records: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """The result of the reconciliation: the totals and the findings."""

    batches: int
    """The number of micro-batches that have a line."""
    sinks: tuple[SinkTotals, ...]
    shards: tuple[ShardTotals, ...]
    gaps: int
    """The number of gaps in the queue that became dead letters. Their number of records is unknown."""
    recounted: int
    """The number of records that were counted again in the queue's own batches."""
    taken: int
    """The number of records according to the ledger, whose batches cannot be counted again."""
    findings: tuple[AuditFinding, ...]

    @property
    def in_flight(self) -> int:
        return sum(shard.records for shard in self.shards)

    @property
    def balanced(self) -> bool:
        return not problems_in(self.findings) and not any(sink.difference for sink in self.sinks)


@dataclass(frozen=True, slots=True, kw_only=True)
class _MissingLines:
    """A run of micro-batches without a line, `first` to `last`, from `start` to `end` if known."""

    first: int
    last: int
    start: Offset | None
    end: Offset | None

    @property
    def batches(self) -> range:
        return range(self.first, self.last + 1)

    @property
    def spans(self) -> tuple[Span, ...]:
        return () if self.start is None or self.end is None else spans_between(self.start, self.end)


def balance(facts: Facts) -> Balance:
    """Return totals and findings. Work in progress of a running pipeline is not a finding."""
    missing = list(_missing_runs(facts))
    reached = _reached(facts, missing)
    shards = tuple(_in_flight(facts, reached))
    findings = [
        *_check_lines(facts),
        *(_missing_line(run, facts) for run in missing),
        *_check_checkpoint(facts),
        *_check_reading(facts),
        *_check_queue(facts, reached),
    ]
    for name, table in facts.sinks.items():
        expected = {line.batch: line.rows[name] for line in facts.lines if name in line.rows}
        findings += _check_table(f"sink {name}", table, expected, facts)
        findings += _check_one_to_one(name, facts)
    if facts.letters is not None:
        findings += _check_table("dead letters", facts.letters, _letters_expected(facts), facts)
    elif any(line.dead + line.gaps for line in facts.lines):
        findings.append(
            _note("dead letters", "the pipeline's file no longer has their table, so they are not compared")
        )
    read = sum(line.read for line in facts.lines)
    counted = sum(line.read for line in facts.lines if recounted(line, facts) is not None)
    return Balance(
        batches=len(facts.lines),
        sinks=tuple(_totals(name, table, facts, missing, shards) for name, table in facts.sinks.items()),
        shards=shards,
        gaps=sum(line.gaps for line in facts.lines),
        recounted=counted,
        taken=read - counted,
        findings=tuple(findings),
    )


def _problem(subject: str, text: str, advice: str = _STOP, spans: tuple[Span, ...] = ()) -> AuditFinding:
    return AuditFinding(severity=Severity.PROBLEM, subject=subject, text=text, advice=advice, spans=spans)


def _note(subject: str, text: str, advice: str = "", spans: tuple[Span, ...] = ()) -> AuditFinding:
    return AuditFinding(severity=Severity.NOTE, subject=subject, text=text, advice=advice, spans=spans)


def _of(line: BatchLine) -> tuple[Span, ...]:
    return spans_between(line.start, line.end)


def _check_lines(facts: Facts) -> Iterator[AuditFinding]:
    """Check that each line begins at the end of the previous one."""
    before: BatchLine | None = None
    for line in facts.lines:
        start = before.end if before is not None else facts.origin
        follows = (before is None and line.batch == 0) or (
            before is not None and line.batch == before.batch + 1
        )
        if follows and start is not None and start != line.start:
            where = "the pipeline's origin" if before is None else f"the end of micro-batch {before.batch}"
            skipped, twice = spans_between(start, line.start), spans_between(line.start, start)
            parts = [f"{spans_text(skipped)} left out"] if skipped else []
            parts += [f"{spans_text(twice)} taken twice"] if twice else []
            yield _problem(
                f"micro-batch {line.batch}",
                f"does not begin at {where}: {' and '.join(parts)}",
                spans=skipped + twice,
            )
        before = line


def _missing_runs(facts: Facts) -> Iterator[_MissingLines]:
    """Yield runs of micro-batches without a line, split at the boundaries that are known."""
    known = {line.batch: line for line in facts.lines}
    last = max((*known, *(facts.done or ())), default=-1)
    batch = 0
    while batch <= last:
        if batch in known:
            batch += 1
            continue
        through = batch
        while through < last and through + 1 not in known:
            through += 1
        yield from _cut(batch, through, known, facts)
        batch = through + 1


def _cut(first: int, last: int, known: Mapping[int, BatchLine], facts: Facts) -> Iterator[_MissingLines]:
    planned = facts.planned or {}
    start = known[first - 1].end if first > 0 else facts.origin
    end = known[last + 1].start if last + 1 in known else planned.get(last)
    if last - first >= _EACH:
        yield _MissingLines(first=first, last=last, start=start, end=end)
        return
    opened = first
    for batch in range(first, last + 1):
        until = end if batch == last else planned.get(batch)
        if until is not None or batch == last:
            yield _MissingLines(first=opened, last=batch, start=start, end=until)
            opened, start = batch + 1, until


def _missing_line(run: _MissingLines, facts: Facts) -> AuditFinding:
    one = run.first == run.last
    subject = f"micro-batch {run.first}" if one else f"micro-batches {run.first} to {run.last}"
    where = spans_text(run.spans) if run.end is not None else "unknown sequences"
    count = _recount(run.spans, facts) if run.end is not None else None
    held = [
        f"{name} has {sum(table.rows.get(batch, 0) for batch in run.batches)} rows"
        for name, table in facts.sinks.items()
        if table.rows is not None
    ]
    size = "" if count is None else f", {count} records by the queue"
    text = f"{'has' if one else 'have'} no line in the ledger: {where}{size}"
    return _problem(
        subject,
        text + (f"; of it {', '.join(held)}" if held else ""),
        "restore the ledger's objects from a backup; the records themselves may have been delivered",
        run.spans,
    )


def _check_checkpoint(facts: Facts) -> Iterator[AuditFinding]:
    """Compare the plans in the checkpoint with the lines."""
    if facts.planned is None:
        return
    last = facts.lines[-1].batch if facts.lines else -1
    for line in facts.lines:
        planned = facts.planned.get(line.batch)
        if planned is not None and planned != line.end:
            yield _problem(
                f"micro-batch {line.batch}",
                f"ends elsewhere in the checkpoint: the ledger says {spans_text(_of(line))}, "
                f"the checkpoint {spans_text(spans_between(line.start, planned))}",
                "the checkpoint or the ledger is not this pipeline's own, or one of them was replaced",
                _of(line),
            )
    if facts.lines and max(facts.planned, default=-1) < last:
        yield _problem(
            "checkpoint",
            f"ends at micro-batch {max(facts.planned, default=-1)}, the ledger at {last}: it was "
            "rolled back or is a copy",
            "use the right checkpoint: sinks refuse micro-batches below the last one they have",
            spans_between(facts.planned[max(facts.planned)], facts.lines[-1].end) if facts.planned else (),
        )
    open_batch = min(
        (batch for batch in facts.planned if batch > max(last, *(facts.done or {-1}))), default=None
    )
    if open_batch is not None:
        start = facts.lines[-1].end if facts.lines else facts.origin or {}
        spans = spans_between(start, facts.planned[open_batch])
        yield _note(
            f"micro-batch {open_batch}",
            f"is planned and not delivered yet: {spans_text(spans)} in flight",
            "",
            spans,
        )


def recounted(line: BatchLine, facts: Facts) -> int | None:
    """Count the records of a line in the queue's own batches.

    Return None if the line has gaps or some batches are deleted.
    """
    return None if line.gaps else _recount(_of(line), facts)


def _recount(spans: Iterable[Span], facts: Facts) -> int | None:
    total = 0
    for span in spans:
        counts = facts.queue[span.shard].counts if span.shard in facts.queue else {}
        for sequence in range(span.first, span.last + 1):
            if sequence not in counts:
                return None
            total += counts[sequence]
    return total


def _check_reading(facts: Facts) -> Iterator[AuditFinding]:
    """Compare the records that were read with the batches that are still stored."""
    for line in facts.lines:
        found = recounted(line, facts)
        if found is not None and found != line.read:
            what = f"{found - line.read} records never read" if found > line.read else "records read twice"
            yield _problem(
                f"micro-batch {line.batch}",
                f"read {line.read} records, but the queue has {found} in {spans_text(_of(line))}: {what}",
                spans=_of(line),
            )
        if line.gaps:
            gaps = "a gap" if line.gaps == 1 else f"{line.gaps} gaps"
            yield _note(
                f"micro-batch {line.batch}",
                f"found {gaps} in the queue within {spans_text(_of(line))}: the number of lost records is "
                "unknown",
                "the dead-letter table has a row for each, with its sequences and the reason",
                _of(line),
            )


def _reached(facts: Facts, missing: Iterable[_MissingLines]) -> Offset:
    ends = [facts.origin or {shard: held.first for shard, held in facts.queue.items()}]
    ends += [line.end for line in facts.lines]
    ends += [run.end for run in missing if run.end is not None]
    return {shard: max(end.get(shard, 0) for end in ends) for shard in facts.queue}


def _in_flight(facts: Facts, reached: Offset) -> Iterator[ShardTotals]:
    for shard, held in sorted(facts.queue.items()):
        waiting = range(max(reached[shard], held.first), held.following)
        records = sum(held.counts.get(sequence, 0) for sequence in waiting)
        yield ShardTotals(shard=shard, next=reached[shard], batches=len(waiting), records=records)


def _check_queue(facts: Facts, reached: Offset) -> Iterator[AuditFinding]:
    """Check that every undelivered batch exists."""
    for shard, held in sorted(facts.queue.items()):
        name = f"shard {shard}" if len(facts.queue) > 1 else "queue"
        if reached[shard] < held.first:
            span = Span(shard=shard, first=reached[shard], last=held.first - 1)
            yield _problem(
                name,
                f"{spans_text([span])} left the queue and no micro-batch has delivered them",
                "another consumer acknowledged them; look for their batches before they are deleted",
                (span,),
            )
        if reached[shard] > facts.ends.get(shard, reached[shard]):
            yield _problem(
                name,
                f"has handed out numbers only up to {facts.ends[shard] - 1}, but the pipeline has delivered "
                f"up to {reached[shard] - 1}: the manifest was deleted and created again, or this is "
                "another queue",
            )
        for sequence, why in sorted(held.broken.items()):
            if sequence >= reached[shard]:
                span = Span(shard=shard, first=sequence, last=sequence)
                yield _problem(
                    name,
                    f"the batch of {spans_text([span])} {why}, and it is not delivered yet",
                    "restore the object; if it is lost, `on_gap: record` keeps a row for it",
                    (span,),
                )


def _letters_expected(facts: Facts) -> dict[int, int]:
    return {line.batch: line.dead + line.gaps for line in facts.lines}


def _is_cleaned(table: TableFacts, batch: int) -> bool:
    """Return whether this micro-batch may be in a removed part of the table's history."""
    if table.rows is None or table.complete or batch in table.rows:
        return False
    return batch < min(table.rows, default=(table.last if table.last is not None else -1) + 1)


def _check_table(
    subject: str, table: TableFacts, expected: Mapping[int, int], facts: Facts
) -> Iterator[AuditFinding]:
    """Compare a sink with the rows that the ledger lists for it."""
    lines = {line.batch: line for line in facts.lines}
    newest = max((batch for batch, rows in expected.items() if rows), default=-1)
    if newest >= 0 and (table.last is None or table.last < newest):
        yield _problem(
            subject,
            f"its last micro-batch is {'none' if table.last is None else table.last}, but the ledger says "
            f"that {newest} was delivered: {spans_text(_of(lines[newest]))}",
            f"the table was replaced or rolled back; {_STOP}",
            _of(lines[newest]),
        )
    if table.rows is None:
        return
    cleaned = [batch for batch, rows in expected.items() if rows and _is_cleaned(table, batch)]
    for batch, rows in expected.items():
        found = table.rows.get(batch, 0)
        if found != rows and batch not in cleaned:
            lost = "does not have it" if batch not in table.rows else f"has {found}"
            yield _problem(
                subject,
                f"micro-batch {batch} delivered {rows} rows by the ledger, and {table.place} {lost}: "
                f"{spans_text(_of(lines[batch]))}",
                spans=_of(lines[batch]),
            )
    if cleaned:
        spans = spans_between(lines[cleaned[0]].start, lines[cleaned[-1]].end)
        yield _note(
            subject,
            f"{table.place} has cleaned its history: {len(cleaned)} micro-batches up to {cleaned[-1]} could "
            "not be compared, and the ledger's numbers are used",
            "",
            spans,
        )
    added = sum(table.rows.values())
    if table.row_count is not None and table.row_count < added:
        yield _problem(
            subject,
            f"{table.place} holds {table.row_count} rows, {added - table.row_count} fewer than were "
            "added to it",
            "rows were deleted, overwritten or lost after delivery; the table's history shows how, "
            "and --deep names them if the table has _shard, _sequence and _index",
        )


def _check_one_to_one(name: str, facts: Facts) -> Iterator[AuditFinding]:
    several = False
    for line in facts.lines:
        dropped = line.dropped(name) if name in line.rows else 0
        several = several or dropped is None
        if dropped is not None and dropped < 0:
            yield _problem(
                f"sink {name}",
                f"micro-batch {line.batch} gave {-dropped} rows more than it read records: "
                f"{spans_text(_of(line))}",
                spans=_of(line),
            )
    left_out = sum(line.left_out.get(name, 0) for line in facts.lines)
    if left_out:
        yield _note(f"sink {name}", f"{left_out:,} rows were dropped by the settings of the sink")
    if several:
        yield _note(
            f"sink {name}", "its rows do not correspond to records one to one, so only rows are compared"
        )


def _totals(
    name: str,
    table: TableFacts,
    facts: Facts,
    missing: Iterable[_MissingLines],
    shards: Iterable[ShardTotals],
) -> SinkTotals:
    lines = [line for line in facts.lines if name in line.rows]
    in_flight = sum(shard.records for shard in shards)
    produced = in_flight
    delivered = dead = 0
    for line in lines:
        found = recounted(line, facts)
        produced += line.read if found is None else found
        delivered += _delivered_rows(table, line.batch, line.rows[name])
        dead += _delivered_rows(facts.letters, line.batch, line.dead + line.gaps) - line.gaps
    for run in missing:
        count = _recount(run.spans, facts) if run.end is not None else None
        if count is not None and table.rows is not None:
            produced += count
            delivered += sum(table.rows.get(batch, 0) for batch in run.batches)
            letters = facts.letters.rows if facts.letters is not None else None
            dead += sum((letters or {}).get(batch, 0) for batch in run.batches)
    losses = [line.dropped(name) for line in lines]
    return SinkTotals(
        name=name,
        place=table.place,
        produced=produced,
        delivered=delivered,
        dead=dead,
        dropped=None if None in losses else sum(loss for loss in losses if loss is not None),
        skipped=sum(line.skipped for line in lines),
        in_flight=in_flight,
    )


def _delivered_rows(table: TableFacts | None, batch: int, recorded: int) -> int:
    """Return a micro-batch's number of rows from the table, or `recorded` if the table does not record it."""
    if table is None or table.rows is None or _is_cleaned(table, batch):
        return recorded
    return table.rows.get(batch, 0)
