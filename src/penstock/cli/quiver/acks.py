"""`penstock quiver acks`: the acknowledgement log in words."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import click

from penstock.cli.display import print_json, time_text
from penstock.cli.quiver.cores import chosen_cores
from penstock.quiver import AckEvent, read_history
from penstock.storage import OsFileSystem

__all__ = ["acks"]


@click.command()
@click.argument("path")
@click.option("--core", type=int, help="This core alone.")
@click.option("--subscriber", metavar="NAME", help="What this subscriber said alone.")
@click.option("--segment", type=int, help="What was said about this segment alone.")
@click.option("--last", type=click.IntRange(min=1), help="The last so many lines alone.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def acks(
    path: str, core: int | None, subscriber: str | None, segment: int | None, last: int | None, as_json: bool
) -> None:
    """Print what subscribers of the data directory PATH said, oldest first, as far as the log goes back.

    Reads only, and may run beside the writer. What was summed up in a checkpoint is not in the log any more;
    `penstock quiver subscribers` shows what it came to.
    """
    fs = OsFileSystem()
    chosen = chosen_cores(path, core)
    events = (
        (number, event)
        for number, directory in chosen
        for event in read_history(fs, directory)
        if subscriber in (None, event.subscriber) and segment in (None, event.segment_seq)
    )
    shown: Iterator[tuple[int, AckEvent]] = events if last is None else iter(deque(events, maxlen=last))
    if as_json:
        print_json([_object(number, event) for number, event in shown])
        return
    for number, event in shown:
        where = f"core={number}  " if len(chosen) > 1 else ""
        click.echo(f"{where}{_line(event)}")


def _line(event: AckEvent) -> str:
    parts = [f"ts={time_text(event.ts_ns // 1_000_000)}"]
    if event.segment_seq:
        parts.append(f"segment=seg-{event.segment_seq}")
    if event.bundle is not None:
        parts.append(f"bundle={event.bundle}")
    if event.subscriber is not None:
        parts.append(f"subscriber={event.subscriber}")
    return "  ".join([*parts, event.what])


def _object(core: int, event: AckEvent) -> dict[str, object]:
    return {
        "core": core,
        "number": event.number,
        "ts_ns": event.ts_ns,
        "segment": event.segment_seq or None,
        "bundle": event.bundle,
        "subscriber": event.subscriber,
        "attempt": event.attempt,
        "what": event.what,
    }
