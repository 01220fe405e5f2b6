"""How a run of `produce` ended, told to people or to programs: every record is accounted for."""

from __future__ import annotations

import signal
from dataclasses import dataclass

import click

from penstock.cli.buffer.tally import Tally
from penstock.cli.display import print_json, print_pairs
from penstock.cli.failure import ExitCode, exit_code, report
from penstock.errors import PenstockError
from penstock.units import format_count, format_duration, format_size

__all__ = ["Ending", "report_ending"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What was accepted, and what stopped the reading (nothing: the end of the input)."""

    tally: Tally
    signal: signal.Signals | None
    input_error: PenstockError | None
    unread_bytes: int


def report_ending(ending: Ending, elapsed_s: float, as_json: bool) -> int:
    """Print the account; returns the exit code."""
    tally = ending.tally
    rate = tally.durable / elapsed_s if elapsed_s > 0 else 0.0
    if as_json:
        print_json(
            {
                "accepted": tally.accepted,
                "durable": tally.durable,
                "durable_bytes": tally.durable_bytes,
                "not_durable": tally.accepted - tally.durable - tally.unknown,
                "unknown": tally.unknown,
                "first_not_durable": tally.first_failed,
                "sequences": [
                    {"folder": folder, "first": low, "last": high}
                    for folder, (low, high) in sorted(tally.sequences.items())
                ],
                "seconds": round(elapsed_s, 3),
                "records_per_second": round(rate, 1),
                "stopped_by": None if ending.signal is None else ending.signal.name,
            }
        )
    else:
        print_pairs(_lines(tally, elapsed_s, rate))
    return _complain(ending)


def _lines(tally: Tally, elapsed_s: float, rate: float) -> list[tuple[str, str]]:
    lines = [
        ("accepted", f"{tally.accepted:,} records, {format_size(tally.accepted_bytes)}"),
        ("durable", f"{tally.durable:,} records, {format_size(tally.durable_bytes)}"),
    ]
    for folder, (low, high) in sorted(tally.sequences.items()):
        place = f" in {folder}" if len(tally.sequences) > 1 else ""
        numbers = f"{low}-{high}" if low < high else f"{low}"
        lines.append(("sequences", f"{numbers}{place}"))
    lines.append(("rate", f"{format_count(round(rate))} records/s over {format_duration(elapsed_s)}"))
    return lines


def _complain(ending: Ending) -> int:
    """Say what is not durable, and why; the exit code that goes with it."""
    tally = ending.tally
    if ending.signal is not None:
        click.echo(f"stopped by {ending.signal.name}: the input was not read to its end", err=True)
        if ending.unread_bytes:
            click.echo(f"{ending.unread_bytes} bytes of an unfinished record were not accepted", err=True)
    if tally.error is not None or not tally.complete:
        return _complain_of_loss(tally)
    if ending.input_error is not None:
        report(ending.input_error)
        return exit_code(ending.input_error)
    if ending.signal is not None:
        return ExitCode.INTERRUPTED if ending.signal is signal.SIGINT else ExitCode.TERMINATED
    return ExitCode.OK


def _complain_of_loss(tally: Tally) -> int:
    lost = tally.accepted - tally.durable
    click.echo(f"{lost:,} of {tally.accepted:,} accepted records are not durable", err=True)
    if tally.first_failed is not None:
        click.echo(f"all before record {tally.first_failed:,} of the input (counted from 0) are", err=True)
    if tally.unknown:
        click.echo(f"of the others, {tally.unknown:,} may be in the queue all the same", err=True)
    if tally.error is not None:
        report(tally.error)
    return ExitCode.OUTCOME_UNKNOWN if tally.unknown else ExitCode.PROBLEM
