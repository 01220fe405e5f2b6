"""`penstock quiver export`: segments as Parquet files."""

from __future__ import annotations

import dataclasses
import os
from typing import cast

import click

from penstock.cli.display import Progress, print_json
from penstock.cli.failure import ExitCode
from penstock.cli.quiver.choice import choice_options, choose, open_place
from penstock.quiver import TimestampUnit, export_parquet
from penstock.storage import OsFileSystem
from penstock.units import format_size

__all__ = ["export"]


@click.command()
@click.argument("path")
@click.option("--parquet", "target", required=True, metavar="DIRECTORY", help="Where the files go.")
@choice_options
@click.option(
    "--timestamps",
    type=click.Choice(["ns", "us", "ms"]),
    default="ns",
    show_default=True,
    help="How exact times are; us is for tools that know no nanoseconds, Spark among them.",
)
@click.option("--view", is_flag=True, help="Attributes as text, ids in hexadecimal, times in microseconds.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def export(
    path: str,
    target: str,
    signal: str | None,
    core: int | None,
    since: str | None,
    until: str | None,
    timestamps: str,
    view: bool,
    as_json: bool,
) -> int:
    """Write the segments of the data directory PATH, or of uploaded ones, as one Parquet file each.

    Whole segments are written, those that reach into the times asked for. Files that are there stay, so an
    export can be continued. Reads only, and may run beside the writer.
    """
    source = open_place(path)
    infos = choose(source.infos(), signal=signal, core=core, since=since, until=until)
    with Progress() as progress:
        report = export_parquet(
            source,
            infos,
            os.path.abspath(target),
            fs=OsFileSystem(),
            timestamps=cast("TimestampUnit", timestamps),
            view=view,
            on_progress=lambda info: progress.show(f"segment {info.seq} of core {info.core_id}"),
        )
    if as_json:
        print_json(dataclasses.asdict(report) | {"damaged": sorted(source.damaged)})
    else:
        click.echo(f"{report.files} files, {report.rows} rows, {format_size(report.byte_count)} in {target}")
        for count, why in ((report.kept, "were there already"), (report.gone, "were removed meanwhile")):
            if count:
                click.echo(f"{count} {why}")
        for name, error in source.damaged.items():
            click.echo(f"{click.style('damaged', fg='red')} {name}: {error}")
    return ExitCode.CORRUPT if source.damaged else ExitCode.OK
