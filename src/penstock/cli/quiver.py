"""`penstock quiver …`: look into a data directory of Quiver, and look after it."""

from __future__ import annotations

import dataclasses
import datetime as dt
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import click

from penstock.cli.failure import ExitCode
from penstock.cli.options import injected, json_option
from penstock.cli.output import Progress, print_finding, print_json, print_pairs, print_table, time_text
from penstock.errors import Corrupt, InvalidInput, NotFound
from penstock.findings import Severity
from penstock.quiver import (
    Signal,
    check,
    core_directories,
    drop_subscriber,
    export_parquet,
    is_in_use,
    is_store_url,
    look_at_subscribers,
    open_source,
    read_history,
    repair,
    slot_name,
)
from penstock.storage import OsFileSystem
from penstock.units import format_duration, format_size

if TYPE_CHECKING:
    from penstock.quiver import (
        AckEvent,
        CheckedCore,
        SegmentInfo,
        SegmentReader,
        SegmentSource,
        Subscriber,
        TimestampUnit,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentChoice:
    """Which segments a command is about."""

    signal: str | None
    core: int | None
    since: str | None
    until: str | None

    def among(self, infos: list[SegmentInfo]) -> list[SegmentInfo]:
        """Return those that the options ask for. Raises `InvalidInput` for a time that is none."""
        from penstock.quiver import select  # loads the dataset half of Arrow, which most commands do without

        chosen = select(infos, since=_moment(self.since, "--since"), until=_moment(self.until, "--until"))
        return [
            info
            for info in chosen
            if self.signal in (None, info.signal) and self.core in (None, info.core_id)
        ]


choice_options = injected(
    "choice",
    SegmentChoice,
    click.option("--signal", type=click.Choice([each.value for each in Signal]), help="This signal alone."),
    click.option("--core", type=int, help="This core alone."),
    click.option("--since", metavar="TIME", help="From this moment on, by event time where there is one."),
    click.option("--until", metavar="TIME", help="Before this moment, as 2026-01-31T12:00:00Z."),
)


def open_place(place: str) -> SegmentSource:
    """The segments at PATH. Raises `NotFound` for a directory that is not there."""
    if not is_store_url(place) and not os.path.isdir(place):
        raise NotFound(f"{place} is not a directory; name the data directory, the one with core_0 in it")
    return open_source(place)


def _moment(text: str | None, option: str) -> dt.datetime | None:
    if text is None:
        return None
    try:
        moment = dt.datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidInput(f"{option}: {text!r} is no moment; write it as 2026-01-31T12:00:00Z") from error
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=dt.UTC)


def chosen_cores(path: str, core: int | None) -> list[tuple[int, str]]:
    """Numbers and directories of the cores below PATH, or of the one that is asked for. Raises `NotFound`."""
    root = os.path.abspath(path)
    if not os.path.isdir(root):
        raise NotFound(f"{path} is not a directory; name the data directory, the one with core_0 in it")
    cores = core_directories(OsFileSystem(), root)
    chosen = [found for found in cores if core in (None, found[0])]
    if not chosen:
        raise NotFound(
            f"there is no core {core} in {path}; there is {', '.join(str(each) for each, _ in cores)}"
        )
    return chosen


_BUNDLES_SHOWN = 20


@click.command()
@click.argument("path")
@choice_options
@click.option("--segment", type=int, help="Show this segment: its facts, its columns and its bundles.")
@click.option("--verify", is_flag=True, help="Go over the checksum of every segment shown.")
@json_option
def inspect(
    path: str,
    choice: SegmentChoice,
    segment: int | None,
    verify: bool,
    as_json: bool,
) -> int:
    """List the segments of the data directory PATH, or of uploaded ones at the address of a store.

    Reads only, and may run beside the writer. Exits with 5 if anything is damaged.
    """
    source = open_place(path)
    infos = choice.among(source.infos())
    if segment is not None:
        return _show_segment(source, infos, segment, as_json)
    damage = {name: str(error) for name, error in source.damaged.items()}
    if verify:
        damage |= _verify(source, infos)
    if as_json:
        print_json(_segments_object(infos, damage))
    else:
        _print_segments(path, infos, damage)
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


def _print_segments(path: str, infos: list[SegmentInfo], damage: dict[str, str]) -> None:
    if infos:
        headers = ("core", "segment", "slot", "bundles", "items", "size", "ingested from", "to")
        print_table(headers, [_segment_row(info) for info in infos], right=(0, 1, 3, 4, 5))
    items, size = sum(info.item_count for info in infos), sum(info.file_size for info in infos)
    click.echo(f"{len(infos)} segments, {items} items, {format_size(size)} in {path}")
    for name, reason in damage.items():
        click.echo(f"{click.style('damaged', fg='red')} {name}: {reason}")


def _segment_row(info: SegmentInfo) -> tuple[str, ...]:
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


def _segments_object(infos: list[SegmentInfo], damage: dict[str, str]) -> dict[str, object]:
    return {"segments": [dataclasses.asdict(info) for info in infos], "damaged": damage}


def _show_segment(source: SegmentSource, infos: list[SegmentInfo], seq: int, as_json: bool) -> int:
    found = [info for info in infos if info.seq == seq]
    if not found:
        raise NotFound(f"there is no segment {seq}; list them without --segment")
    if len(found) > 1:
        raise InvalidInput(f"every core has a segment {seq}; say which one with --core")
    reader = source.reader(found[0])
    if as_json:
        print_json(_segment_object(found[0], reader))
    else:
        _print_segment(found[0], reader)
    return ExitCode.OK


def _segment_object(info: SegmentInfo, reader: SegmentReader) -> dict[str, object]:
    return {
        **dataclasses.asdict(info),
        "columns": [{"name": field.name, "type": str(field.type)} for field in reader.schema],
        "bundles": [dataclasses.asdict(reader.bundle(place)) for place in range(reader.bundle_count)],
    }


def _print_segment(info: SegmentInfo, reader: SegmentReader) -> None:
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


@click.command()
@click.argument("path")
@click.option("--parquet", "target", required=True, metavar="DIRECTORY", help="Where the files go.")
@choice_options
@click.option(
    "--timestamps",
    type=click.Choice(["ns", "us", "ms"]),
    default="ns",
    show_default=True,
    help="How exact times are; us is for tools that know no nanoseconds, Spark among them.",
)
@click.option("--view", is_flag=True, help="Attributes as text, ids in hexadecimal, times in microseconds.")
@json_option
def export(
    path: str,
    target: str,
    choice: SegmentChoice,
    timestamps: str,
    view: bool,
    as_json: bool,
) -> int:
    """Write the segments of the data directory PATH, or of uploaded ones, as one Parquet file each.

    Whole segments are written, those that reach into the times asked for. Files that are there stay, so an
    export can be continued. Reads only, and may run beside the writer.
    """
    source = open_place(path)
    infos = choice.among(source.infos())
    with Progress() as progress:
        report = export_parquet(
            source,
            infos,
            os.path.abspath(target),
            fs=OsFileSystem(),
            timestamps=cast("TimestampUnit", timestamps),
            view=view,
            on_progress=lambda info: progress.show(f"segment {info.seq} of core {info.core_id}"),
        )
    if as_json:
        print_json(dataclasses.asdict(report) | {"damaged": sorted(source.damaged)})
    else:
        click.echo(f"{report.files} files, {report.rows} rows, {format_size(report.byte_count)} in {target}")
        for count, why in ((report.kept, "were there already"), (report.gone, "were removed meanwhile")):
            if count:
                click.echo(f"{count} {why}")
        for name, error in source.damaged.items():
            click.echo(f"{click.style('damaged', fg='red')} {name}: {error}")
    return ExitCode.CORRUPT if source.damaged else ExitCode.OK


@click.command()
@click.argument("path")
@click.option("--core", type=int, help="This core alone.")
@click.option("--subscriber", metavar="NAME", help="What this subscriber said alone.")
@click.option("--segment", type=int, help="What was said about this segment alone.")
@click.option("--last", type=click.IntRange(min=1), help="The last so many lines alone.")
@json_option
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
        print_json([_event_object(number, event) for number, event in shown])
        return
    for number, event in shown:
        where = f"core={number}  " if len(chosen) > 1 else ""
        click.echo(f"{where}{_event_line(event)}")


def _event_line(event: AckEvent) -> str:
    parts = [f"ts={time_text(event.ts_ns // 1_000_000)}"]
    if event.segment_seq:
        parts.append(f"segment=seg-{event.segment_seq}")
    if event.bundle is not None:
        parts.append(f"bundle={event.bundle}")
    if event.subscriber is not None:
        parts.append(f"subscriber={event.subscriber}")
    return "  ".join([*parts, event.what])


def _event_object(core: int, event: AckEvent) -> dict[str, object]:
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


@click.command()
@click.argument("path")
@click.option("--core", type=int, help="This core alone.")
@click.option("--drop", metavar="NAME", help="Unregister this subscriber; what it has not taken is let go.")
@json_option
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
            print_json({"dropped": [_subscriber_object(number, each) for number, each in gone]})
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
        print_json({"subscribers": [_subscriber_object(number, each) for number, each in found]})
        return
    headers = ("core", "subscriber", "state", "mark", "pending", "gaps", "lag", "acked", "nacked", "lost")
    if found:
        print_table(headers, [_subscriber_row(*each) for each in found], right=(0, 3, 4, 5, 6, 7, 8, 9))
    else:
        click.echo("no subscribers")


def _subscriber_row(core: int, one: Subscriber) -> tuple[str, ...]:
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


def _subscriber_object(core: int, one: Subscriber) -> dict[str, object]:
    return {"core": core} | dataclasses.asdict(one) | {"state": one.state.name.lower()}


@click.command()
@click.argument("path")
@click.option("--core", type=int, help="This core alone.")
@click.option("--repair", "mend", is_flag=True, help="Set damaged files aside and go on without them.")
@json_option
def fsck(path: str, core: int | None, mend: bool, as_json: bool) -> int:
    """Check log, segments and acknowledgements of the data directory PATH against their checksums.

    Without --repair nothing is changed, and it may run beside the writer. With it the writer must not run:
    damaged files go to quarantine/ before anything is changed. Exits with 5 if a problem is left.
    """
    fs = OsFileSystem()
    cores = chosen_cores(path, core)
    done: list[str] = []
    with Progress() as progress:
        if mend:
            for number, directory in cores:
                done += [f"core {number}: {text}" for text in repair(fs, directory)]
        checked = [check(fs, number, directory, progress.show) for number, directory in cores]
    problems = sum(len(each.problems) for each in checked)
    if as_json:
        running = [number for number, directory in cores if is_in_use(fs, directory)]
        print_json(_fsck_object(path, checked, done, running))
    else:
        _print_fsck(path, checked, done)
    return ExitCode.CORRUPT if problems else ExitCode.OK


def _print_fsck(path: str, checked: list[CheckedCore], done: list[str]) -> None:
    for text in done:
        click.echo(f"{click.style('repaired', fg='green')} {text}")
    findings = [finding for each in checked for finding in each.findings]
    for finding in sorted(findings, key=lambda finding: finding.severity is Severity.NOTE):
        text = f"core {finding.core}: {finding.subject}: {finding.text}"
        print_finding(finding.severity.value, text, finding.advice)
    count = sum(len(each.problems) for each in checked)
    verdict = f"{count} problem{'s' * (count != 1)} found" if count else "clean"
    totals = [
        f"{sum(each.segments for each in checked)} segments",
        f"{sum(each.items for each in checked)} items",
        f"{format_size(sum(each.byte_count for each in checked))}",
        f"{sum(each.log_entries for each in checked)} entries in the log",
        f"{sum(each.subscribers for each in checked)} subscribers",
    ]
    click.echo(f"{verdict}: {', '.join(totals)} in {path}")


def _fsck_object(
    path: str, checked: list[CheckedCore], done: list[str], running: list[int]
) -> dict[str, object]:
    return {
        "directory": path,
        "clean": not any(each.problems for each in checked),
        "repaired": done,
        "running_cores": running,
        "cores": [_core_object(each) for each in checked],
    }


def _core_object(core: CheckedCore) -> dict[str, object]:
    findings = [
        {
            "severity": finding.severity,
            "core": finding.core,
            "subject": finding.subject,
            "text": finding.text,
            "advice": finding.advice,
        }
        for finding in core.findings
    ]
    return {**dataclasses.asdict(core), "findings": findings}
