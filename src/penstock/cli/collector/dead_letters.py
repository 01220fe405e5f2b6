"""`penstock collector dead-letters`: what destinations refused for good."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from penstock.cli.display import print_json, print_table, time_text
from penstock.cli.failure import ExitCode
from penstock.units import format_size

if TYPE_CHECKING:
    from penstock.collector import DeadLetter, DeadLetters

__all__ = ["dead_letters"]


@click.command("dead-letters")
@click.argument("directory", type=click.Path(exists=True, file_okay=False), default="./dead_letters")
@click.option("--exporter", help="Only those of this exporter.")
@click.option(
    "--replay", "endpoint", metavar="URL",
    help="Send them again to this OTLP/HTTP endpoint, and remove those that it takes.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def dead_letters(directory: str, exporter: str | None, endpoint: str | None, as_json: bool) -> int:
    """List the refused bundles in DIRECTORY (the `dead_letters` of the file).

    Each .pb file is a whole OTLP request, and the .json beside it says why it was refused. --replay sends
    each once, for example to a collector's own HTTP port; what is not taken stays.
    """
    from penstock.collector import DeadLetters

    store = DeadLetters(directory)
    letters = [letter for letter in store.letters() if exporter is None or letter.exporter == exporter]
    if endpoint is not None:
        return _replay(store, letters, endpoint, as_json)
    if as_json:
        print_json([asdict(letter) for letter in letters])
    elif not letters:
        click.echo("nothing was refused")
    else:
        rows = [
            (letter.exporter, letter.signal, time_text(letter.at_ms), format_size(letter.size),
             letter.damage or letter.reason, letter.path)
            for letter in letters
        ]  # fmt: skip
        print_table(("exporter", "signal", "refused", "size", "reason", "file"), rows, right=(3,))
    return ExitCode.PROBLEM if letters else ExitCode.OK


def _replay(store: DeadLetters, letters: Sequence[DeadLetter], endpoint: str, as_json: bool) -> int:
    from penstock.collector import OtlpExporterSettings, make_otlp_exporter, replay

    exporter = make_otlp_exporter(OtlpExporterSettings(http_endpoint=endpoint))
    done = asyncio.run(replay(letters, store, exporter))
    taken = sum(one.is_taken for one in done)
    if as_json:
        told = [
            {"path": one.letter.path, "taken": one.is_taken, "reason": one.outcome.reason} for one in done
        ]
        print_json({"letters": len(letters), "taken": taken, "sent": told})
    else:
        for one in done:
            if not one.is_taken:
                click.echo(f"{one.letter.path}: {one.outcome.reason}", err=True)
        click.echo(f"{taken} of {len(letters)} were taken")
    return ExitCode.OK if taken == len(letters) else ExitCode.PROBLEM
