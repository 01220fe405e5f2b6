"""`penstock quiver subscribers`: who takes data out, how far each is, and dropping one by hand."""

from __future__ import annotations

import dataclasses
import time

import click

from penstock.cli.display import print_json, print_table
from penstock.cli.quiver.choice import open_place
from penstock.cli.quiver.cores import chosen_cores
from penstock.quiver import Subscriber, drop_subscriber, look_at_subscribers
from penstock.storage import OsFileSystem
from penstock.units import format_duration

__all__ = ["subscribers"]


@click.command()
@click.argument("path")
@click.option("--core", type=int, help="This core alone.")
@click.option("--drop", metavar="NAME", help="Unregister this subscriber; what it has not taken is let go.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def subscribers(path: str, core: int | None, drop: str | None, as_json: bool) -> None:
    """List the subscribers of the data directory PATH, as the disk has them.

    Every subscriber keeps the data it has not resolved, also one that nobody uses any more: --drop lets go of
    that. Listing may run beside the writer and is behind it by what is not synced yet; dropping wants the
    directory for itself.
    """
    fs = OsFileSystem()
    chosen = chosen_cores(path, core)
    if drop is not None:
        gone = [(number, drop_subscriber(fs, directory, drop)) for number, directory in chosen]
        if as_json:
            print_json({"dropped": [_object(number, each) for number, each in gone]})
            return
        for number, each in gone:
            click.echo(f"core {number}: dropped {each.name}, with {each.pending_segments} segments pending")
        return
    infos = open_place(path).infos()
    found = [
        (number, each)
        for number, directory in chosen
        for each in look_at_subscribers(fs, directory, [info for info in infos if info.core_id == number])
    ]
    if as_json:
        print_json({"subscribers": [_object(number, each) for number, each in found]})
        return
    headers = ("core", "subscriber", "state", "mark", "pending", "gaps", "lag", "acked", "nacked", "lost")
    if found:
        print_table(headers, [_row(*each) for each in found], right=(0, 3, 4, 5, 6, 7, 8, 9))
    else:
        click.echo("no subscribers")


def _row(core: int, one: Subscriber) -> tuple[str, ...]:
    lag = "-" if one.oldest_pending_ns is None else format_duration(_age_s(one.oldest_pending_ns))
    return (
        str(core),
        one.name,
        one.state.name.lower(),
        str(one.hwm),
        str(one.pending_segments),
        str(one.gap_segments),
        lag,
        str(one.acked),
        str(one.nacked),
        str(one.dropped + one.expired + one.rejected),
    )


def _age_s(ns: int) -> float:
    return max(0.0, time.time() - ns / 1e9)


def _object(core: int, one: Subscriber) -> dict[str, object]:
    return {"core": core} | dataclasses.asdict(one) | {"state": one.state.name.lower()}
