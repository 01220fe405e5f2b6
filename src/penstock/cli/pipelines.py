"""Commands that maintain a pipeline and its tables: `penstock audit`, `redrive` and `compact`."""

from __future__ import annotations

import dataclasses
import datetime
from typing import TYPE_CHECKING

import click

from penstock.cli.base import Output, command
from penstock.cli.failure import ExitCode
from penstock.cli.output import Progress, print_finding, print_table
from penstock.cli.pipeline_file import (
    PipelineFile,
    SparkOptions,
    pipeline_argument,
    session_options,
)
from penstock.clock import SYSTEM_CLOCK
from penstock.config import unknown_key
from penstock.errors import ConfigError, NotFound
from penstock.units import format_size, parse_duration, parse_size

if TYPE_CHECKING:
    from penstock.spark import (
        AuditReport,
        Balance,
        CompactionReport,
        PipelineSpec,
        Redrive,
        Redriven,
        SinkTotals,
        TableSpec,
    )


_HEADERS = (
    "sink",
    "produced",
    "delivered",
    "dead-lettered",
    "dropped",
    "skipped",
    "in flight",
    "difference",
)

LIMIT = 100_000
"""The letters of one redrive are all in memory, and one object lists them."""
REASONS_SHOWN = 20


@command()
@pipeline_argument
@click.option("--sink", metavar="NAME", help="Only this sink.")
@click.option(
    "--deep", is_flag=True, help="Compare record by record where a table has _shard, _sequence and _index."
)
def audit(pipeline: PipelineFile, sink: str | None, deep: bool, out: Output) -> int:
    """Account for every record of the pipeline in PIPELINE.yaml: queue, checkpoint, ledger and tables.

    Changes nothing, needs neither Java nor Spark, and may run next to the pipeline. Exits with 0 if every
    record is accounted for, otherwise with 1 and a list of the sequences that are not.
    """
    from penstock.spark import audit_pipeline

    spec = pipeline.read()
    with Progress() as progress:
        report = audit_pipeline(spec, sink=sink, deep=deep, tell=progress.show)
    out.show(audit_document(report), lambda: print_audit(report))
    return ExitCode.OK if report.balanced else ExitCode.PROBLEM


def audit_document(report: AuditReport) -> dict[str, object]:
    """Return an audit's report as a JSON object."""
    found = report.balance
    return {
        "pipeline": report.pipeline,
        "query": report.query,
        "balanced": report.balanced,
        "deep": report.deep,
        "batches": found.batches,
        "sinks": [
            {**dataclasses.asdict(sink), "reasons": _reasons(sink), "difference": sink.difference}
            for sink in found.sinks
        ],
        "shards": [dataclasses.asdict(shard) for shard in found.shards],
        "gaps": found.gaps,
        "recounted": found.recounted,
        "taken_from_ledger": found.taken,
        "findings": [
            {**dataclasses.asdict(finding), "severity": finding.severity.value} for finding in found.findings
        ],
    }


def _reasons(sink: SinkTotals) -> dict[str, int]:
    """Return the reasons why records have no row, each with a count."""
    reasons = {
        f"left out by the transform of {sink.name}": sink.dropped or 0,
        "bad record, on_error: skip": sink.skipped,
    }
    return {reason: count for reason, count in reasons.items() if count}


def print_audit(report: AuditReport) -> None:
    """Print an audit's report for people."""
    from penstock.findings import Severity

    found = report.balance
    click.echo(click.style(f"{report.pipeline}, query {report.query or '-'}", bold=True))
    if report.query is None:
        click.echo("It has never run: all produced records are in flight.")
    print_table(_HEADERS, [_row(sink) for sink in found.sinks], right=range(1, len(_HEADERS)))
    for sink in found.sinks:
        for reason, count in _reasons(sink).items():
            click.echo(f"  {sink.name}: {count:,} {reason}")
    _print_rest(found)
    for finding in sorted(found.findings, key=lambda finding: finding.severity is Severity.NOTE):
        print_finding(finding.severity.value, f"{finding.subject}: {finding.text}", finding.advice)
    verdict = (
        click.style("balanced", fg="green") if report.balanced else click.style("NOT balanced", fg="red")
    )
    depth = "record by record" if report.deep else "by counts (--deep compares record by record)"
    click.echo(f"{verdict}: {found.batches:,} micro-batches, {depth}")


def _row(sink: SinkTotals) -> tuple[str, ...]:
    numbers = (
        sink.produced,
        sink.delivered,
        sink.dead,
        sink.dropped,
        sink.skipped,
        sink.in_flight,
        sink.difference,
    )
    return (sink.name, *("-" if number is None else f"{number:,}" for number in numbers))


def _print_rest(found: Balance) -> None:
    click.echo(
        f"  {found.recounted:,} delivered records counted again in the queue's batches, {found.taken:,} "
        "taken from the ledger"
    )
    for shard in found.shards:
        if shard.batches:
            name = f"shard {shard.shard}" if len(found.shards) > 1 else "in flight"
            click.echo(f"  {name}: {shard.batches:,} batches, {shard.records:,} records from {shard.next} on")


@command()
@pipeline_argument
@click.option("--reason", metavar="TEXT", help="Only letters whose reason contains TEXT.")
@click.option(
    "--sequence", "sequences", metavar="A-B", help="Only letters of these sequences; A- and -B work too."
)
@click.option(
    "--position",
    "positions",
    multiple=True,
    metavar="SHARD:SEQUENCE:INDEX",
    help="Only the letter of this record; may be repeated.",
)
@click.option(
    "--since", metavar="TIME", help="Only letters written since then: 2h (ago), or 2026-05-01T12:00Z."
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=LIMIT,
    show_default=True,
    help="Maximum letters to redrive.",
)
@click.option("--dry-run", is_flag=True, help="Only show what would be redriven.")
def redrive(
    pipeline: PipelineFile,
    reason: str | None,
    sequences: str | None,
    positions: tuple[str, ...],
    since: str | None,
    limit: int,
    dry_run: bool,
    out: Output,
) -> None:
    """Put the dead letters of PIPELINE.yaml back into its queue after you have corrected the cause.

    Each letter is redriven once, even if this command is killed: the next one finishes its work. The letters
    stay in their table. A record that fails again becomes a new letter. Needs no Spark.
    """
    from penstock.spark import Wanted
    from penstock.spark import redrive as put_back

    spec = pipeline.read()
    wanted = Wanted(
        reason=reason,
        sequences=None if sequences is None else parse_sequences(sequences),
        since_ms=None if since is None else parse_since(since, SYSTEM_CLOCK.now_ms()),
        limit=limit,
        positions=frozenset(map(parse_position, positions)) if positions else None,
    )
    with Progress() as progress:
        progress.show("reading the dead letters")
        result = put_back(spec, wanted, dry_run=dry_run)
    out.show(_redrive_object(result, dry_run), lambda: _print_redrive(result, dry_run))


def parse_sequences(text: str) -> tuple[int, int]:
    """Parse `7`, `3-9`, `3-` or `-9` as first and last. Raise `ConfigError` if invalid."""
    first, dash, last = text.strip().partition("-")
    try:
        low = int(first) if first else 0
        high = low if not dash else int(last) if last else 2**63 - 1
    except ValueError:
        low, high = 1, 0
    if high < low or text.strip() in ("", "-"):
        raise ConfigError(f"--sequence: expected A-B, such as 100-250, found {text!r}")
    return low, high


def parse_position(text: str) -> tuple[int, int, int]:
    """Parse `0:17:3` as shard, sequence and index. Raise `ConfigError` if invalid."""
    try:
        shard, sequence, index = (int(part) for part in text.split(":"))
    except ValueError:
        shard = sequence = index = -1
    if not (0 <= shard < 2**31 and 0 <= sequence < 2**63 and 0 <= index < 2**31):
        raise ConfigError(f"--position: expected SHARD:SEQUENCE:INDEX, such as 0:17:3, found {text!r}")
    return shard, sequence, index


def parse_since(text: str, now_ms: int) -> int:
    """Convert a time or an age to milliseconds; without a zone, it is UTC. Raise `ConfigError` if invalid."""
    try:
        moment = datetime.datetime.fromisoformat(text.strip())
    except ValueError:
        try:
            return now_ms - round(parse_duration(text) * 1000)
        except ConfigError:
            raise ConfigError(
                f"--since: expected a time (2026-05-01T12:00Z) or how long ago (2h), found {text!r}"
            ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return round(moment.timestamp() * 1000)


def _redrive_object(result: Redrive, dry_run: bool) -> dict[str, object]:
    return {
        "dry_run": dry_run,
        "redriven": _redriven_object(result.done) if result.done else None,
        "finished": [_redriven_object(earlier) for earlier in result.finished],
        "found": result.found,
        "left": result.left,
        "reasons": result.reasons,
        "unfinished": list(result.unfinished),
    }


def _redriven_object(done: Redriven) -> dict[str, object]:
    return {
        "number": done.number,
        "records": done.records,
        "reasons": done.reasons,
        "first_sequence": done.first,
        "shard": done.shard,
        "resumed": done.resumed,
    }


def _print_redrive(result: Redrive, dry_run: bool) -> None:
    for earlier in result.finished:
        click.echo(f"finished redrive {earlier.number}, which was interrupted: {_letters(earlier.records)}")
    for number in result.unfinished:
        click.echo(f"redrive {number} was interrupted; the next redrive finishes it first")
    if not result.found:
        click.echo("nothing to redrive")
        return
    if dry_run:
        click.echo(f"would redrive {_letters(result.found)}")
    elif result.done is not None:
        click.echo(f"redrive {result.done.number}: {_letters(result.done.records)}, {_where(result.done)}")
    shown = list(result.reasons.items())[:REASONS_SHOWN]
    print_table(("reason", "letters"), [(reason, f"{count:,}") for reason, count in shown], right=(1,))
    if len(result.reasons) > REASONS_SHOWN:
        click.echo(f"and {len(result.reasons) - REASONS_SHOWN:,} other reasons; --json lists all")
    if result.left:
        click.echo(f"{_letters(result.left)} left by --limit; run it again for more")


def _where(done: Redriven) -> str:
    if done.first is None:
        return "already in the queue"
    shard = "" if done.shard is None else f" of shard {done.shard}"
    return f"in the queue from sequence {done.first}{shard}"


def _letters(count: int) -> str:
    return "1 letter" if count == 1 else f"{count:,} letters"


@command()
@pipeline_argument
@session_options
@click.option(
    "--sink", "only", metavar="NAME", help="Only this sink [default: every table and the dead letters]."
)
@click.option("--target", default="128MiB", show_default=True, metavar="SIZE", help="Size of the new files.")
@click.option(
    "--min-files",
    type=click.IntRange(min=2),
    default=5,
    show_default=True,
    help="Skip partitions with fewer small files.",
)
def compact(
    pipeline: PipelineFile,
    spark: SparkOptions,
    only: str | None,
    target: str,
    min_files: int,
    out: Output,
) -> None:
    """Rewrite the small files of PIPELINE.yaml's Delta and Iceberg tables as larger ones.

    The rows do not change, and the pipeline may run meanwhile. The change is atomic for readers.
    """
    spark.check()
    target_bytes = parse_size(target)
    spec = pipeline.read()
    tables = tables_to_compact(spec, only)
    from penstock.cli.run.session import CommandSession
    from penstock.spark import CompactionReport
    from penstock.spark import compact as compact_table

    sessions = CommandSession(
        f"{spec.name} compact",
        master=spark.master,
        remote=spark.remote,
        conf=spark.settings_over(spec),
    )
    reports: dict[str, CompactionReport] = {}
    try:
        with Progress() as progress:
            progress.show("starting Spark")
            session = sessions.open()
            for name, table in tables.items():
                progress.show(f"{name}: looking for small files")

                def tell(text: str, name: str = name) -> None:
                    progress.show(f"{name}: {text}")

                try:
                    reports[name] = compact_table(
                        session, table, target_bytes=target_bytes, min_files=min_files, on_progress=tell
                    )
                except NotFound:
                    if only is not None:
                        raise
                    reports[name] = CompactionReport(skipped=("does not exist yet",))
    finally:
        sessions.close()
    out.show(
        {"tables": {name: dataclasses.asdict(report) for name, report in reports.items()}},
        lambda: _print_compaction(reports),
    )


def tables_to_compact(spec: PipelineSpec, only: str | None) -> dict[str, TableSpec]:
    """Return the tables to compact, by the names of their sinks. Raise `ConfigError` for an invalid sink."""
    from penstock.spark import DEAD_LETTERS, table_of

    sinks = dict(spec.outputs)
    if spec.letters is not None:
        sinks[DEAD_LETTERS] = spec.letters
    tables = {name: table for name, sink in sinks.items() if (table := table_of(sink)) is not None}
    if only is None:
        managed = {name: table for name, table in tables.items() if table.kind != "parquet"}
        if not managed:
            raise ConfigError(f"{spec.name} has no Delta or Iceberg table; only those can be compacted")
        return managed
    if only not in sinks:
        raise unknown_key(f"--sink {only}", only, tables)
    if only not in tables:
        raise ConfigError(f"--sink {only}: a queue has no files to compact")
    return {only: tables[only]}


def _print_compaction(reports: dict[str, CompactionReport]) -> None:
    rows = [
        (
            name,
            f"{report.files_before:,}",
            f"{report.files_after:,}",
            format_size(report.bytes_before),
            format_size(report.bytes_after),
        )
        for name, report in reports.items()
    ]
    for name, report in reports.items():
        for reason in report.skipped:
            click.echo(f"{name}: {reason}")
    print_table(("table", "files before", "after", "bytes before", "after"), rows, right=(1, 2, 3, 4))
