"""`penstock run`: a pipeline in the foreground, until it is told to stop."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import click

from penstock.cli.pipeline_file import pipeline_argument, read_pipeline, session_options, settings
from penstock.cli.run_signals import LeaveNow, StopSignals
from penstock.errors import ConfigError, PenstockError
from penstock.spark import check_spark
from penstock.units import parse_duration

__all__ = ["run"]


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
    file: Path,
    changes: tuple[str, ...],
    master: str | None,
    remote: str | None,
    conf: tuple[str, ...],
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
    if master is not None and remote is not None:
        raise ConfigError("give --master or --remote, not both")
    stop_timeout_s = parse_duration(stop_timeout)
    spec = read_pipeline(file, changes)
    check_spark()
    from penstock.cli.run_session import CommandSession, end_children
    from penstock.spark import check_options

    check_options(spec)

    _set_up_logging(verbose)
    sessions = CommandSession(
        spec.name,
        master=master,
        remote=remote,
        conf={**spec.spark, **settings(conf, "--conf")},
        verbose=verbose,
    )
    if check:
        from penstock.cli.run_check import report_checks

        return report_checks(spec, sessions, as_json=as_json)

    from penstock.cli.run_display import choose_display
    from penstock.cli.run_supervisor import Supervisor, cause_of
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
