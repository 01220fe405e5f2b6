"""`penstock run`: run a pipeline in the foreground until it is stopped, or only check it."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING

import click

from penstock.cli.base import Output, command
from penstock.cli.failure import ExitCode
from penstock.cli.output import Check, Status, print_check, print_json
from penstock.cli.pipeline_file import PipelineFile, SparkOptions, pipeline_argument, session_options
from penstock.cli.signals import LeaveNow, StopSignals
from penstock.errors import PenstockError
from penstock.spark import check_spark
from penstock.units import parse_duration

if TYPE_CHECKING:
    from penstock.cli.run.session import CommandSession
    from penstock.spark import CheckResult, PipelineSpec

_WIDTH = 16


@command(json_help="Print events as JSON on standard output, one per line.")
@click.option("--once", is_flag=True, help="Deliver the records that exist now, then end.")
@click.option("--check", is_flag=True, help="Only check the pipeline; run and create nothing.")
@click.option(
    "--restarts",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    help="How often in a row to restart after a transient failure.",
)
@click.option(
    "--stop-timeout",
    default="60s",
    show_default=True,
    metavar="DURATION",
    help="How long a stop waits for the running micro-batch.",
)
@click.option("--verbose", is_flag=True, help="Show Spark's log and the cause of errors.")
@pipeline_argument
@session_options
def run(
    pipeline: PipelineFile,
    spark: SparkOptions,
    once: bool,
    check: bool,
    restarts: int,
    stop_timeout: str,
    verbose: bool,
    out: Output,
) -> int:
    """Run the pipeline in PIPELINE.yaml: it moves records from its queue into its tables, each record once.

    Ctrl-C or SIGTERM lets the running micro-batch finish; a second one stops immediately. After that, or
    after SIGKILL, the next start repeats the unfinished micro-batch, and its records still arrive once. The
    file is checked before Spark starts.
    """
    spark.check()
    stop_timeout_s = parse_duration(stop_timeout)
    spec = pipeline.read()
    check_spark()
    from penstock.cli.run.session import CommandSession, end_children
    from penstock.spark import check_options

    check_options(spec)

    _set_up_logging(verbose)
    sessions = CommandSession(
        spec.name,
        master=spark.master,
        remote=spark.remote,
        conf=spark.settings_over(spec),
        verbose=verbose,
    )
    if check:
        return report_checks(spec, sessions, out)

    from penstock.cli.run.display import choose_display
    from penstock.cli.run.supervisor import Supervisor, cause_of
    from penstock.spark import Pipeline

    signals = StopSignals()
    try:
        with signals, choose_display(out.is_json) as display:
            supervisor = Supervisor(
                Pipeline(spec),
                sessions,
                display,
                signals,
                once=once,
                restarts=restarts,
                stop_timeout_s=stop_timeout_s,
            )
            return supervisor.run()
    except LeaveNow as leaving:
        click.echo(str(leaving), err=True)
        sys.stdout.flush()
        end_children()
        # Do not wait for Spark to end.
        os._exit(signals.exit_code)
    except PenstockError as error:
        if verbose:
            click.echo(cause_of(error), err=True)
        raise
    finally:
        sessions.close()


def _set_up_logging(verbose: bool) -> None:
    """Show only warnings of `penstock`, not those of the bridge to Java; with `verbose`, show everything."""
    if verbose:
        logging.basicConfig(level=logging.INFO, stream=sys.stderr)
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.addFilter(logging.Filter("penstock"))
    logging.basicConfig(handlers=[handler])


def report_checks(spec: PipelineSpec, sessions: CommandSession, out: Output) -> int:
    """Print every finding immediately. Return 1 if a check fails."""
    from penstock.spark import check_pipeline

    checks: list[Check] = []
    try:
        for finding in check_pipeline(spec, sessions.open, own_java=sessions.starts_java):
            checks.append(_check(finding))
            if not out.is_json:
                print_check(checks[-1], _WIDTH)
                if checks[-1].name == "java":
                    click.echo("starting Spark", err=True)
    finally:
        sessions.close()
    failed = sum(check.status is Status.FAIL for check in checks)
    if out.is_json:
        print_json({"ok": not failed, "checks": [check.to_json() for check in checks]})
    elif not failed:
        click.echo(click.style(f"{spec.name} is ready to run", fg="green"))
    return ExitCode.PROBLEM if failed else ExitCode.OK


def _check(finding: CheckResult) -> Check:
    return Check(status=Status(finding.status), name=finding.name, text=finding.text, advice=finding.advice)
