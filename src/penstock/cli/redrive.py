"""`penstock redrive`: dead letters back into the queue, each once."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.cli.display import Progress, print_json, print_table
from penstock.cli.failure import ExitCode
from penstock.cli.pipeline_file import pipeline_argument, read_pipeline
from penstock.clock import SYSTEM_CLOCK
from penstock.errors import ConfigError
from penstock.units import parse_duration

if TYPE_CHECKING:
    from penstock.spark import Redrive, Redriven

__all__ = ["parse_position", "parse_sequences", "parse_since", "redrive"]

LIMIT = 100_000
"""The letters of one redrive are in memory together, and one object names them all."""
REASONS_SHOWN = 20


@click.command()
@pipeline_argument
@click.option("--reason", metavar="TEXT", help="Only letters whose reason holds TEXT.")
@click.option(
    "--sequence", "sequences", metavar="A-B", help="Only letters of these sequences; A- and -B work too."
)
@click.option(
    "--position",
    "positions",
    multiple=True,
    metavar="SHARD:SEQUENCE:INDEX",
    help="Only the letter of this record; may be repeated.",
)
@click.option("--since", metavar="TIME", help="Only letters written since: 2h (ago), or 2026-05-01T12:00Z.")
@click.option(
    "--limit", type=click.IntRange(min=1), default=LIMIT, show_default=True, help="Letters at most."
)
@click.option("--dry-run", is_flag=True, help="Only tell what would be redriven.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def redrive(
    file: Path,
    changes: tuple[str, ...],
    reason: str | None,
    sequences: str | None,
    positions: tuple[str, ...],
    since: str | None,
    limit: int,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Put the dead letters of PIPELINE.yaml back into its queue, after what was wrong is corrected.

    Each letter is redriven once, also if this command is killed: the next one finishes what was begun. The
    letters stay in their table. A record that fails again is a new letter. Needs no Spark.
    """
    from penstock.spark import Wanted
    from penstock.spark import redrive as put_back

    spec = read_pipeline(file, changes)
    wanted = Wanted(
        reason=reason,
        sequences=None if sequences is None else parse_sequences(sequences),
        since_ms=None if since is None else parse_since(since, SYSTEM_CLOCK.now_ms()),
        limit=limit,
        positions=frozenset(map(parse_position, positions)) if positions else None,
    )
    with Progress() as progress:
        progress.show("reading the dead letters")
        result = put_back(spec, wanted, dry_run=dry_run)
    if as_json:
        print_json(_document(result, dry_run))
    else:
        _print(result, dry_run)
    return ExitCode.OK


def parse_sequences(text: str) -> tuple[int, int]:
    """`7`, `3-9`, `3-` or `-9` as first and last. Raises `ConfigError`."""
    first, dash, last = text.strip().partition("-")
    try:
        low = int(first) if first else 0
        high = low if not dash else int(last) if last else 2**63 - 1
    except ValueError:
        low, high = 1, 0
    if high < low or text.strip() in ("", "-"):
        raise ConfigError(f"--sequence: expected A-B, such as 100-250, found {text!r}")
    return low, high


def parse_position(text: str) -> tuple[int, int, int]:
    """`0:17:3` as shard, sequence and index. Raises `ConfigError`."""
    try:
        shard, sequence, index = (int(part) for part in text.split(":"))
    except ValueError:
        shard = sequence = index = -1
    if not (0 <= shard < 2**31 and 0 <= sequence < 2**63 and 0 <= index < 2**31):
        raise ConfigError(f"--position: expected SHARD:SEQUENCE:INDEX, such as 0:17:3, found {text!r}")
    return shard, sequence, index


def parse_since(text: str, now_ms: int) -> int:
    """A moment, or how long ago, in milliseconds. A moment without a zone is UTC. Raises `ConfigError`."""
    try:
        moment = datetime.datetime.fromisoformat(text.strip())
    except ValueError:
        try:
            return now_ms - round(parse_duration(text) * 1000)
        except ConfigError:
            raise ConfigError(
                f"--since: expected a time (2026-05-01T12:00Z) or how long ago (2h), found {text!r}"
            ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return round(moment.timestamp() * 1000)


def _document(result: Redrive, dry_run: bool) -> dict[str, object]:
    return {
        "dry_run": dry_run,
        "redriven": _one(result.done) if result.done else None,
        "finished": [_one(earlier) for earlier in result.finished],
        "found": result.found,
        "left": result.left,
        "reasons": result.reasons,
        "unfinished": list(result.unfinished),
    }


def _one(done: Redriven) -> dict[str, object]:
    return {
        "number": done.number,
        "records": done.records,
        "reasons": done.reasons,
        "first_sequence": done.first,
        "shard": done.shard,
        "resumed": done.resumed,
    }


def _print(result: Redrive, dry_run: bool) -> None:
    for earlier in result.finished:
        click.echo(f"finished redrive {earlier.number}, which was cut short: {_letters(earlier.records)}")
    for number in result.unfinished:
        click.echo(f"redrive {number} was cut short; the next redrive finishes it first")
    if not result.found:
        click.echo("nothing to redrive")
        return
    if dry_run:
        click.echo(f"would redrive {_letters(result.found)}")
    elif result.done is not None:
        click.echo(f"redrive {result.done.number}: {_letters(result.done.records)}, {_where(result.done)}")
    shown = list(result.reasons.items())[:REASONS_SHOWN]
    print_table(("reason", "letters"), [(reason, f"{count:,}") for reason, count in shown], right=(1,))
    if len(result.reasons) > REASONS_SHOWN:
        click.echo(f"and {len(result.reasons) - REASONS_SHOWN:,} other reasons; --json lists all")
    if result.left:
        click.echo(f"{_letters(result.left)} left by --limit; run it again for more")


def _where(done: Redriven) -> str:
    if done.first is None:
        return "already in the queue"
    shard = "" if done.shard is None else f" of shard {done.shard}"
    return f"in the queue from sequence {done.first}{shard} on"


def _letters(count: int) -> str:
    return "1 letter" if count == 1 else f"{count:,} letters"
