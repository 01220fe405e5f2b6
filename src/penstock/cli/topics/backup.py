"""`penstock topics backup`: a consistent copy of a data directory, while its server runs."""

from __future__ import annotations

import os

import click

from penstock.cli.display import Progress, print_json, print_pairs, time_text
from penstock.cli.failure import ExitCode
from penstock.cli.topics.place import cold_option, open_cold
from penstock.storage import OsFileSystem
from penstock.topics import BackupManifest
from penstock.topics import backup as back_up
from penstock.units import format_size

__all__ = ["backup", "manifest_object", "manifest_pairs"]


@click.command()
@click.argument("data_dir", type=click.Path(file_okay=False))
@click.argument("target", type=click.Path(file_okay=False))
@cold_option
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def backup(data_dir: str, target: str, cold: str | None, as_json: bool) -> int:
    """Copy DATA_DIR to TARGET, a new or empty directory, as it is at one moment; the server may run.

    Records of the cold tier are copied too. TARGET/backup.json appears when the copy is complete and checked.
    """
    fs = OsFileSystem()
    with Progress() as progress, open_cold(cold, fs) as tier:
        manifest = back_up(
            fs, os.path.abspath(data_dir), os.path.abspath(target), cold=tier, on_progress=progress.show
        )
    if as_json:
        print_json(manifest_object(manifest, target))
    else:
        print_pairs(manifest_pairs(manifest), f"{target}: backup complete")
    return ExitCode.OK


def manifest_object(manifest: BackupManifest, directory: str) -> dict[str, object]:
    return {
        "directory": directory,
        "created_ms": manifest.created_ms,
        "snapshot": manifest.snapshot,
        "topics": manifest.topics,
        "files": len(manifest.files),
        "bytes": manifest.bytes,
    }


def manifest_pairs(manifest: BackupManifest) -> list[tuple[str, str]]:
    return [
        ("taken at", time_text(manifest.created_ms)),
        ("snapshot", f"{manifest.snapshot}" if manifest.snapshot else "none: all of it is in the log"),
        ("files", f"{len(manifest.files):,}, {format_size(manifest.bytes)}"),
    ]
