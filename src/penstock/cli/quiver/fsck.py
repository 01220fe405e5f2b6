"""`penstock quiver fsck`: a data directory against its rules, and putting it in order."""

from __future__ import annotations

import dataclasses

import click

from penstock.cli.display import Progress, print_json
from penstock.cli.failure import ExitCode
from penstock.cli.quiver.cores import chosen_cores
from penstock.quiver import CheckedCore, Severity, check, is_in_use, repair
from penstock.storage import OsFileSystem
from penstock.units import format_size

__all__ = ["fsck"]


@click.command()
@click.argument("path")
@click.option("--core", type=int, help="This core alone.")
@click.option("--repair", "mend", is_flag=True, help="Set damaged files aside and go on without them.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def fsck(path: str, core: int | None, mend: bool, as_json: bool) -> int:
    """Check log, segments and acknowledgements of the data directory PATH against their checksums.

    Without --repair nothing is changed, and it may run beside the writer. With it the writer must not run:
    damaged files go to quarantine/ before anything is changed. Exits with 5 if a problem is left.
    """
    fs = OsFileSystem()
    cores = chosen_cores(path, core)
    done: list[str] = []
    with Progress() as progress:
        if mend:
            for number, directory in cores:
                done += [f"core {number}: {text}" for text in repair(fs, directory)]
        checked = [check(fs, number, directory, progress.show) for number, directory in cores]
    problems = sum(len(each.problems) for each in checked)
    if as_json:
        running = [number for number, directory in cores if is_in_use(fs, directory)]
        print_json(_object(path, checked, done, running))
    else:
        _print(path, checked, done)
    return ExitCode.CORRUPT if problems else ExitCode.OK


def _print(path: str, checked: list[CheckedCore], done: list[str]) -> None:
    for text in done:
        click.echo(f"{click.style('repaired', fg='green')} {text}")
    findings = [finding for each in checked for finding in each.findings]
    for finding in sorted(findings, key=lambda finding: finding.severity is Severity.NOTE):
        wrong = finding.severity is Severity.PROBLEM
        label = click.style(f"{finding.severity.value:<8}", fg="red" if wrong else "yellow")
        click.echo(f"{label} core {finding.core}: {finding.subject}: {finding.text}")
        if finding.advice:
            click.echo(f"{'':8}   -> {finding.advice}")
    count = sum(len(each.problems) for each in checked)
    verdict = f"{count} problem{'s' * (count != 1)} found" if count else "clean"
    totals = [
        f"{sum(each.segments for each in checked)} segments",
        f"{sum(each.items for each in checked)} items",
        f"{format_size(sum(each.byte_count for each in checked))}",
        f"{sum(each.log_entries for each in checked)} entries in the log",
        f"{sum(each.subscribers for each in checked)} subscribers",
    ]
    click.echo(f"{verdict}: {', '.join(totals)} in {path}")


def _object(path: str, checked: list[CheckedCore], done: list[str], running: list[int]) -> dict[str, object]:
    return {
        "directory": path,
        "clean": not any(each.problems for each in checked),
        "repaired": done,
        "running_cores": running,
        "cores": [dataclasses.asdict(each) for each in checked],
    }
