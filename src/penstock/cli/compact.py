"""`penstock compact`: many small files of a pipeline's tables into few large ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.cli.display import Progress, print_json, print_table
from penstock.cli.failure import ExitCode
from penstock.cli.pipeline_file import pipeline_argument, read_pipeline, session_options, settings
from penstock.config import unknown_key
from penstock.errors import ConfigError, NotFound
from penstock.units import format_size, parse_size

if TYPE_CHECKING:
    from penstock.spark import CompactionReport, PipelineSpec, TableSpec

__all__ = ["compact", "tables_to_compact"]


@click.command()
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
    help="Leave a partition alone that has fewer small files.",
)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def compact(
    file: Path,
    changes: tuple[str, ...],
    master: str | None,
    remote: str | None,
    conf: tuple[str, ...],
    only: str | None,
    target: str,
    min_files: int,
    as_json: bool,
) -> int:
    """Rewrite the small files of PIPELINE.yaml's Delta and Iceberg tables as larger ones, with the same rows.

    The pipeline may run meanwhile. Readers see the table before or after, never between.
    """
    if master is not None and remote is not None:
        raise ConfigError("give --master or --remote, not both")
    target_bytes = parse_size(target)
    spec = read_pipeline(file, changes)
    tables = tables_to_compact(spec, only)
    from penstock.cli.run_session import CommandSession
    from penstock.spark import CompactionReport
    from penstock.spark import compact as compact_table

    sessions = CommandSession(
        f"{spec.name} compact",
        master=master,
        remote=remote,
        conf={**spec.spark, **settings(conf, "--conf")},
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
    if as_json:
        print_json({"tables": {name: dataclasses.asdict(report) for name, report in reports.items()}})
    else:
        _print(reports)
    return ExitCode.OK


def tables_to_compact(spec: PipelineSpec, only: str | None) -> dict[str, TableSpec]:
    """The tables that are meant, by the name of their sink. Raises `ConfigError`."""
    from penstock.spark import DEAD_LETTERS, table_of

    sinks = dict(spec.outputs)
    if spec.letters is not None:
        sinks[DEAD_LETTERS] = spec.letters
    tables = {name: table for name, sink in sinks.items() if (table := table_of(sink)) is not None}
    if only is None:
        managed = {name: table for name, table in tables.items() if table.kind != "parquet"}
        if not managed:
            raise ConfigError(f"{spec.name} has no Delta or Iceberg table, and others cannot be compacted")
        return managed
    if only not in sinks:
        raise unknown_key(f"--sink {only}", only, tables)
    if only not in tables:
        raise ConfigError(f"--sink {only}: this is a queue, which has no files to compact")
    return {only: tables[only]}


def _print(reports: dict[str, CompactionReport]) -> None:
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
