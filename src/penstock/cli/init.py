"""`penstock init`: files to start from."""

from __future__ import annotations

from pathlib import Path

import click

from penstock.cli.failure import ExitCode
from penstock.cli.starting_file import pipeline_text, starting_text
from penstock.errors import ConfigError

__all__ = ["init"]


@click.command()
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path), default=Path())
@click.option("--force", is_flag=True, help="Replace files that are there.")
def init(directory: Path, force: bool) -> int:
    """Write penstock.yaml and a pipeline, events.yaml, into DIRECTORY (this one unless given).

    Both are commented, and run as they are: `penstock up` there. Nothing that exists is replaced.
    """
    files = {
        directory / "penstock.yaml": starting_text(),
        directory / "events.yaml": pipeline_text(),
    }
    there = [path for path in files if path.exists()]
    if there and not force:
        named = " and ".join(str(path) for path in there)
        raise ConfigError(f"{named}: there already; --force replaces what is there")
    for path, text in files.items():
        _write(path, text)
        click.echo(f"wrote {path}")
    where = "" if directory == Path() else f"cd {directory} && "
    click.echo(f"next: {where}penstock up --check, then {where}penstock up")
    return ExitCode.OK


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
