"""`penstock run --check`: the findings about a pipeline, a line each, with what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from penstock.cli.display import print_json
from penstock.cli.failure import ExitCode
from penstock.cli.health import Check, Status

if TYPE_CHECKING:
    from penstock.cli.run_session import CommandSession
    from penstock.spark import CheckFinding, PipelineSpec

__all__ = ["report_checks"]

_COLOURS = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "red"}
_WIDTH = 16


def report_checks(spec: PipelineSpec, sessions: CommandSession, *, as_json: bool) -> int:
    """Print every finding as it is made. 1 if any is in the way."""
    from penstock.spark import check_pipeline

    checks: list[Check] = []
    try:
        for finding in check_pipeline(spec, sessions.open, own_java=sessions.starts_java):
            checks.append(_check(finding))
            if not as_json:
                _print(checks[-1])
                if checks[-1].name == "java":
                    click.echo("starting Spark", err=True)
    finally:
        sessions.close()
    failed = sum(check.status is Status.FAIL for check in checks)
    if as_json:
        print_json({"ok": not failed, "checks": [check.to_json() for check in checks]})
    elif not failed:
        click.echo(click.style(f"{spec.name} is ready to run", fg="green"))
    return ExitCode.PROBLEM if failed else ExitCode.OK


def _check(finding: CheckFinding) -> Check:
    return Check(status=Status(finding.status), name=finding.name, text=finding.text, advice=finding.advice)


def _print(check: Check) -> None:
    label = click.style(f"{check.status.value:<4}", fg=_COLOURS[check.status])
    click.echo(f"{label}  {check.name:<{_WIDTH}}  {check.text}")
    if check.advice:
        click.echo(f"{'':4}  {'':<{_WIDTH}}  -> {check.advice}")
