"""`penstock collector dead-letters`: what destinations refused for good."""

from __future__ import annotations

from dataclasses import asdict

import click

from penstock.cli.display import print_json, print_table, time_text
from penstock.cli.failure import ExitCode
from penstock.units import format_size

__all__ = ["dead_letters"]


@click.command("dead-letters")
@click.argument("directory", type=click.Path(exists=True, file_okay=False), default="./dead_letters")
@click.option("--exporter", help="Only those of this exporter.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def dead_letters(directory: str, exporter: str | None, as_json: bool) -> int:
    """List the refused bundles in DIRECTORY (the `dead_letters` of the file).

    Each .pb file is a whole OTLP request. To send one again:
    curl --data-binary @FILE -H 'content-type: application/x-protobuf' http://HOST:4318/v1/SIGNAL
    Then delete it, and the .json beside it.
    """
    from penstock.collector.dead_letters import DeadLetters

    letters = [
        letter
        for letter in DeadLetters(directory).letters()
        if exporter is None or letter.exporter == exporter
    ]
    if as_json:
        print_json([asdict(letter) for letter in letters])
    elif not letters:
        click.echo("nothing was refused")
    else:
        rows = [
            (letter.exporter, letter.signal, time_text(letter.at_ms), format_size(letter.size), letter.reason,
             letter.path)
            for letter in letters
        ]  # fmt: skip
        print_table(("exporter", "signal", "refused", "size", "reason", "file"), rows, right=(3,))
    return ExitCode.PROBLEM if letters else ExitCode.OK
