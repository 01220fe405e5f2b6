"""`penstock topics restore`: a data directory from a backup."""

from __future__ import annotations

import os

import click

from penstock.cli.display import Progress, print_json, print_pairs
from penstock.cli.failure import ExitCode
from penstock.cli.topics.backup import manifest_object, manifest_pairs
from penstock.storage import OsFileSystem
from penstock.topics import restore as put_back

__all__ = ["restore"]


@click.command()
@click.argument("backup", type=click.Path(file_okay=False))
@click.argument("data_dir", type=click.Path(file_okay=False))
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def restore(backup: str, data_dir: str, as_json: bool) -> int:
    """Fill DATA_DIR, which must be empty or not exist, from BACKUP; then start a server on it.

    Every file is compared with what was backed up before anything is put in place.
    """
    with Progress() as progress:
        manifest = put_back(
            OsFileSystem(), os.path.abspath(backup), os.path.abspath(data_dir), on_progress=progress.show
        )
    if as_json:
        print_json(manifest_object(manifest, data_dir))
    else:
        print_pairs(manifest_pairs(manifest), f"{data_dir}: restored")
    return ExitCode.OK
