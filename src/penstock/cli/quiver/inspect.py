"""`penstock quiver inspect`: which segments there are, and what one of them holds."""

from __future__ import annotations

import dataclasses

import click

from penstock.cli.display import Progress, print_json, print_pairs, print_table, time_text
from penstock.cli.failure import ExitCode
from penstock.cli.quiver.choice import choice_options, choose, open_place
from penstock.errors import Corrupt, InvalidInput, NotFound
from penstock.quiver import SegmentInfo, SegmentReader, SegmentSource, slot_name
from penstock.units import format_size

__all__ = ["inspect"]

_BUNDLES_SHOWN = 20


@click.command()
@click.argument("path")
@choice_options
@click.option("--segment", type=int, help="Show this segment: its facts, its columns and its bundles.")
@click.option("--verify", is_flag=True, help="Go over the checksum of every segment shown.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def inspect(
    path: str,
    signal: str | None,
    core: int | None,
    since: str | None,
    until: str | None,
    segment: int | None,
    verify: bool,
    as_json: bool,
) -> int:
    """List the segments of the data directory PATH, or of uploaded ones at the address of a store.

    Reads only, and may run beside the writer. Exits with 5 if anything is damaged.
    """
    source = open_place(path)
    infos = choose(source.infos(), signal=signal, core=core, since=since, until=until)
    if segment is not None:
        return _show_one(source, infos, segment, as_json)
    damage = {name: str(error) for name, error in source.damaged.items()}
    if verify:
        damage |= _verify(source, infos)
    if as_json:
        print_json(_object(infos, damage))
    else:
        _print(path, infos, damage)
    return ExitCode.CORRUPT if damage else ExitCode.OK


def _verify(source: SegmentSource, infos: list[SegmentInfo]) -> dict[str, str]:
    damage: dict[str, str] = {}
    with Progress() as progress:
        for info in infos:
            progress.show(f"segment {info.seq} of core {info.core_id}")
            try:
                source.reader(info)
            except Corrupt as error:
                damage[f"segment {info.seq} of core {info.core_id}"] = str(error)
            except NotFound:
                continue  # Removed meanwhile, as segments are.
    return damage


def _print(path: str, infos: list[SegmentInfo], damage: dict[str, str]) -> None:
    if infos:
        headers = ("core", "segment", "slot", "bundles", "items", "size", "ingested from", "to")
        print_table(headers, [_row(info) for info in infos], right=(0, 1, 3, 4, 5))
    items, size = sum(info.item_count for info in infos), sum(info.file_size for info in infos)
    click.echo(f"{len(infos)} segments, {items} items, {format_size(size)} in {path}")
    for name, reason in damage.items():
        click.echo(f"{click.style('damaged', fg='red')} {name}: {reason}")


def _row(info: SegmentInfo) -> tuple[str, ...]:
    return (
        str(info.core_id),
        str(info.seq),
        slot_name(info.slot),
        str(info.bundle_count),
        str(info.item_count),
        format_size(info.file_size),
        time_text(info.ingest_ns_min // 1_000_000),
        time_text(info.ingest_ns_max // 1_000_000),
    )


def _object(infos: list[SegmentInfo], damage: dict[str, str]) -> dict[str, object]:
    return {"segments": [dataclasses.asdict(info) for info in infos], "damaged": damage}


def _show_one(source: SegmentSource, infos: list[SegmentInfo], seq: int, as_json: bool) -> int:
    found = [info for info in infos if info.seq == seq]
    if not found:
        raise NotFound(f"there is no segment {seq}; list them without --segment")
    if len(found) > 1:
        raise InvalidInput(f"every core has a segment {seq}; say which one with --core")
    reader = source.reader(found[0])
    if as_json:
        print_json(_segment_object(found[0], reader))
    else:
        _print_one(found[0], reader)
    return ExitCode.OK


def _segment_object(info: SegmentInfo, reader: SegmentReader) -> dict[str, object]:
    return {
        **dataclasses.asdict(info),
        "columns": [{"name": field.name, "type": str(field.type)} for field in reader.schema],
        "bundles": [dataclasses.asdict(reader.bundle(place)) for place in range(reader.bundle_count)],
    }


def _print_one(info: SegmentInfo, reader: SegmentReader) -> None:
    facts = [(name, str(value)) for name, value in dataclasses.asdict(info).items() if value is not None]
    print_pairs(facts, f"segment {info.seq} of core {info.core_id}")
    print_table(("column", "type"), [(field.name, str(field.type)) for field in reader.schema])
    shown = range(min(reader.bundle_count, _BUNDLES_SHOWN))
    bundles = [(place, reader.bundle(place)) for place in shown]
    rows = [
        (str(place), str(each.items), str(each.wal_seq), time_text(each.ingest_ns // 1_000_000))
        for place, each in bundles
    ]
    print_table(("bundle", "items", "log entry", "ingested"), rows, right=(0, 1, 2))
    if reader.bundle_count > _BUNDLES_SHOWN:
        click.echo(f"and {reader.bundle_count - _BUNDLES_SHOWN} more; --json shows them all")
