"""`penstock run`: a pipeline in the foreground, until it is asked to stop; `--check` only checks it."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING

import click

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


@click.command()
@pipeline_argument
@session_options
@click.option("--once", is_flag=True, help="Deliver what is there now, then end.")
@click.option("--check", is_flag=True, help="Check everything, run and create nothing.")
@click.option(
    "--restarts",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    help="How often in a row to start again after a fault that may pass.",
)
@click.option(
    "--stop-timeout",
    default="60s",
    show_default=True,
    metavar="DURATION",
    help="How long a stop waits for the micro-batch that is running.",
)
@click.option("--verbose", is_flag=True, help="Show Spark's log and where errors come from.")
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object per line and event, on standard output."
)
def run(
    pipeline: PipelineFile,
    spark: SparkOptions,
    once: bool,
    check: bool,
    restarts: int,
    stop_timeout: str,
    verbose: bool,
    as_json: bool,
) -> int:
    """Run the pipeline in PIPELINE.yaml: records from its queue into its tables, each once.

    Ctrl-C or SIGTERM lets the micro-batch that is running finish; a second one leaves at once, and so may
    SIGKILL at any time: what was under way is run again at the next start, and arrives once. The file is
    checked before Spark starts.
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
        return report_checks(spec, sessions, as_json=as_json)

    from penstock.cli.run.display import choose_display
    from penstock.cli.run.supervisor import Supervisor, cause_of
    from penstock.spark import Pipeline

    signals = StopSignals()
    try:
        with signals, choose_display(as_json) as display:
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
        # Nothing of Spark is waited for.
        os._exit(signals.exit_code)
    except PenstockError as error:
        if verbose:
            click.echo(cause_of(error), err=True)
        raise
    finally:
        sessions.close()


def _set_up_logging(verbose: bool) -> None:
    """Our own warnings, without what the bridge to Java logs under no name; with `verbose` everything."""
    if verbose:
        logging.basicConfig(level=logging.INFO, stream=sys.stderr)
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.addFilter(logging.Filter("penstock"))
    logging.basicConfig(handlers=[handler])


_WIDTH = 16


def report_checks(spec: PipelineSpec, sessions: CommandSession, *, as_json: bool) -> int:
    """Print every finding as it is made. 1 if any is in the way."""
    from penstock.spark import check_pipeline

    checks: list[Check] = []
    try:
        for finding in check_pipeline(spec, sessions.open, own_java=sessions.starts_java):
            checks.append(_check(finding))
            if not as_json:
                print_check(checks[-1], _WIDTH)
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


def _check(finding: CheckResult) -> Check:
    return Check(status=Status(finding.status), name=finding.name, text=finding.text, advice=finding.advice)
