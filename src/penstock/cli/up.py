"""`penstock up`: run all parts of a machine with one command, with or without a file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import click

from penstock.cli.base import Output, command
from penstock.cli.failure import ExitCode
from penstock.cli.output import print_json
from penstock.cli.pipeline_file import overrides
from penstock.cli.starting_file import DEFAULT_PIPELINE, default_mapping, pipeline_text
from penstock.config import from_env, load_mapping, merge
from penstock.up import (
    Level,
    Prepared,
    UpFile,
    address_of,
    check_ports,
    data_directory,
    hold,
    layered,
    prepare,
    write_collector_file,
    write_if_missing,
)

FILE_NAME: Final = "penstock.yaml"
ENVIRONMENT: Final = "PENSTOCK_UP__"
_SIGNALS = """\b
Signals:
  SIGTERM, Ctrl-C   stop the parts in the order of the data flow; twice: immediately
  SIGHUP            restart failed parts now; stop if the terminal was closed
  SIGUSR1           print a new token for the console

`penstock init` writes a file to start from. PENSTOCK_UP__TOPICS__PORT=4001 in the environment sets a key.
"""


@command(epilog=_SIGNALS, json_help="Print the log as JSON, one line per entry.")
@click.argument("file", required=False, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--check", is_flag=True, help="Only show what would run and all errors.")
@click.option("--only", multiple=True, metavar="PART", help="Run only this part (or kind); may be repeated.")
@click.option("--without", multiple=True, metavar="PART", help="Leave out this part (or kind).")
@click.option(
    "--set", "changes", multiple=True, metavar="KEY.PATH=VALUE",
    help="Set a key of the file, such as topics.port=4001; may be repeated.",
)  # fmt: skip
@click.option("--data-dir", metavar="DIR", help="Where data is kept [default: ./penstock-data].")
@click.option(
    "--log", "level", type=click.Choice([level.name.lower() for level in Level]), default="info",
    show_default=True, help="The lowest level to print.",
)  # fmt: skip
def up(
    file: Path | None,
    check: bool,
    only: tuple[str, ...],
    without: tuple[str, ...],
    changes: tuple[str, ...],
    data_dir: str | None,
    level: str,
    out: Output,
) -> int:
    """Run the parts in FILE on this machine: collector, topics, relays, pipelines, databases, console.

    FILE is by default penstock.yaml in this directory. Without it, every installed part runs, with its data
    in ./penstock-data, reachable only from this machine. A part that ends is restarted; the others continue.
    """
    if "console" in without:
        changes, without = (*changes, "console.enabled=false"), tuple(p for p in without if p != "console")
    found = find_file(file, changes, data_dir, os.environ)
    if not check:
        write_default_pipeline(found)
    prepared, faults = prepare(found, only=only, without=without)
    if check:
        return _report(prepared, faults, out)
    if prepared is None or faults:
        return _refuse(faults)
    with hold(prepared.plan):
        check_ports(prepared)
        write_collector_file(prepared.plan)
        from penstock.cli.up_run import LogPrinter, run_fleet

        with LogPrinter(Level[level.upper()], as_json=out.is_json) as printer:
            run_fleet(prepared, printer)
    return ExitCode.OK


def find_file(
    path: Path | None,
    changes: Iterable[str],
    data_dir: str | None,
    environ: Mapping[str, str],
    directory: Path | None = None,
) -> UpFile:
    """Return the given file, else penstock.yaml in this directory, else every part with its defaults.

    `PENSTOCK_UP__*` in the environment overrides the file, and flags override both. Raise `ConfigError` if
    the file or a flag is invalid.
    """
    here = (directory or Path()).absolute()
    if path is None and (here / FILE_NAME).exists():
        path = Path(FILE_NAME)
    flags = {} if data_dir is None else {"data_dir": str(here / data_dir)}
    over = merge(from_env(ENVIRONMENT, environ), overrides(changes), flags)
    if path is None:
        own, base = default_mapping(str(over.get("data_dir", "penstock-data"))), here
    else:
        own, base = load_mapping(here / path), (here / path).parent
    return layered(path, base, [own, over], environ)


def write_default_pipeline(file: UpFile) -> None:
    """Write the pipeline that runs without a file, unless it exists."""
    if file.path is None:
        write_if_missing(Path(data_directory(file)) / DEFAULT_PIPELINE, pipeline_text(".."))


def _refuse(faults: list[str]) -> int:
    for fault in faults:
        click.echo(f"error: {fault}", err=True)
    return ExitCode.REJECTED


def _report(prepared: Prepared | None, faults: list[str], out: Output) -> int:
    """Print the parts that would run, and every fault, including those in the parts' own files."""
    everything = [*faults, *(prepared.faults.values() if prepared is not None else [])]
    parts = [] if prepared is None else _parts(prepared)
    if out.is_json:
        print_json({"ok": not everything, "faults": everything, "parts": parts})
        return ExitCode.REJECTED if everything else ExitCode.OK
    for part in parts:
        click.echo(f"{part['name']:<20} {part['what']}")
    if everything:
        return _refuse(everything)
    click.echo(click.style("the file is valid", fg="green"))
    return ExitCode.OK


def _route(prepared: Prepared, name: str) -> str:
    routes = [place for place in prepared.plan.map.relays if place.part == name]
    return ", ".join(f"topic {place.topic} into queue {place.queue}" for place in routes)


def _parts(prepared: Prepared) -> list[dict[str, str]]:
    found = []
    for part in prepared.plan.parts:
        why = prepared.disabled.get(part.name)
        ports = ", ".join(address_of(*place) for place in part.ports.values())
        what = f"does not run: {why}" if why else (ports or part.file or _route(prepared, part.name))
        found.append({"name": part.name, "kind": part.kind.value, "what": what})
    return found
