"""`penstock buffer fsck` and `gc`: check a queue, and delete the objects that it no longer needs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import click

from penstock.buffer import (
    NO_FLOOR,
    Consumer,
    ConsumerConfig,
    Floor,
    GarbageCollector,
    GcReport,
    audit,
    batch_minted_ms,
    read_floor,
)
from penstock.cli.base import Output, command
from penstock.cli.buffer.target import (
    Queue,
    QueueOptions,
    Target,
    queue_command,
    queue_options,
    queues_of,
)
from penstock.cli.failure import ExitCode
from penstock.cli.output import Progress, print_finding, time_text
from penstock.findings import Finding, Severity

LISTED_MAX = 10


@queue_command()
@click.option("--deep", is_flag=True, help="Also fetch and decode every batch in the queue.")
async def fsck(target: Target, out: Output, deep: bool) -> int:
    """Check the queue at STORE: manifest, numbering, objects, side objects, duplicates.

    Changes nothing and may run next to producers and a consumer. Exits with 1 if there is a problem.
    """
    with Progress() as progress:
        url, checked, findings = await _audit(target, deep, progress)
    problems = sum(finding.severity is Severity.PROBLEM for finding in findings)
    depth = "every batch decoded" if deep else "batches not decoded (use --deep)"
    verdict = f"{problems} problem{'s' * (problems != 1)} found" if problems else "clean"
    out.show(
        {"store": url, "clean": not problems, "findings": [_finding_object(f) for f in findings]},
        lambda: _print_findings(findings, f"{verdict}: {checked} in {url}; {depth}"),
    )
    return ExitCode.PROBLEM if problems else ExitCode.OK


async def _audit(target: Target, deep: bool, progress: Progress) -> tuple[str, str, list[Finding]]:
    findings: list[Finding] = []
    async with target.open(ConsumerConfig) as config:
        queues = await queues_of(config)
        for number, queue in enumerate(queues, start=1):
            place = f"{queue.reader.file.path} ({number} of {len(queues)})"

            def show(done: int, total: int, place: str = place) -> None:
                progress.show(f"checking {place}: {done:,} of {total:,} batches")

            findings += await audit(queue.reader, queue.prefix, deep=deep, on_progress=show)
        checked = queues[0].reader.file.path if len(queues) == 1 else f"{len(queues)} queues"
        return queues[0].store.url, checked, findings


def _print_findings(findings: list[Finding], verdict: str) -> None:
    for finding in sorted(findings, key=lambda finding: finding.severity is Severity.NOTE):
        print_finding(finding.severity.value, f"{finding.subject}: {finding.text}", finding.advice)
    click.echo(verdict)


def _finding_object(finding: Finding) -> dict[str, str]:
    return {
        "severity": finding.severity.value,
        "subject": finding.subject,
        "text": finding.text,
        "advice": finding.advice,
    }


@command()
@click.option("--dry-run", is_flag=True, help="Only show what would be deleted.")
@click.option("--fence", is_flag=True, help="Take over the queue for one cycle: fences a running consumer.")
@click.option("--grace", metavar="DURATION", help="Keep younger objects, such as 10m [default: 10m].")
@click.option("--yes", "--force", "-y", "yes", is_flag=True, help="Do not ask before --fence.")
@queue_options
def gc(queue: QueueOptions, out: Output, dry_run: bool, fence: bool, grace: str | None, yes: bool) -> int:
    """Delete the objects that the queue at STORE no longer needs.

    Without --fence, only objects that a consumer has sealed are deleted, which is always safe. With --fence,
    every eligible object is deleted, but a running consumer is fenced and stops.
    """
    target = queue.target()
    target.build(ConsumerConfig, gc_grace_period=grace)
    # Not a coroutine: on an event loop, Ctrl-C would not end the prompt.
    if fence and not dry_run and not yes:
        question = "A running consumer of this queue will be fenced and must be restarted. Continue?"
        if not click.confirm(question, err=True):
            click.echo("nothing was changed", err=True)
            return ExitCode.PROBLEM
    cycles = asyncio.run(_collect(target, grace, fence=fence, dry_run=dry_run))
    out.show(
        {"dry_run": dry_run, "fenced": fence and not dry_run, "queues": [c.to_json() for c in cycles]},
        lambda: _print_cycles(cycles, dry_run, fence),
    )
    return ExitCode.PROBLEM if any(cycle.report.failed for cycle in cycles) else ExitCode.OK


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cycle:
    manifest: str
    report: GcReport
    floor: Floor

    def to_json(self) -> dict[str, object]:
        return {
            "manifest": self.manifest,
            "sealed_ms": None if self.floor.sealed_ms < 0 else self.floor.sealed_ms,
            "listed": self.report.listed,
            "candidates": self.report.candidates,
            "deleted": self.report.deleted,
            "failed": self.report.failed,
            "withheld": self.report.withheld,
        }


async def _collect(target: Target, grace: str | None, *, fence: bool, dry_run: bool) -> list[_Cycle]:
    async with target.open(ConsumerConfig, gc_grace_period=grace, gc_enabled=False) as config:
        return [await _cycle(queue, fence=fence, dry_run=dry_run) for queue in await queues_of(config)]


async def _cycle(queue: Queue, *, fence: bool, dry_run: bool) -> _Cycle:
    raw, _ = await queue.reader.file.read_side(queue.reader.file.floor_path)
    floor = NO_FLOOR if raw is None else read_floor(raw)
    if fence and not dry_run:
        consumer = await Consumer.open(queue.config)
        try:
            report = await consumer.gc.collect()
        finally:
            await consumer.release()
    else:
        collector = GarbageCollector(queue.config, store=queue.store)
        report = await collector.collect(dry_run=dry_run)
    if dry_run and not fence:
        above = [key for key in report.candidates if (batch_minted_ms(key) or 0) > floor.sealed_ms]
        report = replace(report, withheld=tuple(above))
    return _Cycle(manifest=queue.reader.file.path, report=report, floor=floor)


def _print_cycles(cycles: list[_Cycle], dry_run: bool, fence: bool) -> None:
    for cycle in cycles:
        _print_cycle(cycle, dry_run, fence)


def _print_cycle(cycle: _Cycle, dry_run: bool, fence: bool) -> None:
    report = cycle.report
    withheld = set(report.withheld)
    deleted = [key for key in report.candidates if key not in withheld] if dry_run else list(report.deleted)
    verb = "would delete" if dry_run else "deleted"
    click.echo(f"{cycle.manifest}: {report.listed:,} objects seen, {len(report.candidates):,} are garbage")
    _print_keys(verb, deleted)
    _print_keys("could not delete", report.failed)
    if report.failed:
        click.echo("    -> check the permissions of the store; it is safe to run this again")
    _print_keys("withheld", report.withheld)
    if report.withheld:
        sealed = (
            "nothing is sealed yet"
            if cycle.floor.sealed_ms < 0
            else f"sealed: {time_text(cycle.floor.sealed_ms)}"
        )
        click.echo(
            f"    -> no consumer has sealed a floor above them ({sealed}), so a slow producer might still\n"
            "       append them. A running consumer seals at its next collection; --fence does it now."
        )
    if fence and not dry_run:
        click.echo("  any running consumer has been fenced: restart it")


def _print_keys(verb: str, keys: tuple[str, ...] | list[str]) -> None:
    if not keys and verb not in ("deleted", "would delete"):
        return
    click.echo(f"  {verb} {len(keys):,}")
    for key in keys[:LISTED_MAX]:
        click.echo(f"    {key}")
    if len(keys) > LISTED_MAX:
        click.echo(f"    ... and {len(keys) - LISTED_MAX:,} more")
