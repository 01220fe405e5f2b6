"""`penstock audit`: does a pipeline balance? Produced = delivered + dead-lettered + dropped + in flight."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.buffer import Severity
from penstock.cli.display import Progress, print_json, print_table
from penstock.cli.failure import ExitCode
from penstock.cli.pipeline_file import pipeline_argument, read_pipeline

if TYPE_CHECKING:
    from penstock.spark import AuditReport, Balance, Finding, SinkTotals

__all__ = ["audit"]

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


@click.command()
@pipeline_argument
@click.option("--sink", metavar="NAME", help="Only this sink.")
@click.option(
    "--deep", is_flag=True, help="Compare record by record where a table has _shard, _sequence and _index."
)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def audit(file: Path, changes: tuple[str, ...], sink: str | None, deep: bool, as_json: bool) -> int:
    """Close the books of the pipeline in PIPELINE.yaml, from its queue, checkpoint, ledger and tables.

    Changes nothing, needs neither Java nor Spark, and may run beside the pipeline. Exits with 0 if every
    record is accounted for, else with 1 and the sequences that are not.
    """
    from penstock.spark import audit_pipeline

    spec = read_pipeline(file, changes)
    with Progress() as progress:
        report = audit_pipeline(spec, sink=sink, deep=deep, tell=progress.show)
    if as_json:
        print_json(_object(report))
    else:
        _print(report)
    return ExitCode.OK if report.balanced else ExitCode.PROBLEM


def _object(report: AuditReport) -> dict[str, object]:
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
    """Why records have no row, each with its count."""
    reasons = {
        f"left out by the transform of {sink.name}": sink.dropped or 0,
        "bad record, on_error: skip": sink.skipped,
    }
    return {reason: count for reason, count in reasons.items() if count}


def _print(report: AuditReport) -> None:
    found = report.balance
    click.echo(click.style(f"{report.pipeline}, query {report.query or '-'}", bold=True))
    if report.query is None:
        click.echo("It never ran: all that is produced is in flight.")
    print_table(_HEADERS, [_row(sink) for sink in found.sinks], right=range(1, len(_HEADERS)))
    for sink in found.sinks:
        for reason, count in _reasons(sink).items():
            click.echo(f"  {sink.name}: {count:,} {reason}")
    _print_rest(found)
    for finding in sorted(found.findings, key=lambda finding: finding.severity is Severity.NOTE):
        _print_finding(finding)
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


def _print_finding(finding: Finding) -> None:
    wrong = finding.severity is Severity.PROBLEM
    label = click.style(f"{finding.severity.value:<8}", fg="red" if wrong else "yellow")
    click.echo(f"{label} {finding.subject}: {finding.text}")
    if finding.advice:
        click.echo(f"{'':8}   -> {finding.advice}")
