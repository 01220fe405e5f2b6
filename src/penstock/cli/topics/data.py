"""`penstock topics serve`, `verify`, `backup` and `restore`: commands on a data directory."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from penstock.cli.base import Output, command
from penstock.cli.failure import ExitCode, needs
from penstock.cli.output import Progress, print_finding, print_pairs, time_text
from penstock.findings import Severity
from penstock.storage import FileSystem, OsFileSystem
from penstock.units import format_size

if TYPE_CHECKING:
    from penstock.topics import BackupManifest, FileFinding, SegmentRoot, VerifyReport

_LOG = logging.getLogger(__name__)

_ENVIRONMENT = """\b
Environment (the defaults are for one machine):
  TOPICS_HOST, TOPICS_PORT        127.0.0.1 and 4000; port 0 takes a free one
  TOPICS_PORT_FILE                the file to write host:port to once it listens
  TOPICS_DATA_DIR                 ./topics-data
  TOPICS_COLD_DIR                 a directory or a store URL for old segments
  TOPICS_API_KEYS                 key[:scopes[:prefixes]],…
  TOPICS_PROBE_AUTH               1 requires a key for health and ready, too
  TOPICS_ALLOW_INSECURE_NO_AUTH   1 lets other machines connect without a key
  TOPICS_ALLOWED_HOSTS            without keys: additional host names of this server
                                  and of web pages that may use it, separated by
                                  commas; * for any
  TOPICS_WAL_SHARDS, TOPICS_SEGMENT_MAX_EVENTS, …_BYTES, …_AGE_MS,
  TOPICS_HOT_RETAIN_SEGMENTS, …_BYTES, TOPICS_MAX_BODY_BYTES, TOPICS_MAX_TOPICS,
  TOPICS_MAX_ROUTERS, TOPICS_MAX_WATCH_SESSIONS, TOPICS_MAX_SSE_CONNECTIONS,
  TOPICS_MAX_SSE_CONNECTIONS_PER_KEY, TOPICS_MAX_INFLIGHT_PER_KEY,
  TOPICS_MAX_TOTAL_BYTES, TOPICS_LOG
"""


@click.command(epilog=_ENVIRONMENT)
def serve() -> int:
    """Serve topics over HTTP until SIGTERM or Ctrl-C.

    The port is open from the start; until the log is replayed, requests get 503. A stop waits at most ten
    seconds for running requests, and ends with exit code 0.
    """
    with needs("the server", extras="topics"):
        from penstock.http import run, settle
        from penstock.servers import ServerSettings, serve_topics, unknown_variables
    from penstock.topics import Engine

    settings = ServerSettings.from_env(os.environ)
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    for warning in unknown_variables(os.environ):
        _LOG.warning("%s", warning)

    async def main(stop: asyncio.Event) -> None:
        await serve_topics(settings, Engine(settings.engine), stop, on_bound=_log_address, on_ready=settle)

    run(main)
    return ExitCode.OK


def _log_address(host: str, port: int) -> None:
    name = f"[{host}]" if ":" in host else host
    _LOG.info("listening on http://%s:%d", name, port)


cold_option = click.option(
    "--cold",
    envvar="TOPICS_COLD_DIR",
    metavar="PLACE",
    help="The directory or store of old segments; by default TOPICS_COLD_DIR.",
)


@contextmanager
def open_cold(place: str | None, fs: FileSystem) -> Iterator[SegmentRoot | None]:
    """Open the cold tier and close it at the end; yield None if there is none."""
    if not place:
        yield None
        return
    from penstock.topics import open_cold_store

    tier = open_cold_store(place, fs)
    try:
        yield tier
    finally:
        tier.close()


@command()
@click.argument("data_dir", type=click.Path(file_okay=False))
@cold_option
def verify(data_dir: str, cold: str | None, out: Output) -> int:
    """Check the snapshots, segments and log of DATA_DIR, or of a backup, and name damaged files and bytes.

    Changes nothing and may run next to the server. Records in the cold tier are checked only with --cold.
    Exits with 5 if anything is damaged.
    """
    from penstock.topics import is_in_use
    from penstock.topics import verify as verify_directory

    fs = OsFileSystem()
    directory = os.path.abspath(data_dir)
    with Progress() as progress, open_cold(cold, fs) as tier:
        report = verify_directory(fs, directory, cold=tier, on_progress=progress.show)
    document = _report_object(report, running=is_in_use(fs, directory))
    out.show(document, lambda: _print_findings(report))
    return ExitCode.CORRUPT if report.problems else ExitCode.OK


def _print_findings(report: VerifyReport) -> None:
    from penstock.topics import pluralise

    for finding in sorted(report.findings, key=lambda finding: finding.severity is Severity.NOTE):
        advice = None if finding.topic is None else _lost(finding)
        print_finding(finding.severity.value, str(finding), advice)
    count = len(report.problems)
    verdict = f"{pluralise(count, 'problem')} found" if count else "clean"
    parts = [
        pluralise(report.topics, "topic"),
        f"{pluralise(report.stored_records, 'record')} in segments",
        f"{pluralise(report.log_frames, 'frame')} in the log",
        f"{format_size(report.bytes)} in {report.directory}",
    ]
    click.echo(f"{verdict}: {', '.join(parts)}")


def _lost(finding: FileFinding) -> str:
    if finding.first_seq == finding.last_seq:
        return f"record {finding.first_seq} of {finding.topic}"
    return f"records {finding.first_seq} to {finding.last_seq} of {finding.topic}"


def _report_object(report: VerifyReport, *, running: bool) -> dict[str, object]:
    return {
        "directory": report.directory,
        "clean": not report.problems,
        "server_running": running,
        "files": report.files,
        "bytes": report.bytes,
        "topics": report.topics,
        "stored_records": report.stored_records,
        "log_frames": report.log_frames,
        "findings": [_finding_object(finding) for finding in report.findings],
    }


def _finding_object(finding: FileFinding) -> dict[str, object]:
    return {
        "severity": finding.severity,
        "path": finding.subject,
        "text": finding.text,
        "start": finding.start,
        "end": finding.end,
        "topic": finding.topic,
        "first_seq": finding.first_seq,
        "last_seq": finding.last_seq,
    }


@command()
@click.argument("data_dir", type=click.Path(file_okay=False))
@click.argument("target", type=click.Path(file_okay=False))
@cold_option
def backup(data_dir: str, target: str, cold: str | None, out: Output) -> None:
    """Copy a consistent snapshot of DATA_DIR to TARGET, a new or empty directory; the server may run.

    Records in the cold tier are also copied. TARGET/backup.json is written when the copy is complete and
    verified.
    """
    from penstock.topics import backup as back_up

    fs = OsFileSystem()
    with Progress() as progress, open_cold(cold, fs) as tier:
        manifest = back_up(
            fs, os.path.abspath(data_dir), os.path.abspath(target), cold=tier, on_progress=progress.show
        )
    _show_manifest(out, manifest, target, "backup complete")


def _show_manifest(out: Output, manifest: BackupManifest, directory: str, what: str) -> None:
    document = {
        "directory": directory,
        "created_ms": manifest.created_ms,
        "snapshot": manifest.snapshot,
        "topics": manifest.topics,
        "files": len(manifest.files),
        "bytes": manifest.bytes,
    }
    pairs = [
        ("taken at", time_text(manifest.created_ms)),
        ("snapshot", f"{manifest.snapshot}" if manifest.snapshot else "none: everything is in the log"),
        ("files", f"{len(manifest.files):,}, {format_size(manifest.bytes)}"),
    ]
    out.show(document, lambda: print_pairs(pairs, f"{directory}: {what}"))


@command()
@click.argument("backup", type=click.Path(file_okay=False))
@click.argument("data_dir", type=click.Path(file_okay=False))
def restore(backup: str, data_dir: str, out: Output) -> None:
    """Restore BACKUP into DATA_DIR, a new or empty directory, from which a server can then be started.

    Every file is verified before anything is put in place.
    """
    from penstock.topics import restore as put_back

    with Progress() as progress:
        manifest = put_back(
            OsFileSystem(), os.path.abspath(backup), os.path.abspath(data_dir), on_progress=progress.show
        )
    _show_manifest(out, manifest, data_dir, "restored")
