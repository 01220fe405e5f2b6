"""`penstock buffer fsck`: a queue against its rules, each finding with what to do about it."""

from __future__ import annotations

import click

from penstock.buffer import ConsumerConfig, Finding, Severity, audit
from penstock.cli.buffer.target import Target, queue_options, queues_of, run
from penstock.cli.display import Progress, print_json
from penstock.cli.failure import ExitCode

__all__ = ["fsck"]


@click.command()
@queue_options
@click.option("--deep", is_flag=True, help="Fetch and decode every batch in the queue as well.")
def fsck(
    store: str | None,
    manifest: str | None,
    prefix: str | None,
    config: str | None,
    store_options: tuple[str, ...],
    as_json: bool,
    deep: bool,
) -> int:
    """Check the queue at STORE: manifest, numbering, objects, side objects, duplicates.

    Changes nothing and may run beside producers and a consumer. Exits with 1 if there is a problem.
    """
    target = Target.of(store, config=config, manifest=manifest, prefix=prefix, store_options=store_options)
    with Progress() as progress:
        url, checked, findings = run(_audit(target, deep, progress))
    problems = sum(finding.severity is Severity.PROBLEM for finding in findings)
    if as_json:
        print_json({"store": url, "clean": not problems, "findings": [_object(f) for f in findings]})
    else:
        _print(findings)
        depth = "every batch decoded" if deep else "batches not decoded (--deep does)"
        verdict = f"{problems} problem{'s' * (problems != 1)} found" if problems else "clean"
        click.echo(f"{verdict}: {checked} in {url}; {depth}")
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


def _print(findings: list[Finding]) -> None:
    for finding in sorted(findings, key=lambda finding: finding.severity is Severity.NOTE):
        wrong = finding.severity is Severity.PROBLEM
        label = click.style(f"{finding.severity.value:<8}", fg="red" if wrong else "yellow")
        click.echo(f"{label} {finding.subject}: {finding.text}")
        if finding.advice:
            click.echo(f"{'':8}   -> {finding.advice}")


def _object(finding: Finding) -> dict[str, str]:
    return {
        "severity": finding.severity.value,
        "subject": finding.subject,
        "text": finding.text,
        "advice": finding.advice,
    }
