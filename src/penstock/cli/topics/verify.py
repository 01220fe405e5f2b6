"""`penstock topics verify`: every checksum of a data directory."""

from __future__ import annotations

import dataclasses
import os

import click

from penstock.cli.display import Progress, print_json
from penstock.cli.failure import ExitCode
from penstock.cli.topics.place import cold_option, open_cold
from penstock.storage import OsFileSystem
from penstock.topics import Finding, Severity, VerifyReport, counted, is_in_use
from penstock.topics import verify as verify_directory
from penstock.units import format_size

__all__ = ["verify"]


@click.command()
@click.argument("data_dir", type=click.Path(file_okay=False))
@cold_option
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def verify(data_dir: str, cold: str | None, as_json: bool) -> int:
    """Check snapshots, segments and log of DATA_DIR against their checksums, and name file and bytes.

    A backup can be checked as well. Changes nothing and may run beside the server. Records in the cold tier
    are checked if --cold names it. Exits with 5 if anything is damaged.
    """
    fs = OsFileSystem()
    directory = os.path.abspath(data_dir)
    with Progress() as progress, open_cold(cold, fs) as tier:
        report = verify_directory(fs, directory, cold=tier, on_progress=progress.show)
    if as_json:
        print_json(_object(report, running=is_in_use(fs, directory)))
    else:
        _print(report)
    return ExitCode.CORRUPT if report.problems else ExitCode.OK


def _print(report: VerifyReport) -> None:
    for finding in sorted(report.findings, key=lambda finding: finding.severity is Severity.NOTE):
        wrong = finding.severity is Severity.PROBLEM
        label = click.style(f"{finding.severity.value:<8}", fg="red" if wrong else "yellow")
        click.echo(f"{label} {finding}")
        if finding.topic is not None:
            click.echo(f"{'':8}   -> {_lost(finding)}")
    count = len(report.problems)
    verdict = f"{counted(count, 'problem')} found" if count else "clean"
    parts = [
        counted(report.topics, "topic"),
        f"{counted(report.stored_records, 'record')} in segments",
        f"{counted(report.log_frames, 'frame')} in the log",
        f"{format_size(report.bytes)} in {report.directory}",
    ]
    click.echo(f"{verdict}: {', '.join(parts)}")


def _lost(finding: Finding) -> str:
    if finding.first_seq == finding.last_seq:
        return f"record {finding.first_seq} of {finding.topic}"
    return f"records {finding.first_seq} to {finding.last_seq} of {finding.topic}"


def _object(report: VerifyReport, *, running: bool) -> dict[str, object]:
    return {
        "directory": report.directory,
        "clean": not report.problems,
        "server_running": running,
        "files": report.files,
        "bytes": report.bytes,
        "topics": report.topics,
        "stored_records": report.stored_records,
        "log_frames": report.log_frames,
        "findings": [dataclasses.asdict(finding) for finding in report.findings],
    }
