"""`penstock quiver …`: inspect and maintain a data directory of Quiver."""

from __future__ import annotations

import dataclasses
import datetime as dt
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import click

from penstock.cli.base import Output, command, injected
from penstock.cli.failure import ExitCode
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

_BUNDLES_SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentChoice:
    """The segments that a command works on."""

    signal: str | None
    core: int | None
    since: str | None
    until: str | None

    def among(self, infos: list[SegmentInfo]) -> list[SegmentInfo]:
        """Return the segments that match the options. Raise `InvalidInput` for a malformed time."""
        from penstock.quiver import select  # imports Arrow's datasets, which most commands do not need

        chosen = select(infos, since=_moment(self.since, "--since"), until=_moment(self.until, "--until"))
        return [
            info
            for info in chosen
            if self.signal in (None, info.signal) and self.core in (None, info.core_id)
        ]


choice_options = injected(
    "choice",
    SegmentChoice,
    click.option("--signal", type=click.Choice([each.value for each in Signal]), help="Only this signal."),
    click.option("--core", type=int, help="Only this core."),
    click.option(
        "--since", metavar="TIME", help="From this time on: event time if there is one, else ingestion time."
    ),
    click.option("--until", metavar="TIME", help="Before this time, such as 2026-01-31T12:00:00Z."),
)


def open_place(place: str) -> SegmentSource:
    """Open the segments at PATH. Raise `NotFound` if it is not a directory."""
    if not is_store_url(place) and not os.path.isdir(place):
        raise NotFound(f"{place} is not a directory; name the data directory, the one with core_0 in it")
    return open_source(place)


def _moment(text: str | None, option: str) -> dt.datetime | None:
    if text is None:
        return None
    try:
        moment = dt.datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidInput(f"{option}: {text!r} is not a time; write it as 2026-01-31T12:00:00Z") from error
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=dt.UTC)


def chosen_cores(path: str, core: int | None) -> list[tuple[int, str]]:
    """Return the number and directory of each core below PATH, or of one core. Raise `NotFound`."""
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


@command()
@click.argument("path")
@choice_options
@click.option("--segment", type=int, help="Show this segment with its columns and bundles.")
@click.option("--verify", is_flag=True, help="Verify the checksum of every segment shown.")
def inspect(
    path: str,
    choice: SegmentChoice,
    segment: int | None,
    verify: bool,
    out: Output,
) -> int:
    """List the segments in the data directory PATH, or the uploaded segments in a store.

    Reads only, and may run next to the writer. Exits with 5 if anything is damaged.
    """
    source = open_place(path)
    infos = choice.among(source.infos())
    if segment is not None:
        return _show_segment(source, infos, segment, out)
    damage = {name: str(error) for name, error in source.damaged.items()}
    if verify:
        damage |= _verify(source, infos)
    document = {"segments": [dataclasses.asdict(info) for info in infos], "damaged": damage}
    out.show(document, lambda: _print_segments(path, infos, damage))
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
                continue  # the retention has removed it since
    return damage


def _print_segments(path: str, infos: list[SegmentInfo], damage: dict[str, str]) -> None:
    if infos:
        headers = ("core", "segment", "slot", "bundles", "items", "size", "ingested from", "to")
        print_table(headers, [_segment_row(info) for info in infos], right=(0, 1, 3, 4, 5))
    items, size = sum(info.item_count for info in infos), sum(info.file_size for info in infos)
    click.echo(f"{len(infos)} segments, {items} items, {format_size(size)} in {path}")
    for line in _damage_lines(damage):
        click.echo(line)


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


def _show_segment(source: SegmentSource, infos: list[SegmentInfo], seq: int, out: Output) -> int:
    found = [info for info in infos if info.seq == seq]
    if not found:
        raise NotFound(f"there is no segment {seq}; list them without --segment")
    if len(found) > 1:
        raise InvalidInput(f"every core has a segment {seq}; choose one with --core")
    reader = source.reader(found[0])
    out.show(_segment_object(found[0], reader), lambda: _print_segment(found[0], reader))
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


@command()
@click.argument("path")
@click.option("--parquet", "target", required=True, metavar="DIRECTORY", help="Directory for the files.")
@choice_options
@click.option(
    "--timestamps",
    type=click.Choice(["ns", "us", "ms"]),
    default="ns",
    show_default=True,
    help="The unit of times; use us for tools without nanoseconds, such as Spark.",
)
@click.option("--view", is_flag=True, help="Attributes as text, ids in hexadecimal, times in microseconds.")
def export(
    path: str,
    target: str,
    choice: SegmentChoice,
    timestamps: str,
    view: bool,
    out: Output,
) -> int:
    """Write each segment in the data directory PATH, or in a store, as a Parquet file.

    Only whole segments are written: those that overlap the given times. Existing files are kept, so an
    export can be resumed. Reads only, and may run next to the writer.
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
    lines = [f"{report.files} files, {report.rows} rows, {format_size(report.byte_count)} in {target}"]
    skipped = ((report.kept, "existed already"), (report.gone, "were removed meanwhile"))
    lines += [f"{count} {why}" for count, why in skipped if count]
    lines += _damage_lines(source.damaged)
    out.show(dataclasses.asdict(report) | {"damaged": sorted(source.damaged)}, "\n".join(lines))
    return ExitCode.CORRUPT if source.damaged else ExitCode.OK


def _damage_lines(damaged: Mapping[str, object]) -> list[str]:
    return [f"{click.style('damaged', fg='red')} {name}: {reason}" for name, reason in damaged.items()]


@command()
@click.argument("path")
@click.option("--core", type=int, help="Only this core.")
@click.option("--subscriber", metavar="NAME", help="Only this subscriber.")
@click.option("--segment", type=int, help="Only this segment.")
@click.option("--last", type=click.IntRange(min=1), help="Only the last N lines.")
def acks(
    path: str, core: int | None, subscriber: str | None, segment: int | None, last: int | None, out: Output
) -> None:
    """Print the acks of subscribers of the data directory PATH, oldest first, as far back as the log goes.

    Reads only, and may run next to the writer. A checkpoint removes older acks from the log;
    `penstock quiver subscribers` shows the resulting state.
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
    if out.is_json:
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


@command()
@click.argument("path")
@click.option("--core", type=int, help="Only this core.")
@click.option(
    "--drop", metavar="NAME", help="Remove this subscriber and release the data it has not acknowledged."
)
def subscribers(path: str, core: int | None, drop: str | None, out: Output) -> None:
    """List the subscribers of the data directory PATH, as stored on disk.

    A subscriber retains the data that it has not acknowledged, even if it is no longer used: --drop releases
    that data. Listing may run next to the writer and lags by what is not synced yet; dropping requires that
    no writer runs.
    """
    fs = OsFileSystem()
    chosen = chosen_cores(path, core)
    if drop is not None:
        gone = [(number, drop_subscriber(fs, directory, drop)) for number, directory in chosen]
        lines = (
            f"core {number}: dropped {each.name}, with {each.pending_segments} segments pending"
            for number, each in gone
        )
        out.show({"dropped": [_subscriber_object(*each) for each in gone]}, "\n".join(lines))
        return
    infos = open_place(path).infos()
    found = [
        (number, each)
        for number, directory in chosen
        for each in look_at_subscribers(fs, directory, [info for info in infos if info.core_id == number])
    ]
    out.show(
        {"subscribers": [_subscriber_object(*each) for each in found]}, lambda: _print_subscribers(found)
    )


def _print_subscribers(found: list[tuple[int, Subscriber]]) -> None:
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


@command()
@click.argument("path")
@click.option("--core", type=int, help="Only this core.")
@click.option(
    "--repair", "repairs", is_flag=True, help="Move damaged files to quarantine and continue without them."
)
def fsck(path: str, core: int | None, repairs: bool, out: Output) -> int:
    """Check the log, the segments and the acks in the data directory PATH against their checksums.

    Without --repair, nothing is changed and the writer may run. With --repair, the writer must not run:
    damaged files are moved to quarantine/ before anything is changed. Exits with 5 if a problem remains.
    """
    fs = OsFileSystem()
    cores = chosen_cores(path, core)
    done: list[str] = []
    with Progress() as progress:
        if repairs:
            for number, directory in cores:
                done += [f"core {number}: {text}" for text in repair(fs, directory)]
        checked = [check(fs, number, directory, progress.show) for number, directory in cores]
    problems = sum(len(each.problems) for each in checked)
    running = [number for number, directory in cores if is_in_use(fs, directory)]
    out.show(_fsck_object(path, checked, done, running), lambda: _print_fsck(path, checked, done))
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
