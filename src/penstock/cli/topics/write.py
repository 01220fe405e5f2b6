"""`penstock topics write`: lines of JSON in, records out, and an account of every line."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import click
import msgspec

from penstock.cli.failure import ExitCode
from penstock.cli.input import Lines, open_source, read_chunks
from penstock.cli.output import Progress, print_json, print_pairs
from penstock.cli.signals import LoopStop, signal_code
from penstock.cli.topics.client import Server, report_error, server_options
from penstock.errors import InvalidInput, OutcomeUnknown, PenstockError
from penstock.jsontext import check_json
from penstock.topics import BATCH_RECORDS_MAX, Client, NewRecord, pluralise
from penstock.units import format_count, format_duration, format_size

BATCH_BYTES: Final = 8 * 1024**2
"""Well below what a server takes in one request, and enough to make the request not matter."""


class _Envelope(msgspec.Struct):
    data: msgspec.Raw
    tag: str | None = None
    node: str | None = None
    meta: msgspec.Raw = msgspec.Raw(b"null")
    shown_tag: str | None = msgspec.field(name="$tag", default=None)
    shown_node: str | None = msgspec.field(name="$node", default=None)


class _Tombstone(msgspec.Struct):
    reason: str = "unknown"
    gap_from: int | None = None
    gap_to: int | None = None

    @property
    def gone(self) -> str:
        if self.reason == "recreated" or self.gap_from is None:
            return f"records that are gone ({self.reason})"
        return f"records {self.gap_from} to {self.gap_to}, which are gone ({self.reason})"


class _Gap(msgspec.Struct):
    """What `diff --json` prints where records are gone."""

    tombstone: _Tombstone
    data: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_ANY: Final = msgspec.json.Decoder(msgspec.Raw)
_ENVELOPE: Final = msgspec.json.Decoder(_Envelope)
_GAP: Final = msgspec.json.Decoder(_Gap)
_NULL: Final = b"null"
_TOMBSTONE: Final = b'"tombstone"'


@dataclass(slots=True, kw_only=True)
class Batch:
    """Records of one write. `first_line` is where they begin in the input, pluralise from 1."""

    first_line: int
    records: list[NewRecord] = field(default_factory=list)
    size: int = 0


class Batcher:
    """Cuts lines into batches by count and by size. Blank lines are passed over.

    Among envelopes a tombstone is no record: `on_gap` gets its line and what is gone.
    """

    def __init__(
        self,
        *,
        records_max: int,
        envelope: bool,
        on_gap: Callable[[int, str], None] = lambda line, gone: None,
    ) -> None:
        self._on_gap = on_gap
        self._records_max = records_max
        self._envelope = envelope
        self._line = 0
        self.next_line = 1
        """The first line that is in no batch so far."""
        self._open: Batch | None = None

    def add(self, lines: Sequence[bytes]) -> Iterator[Batch]:
        """The batches that these lines fill. Raises `InvalidInput`, which names the line.

        The lines before a bad one come as a batch first: they are good, and in order.
        """
        for line in lines:
            self._line += 1
            if not line.strip() or self._is_gap(line):
                continue
            try:
                record = self._record(line)
            except InvalidInput:
                yield from self.flush()
                self.next_line = self._line
                raise
            yield from self._put(record, len(line))

    def flush(self) -> Iterator[Batch]:
        """What is left, if anything."""
        if self._open is not None:
            batch, self._open = self._open, None
            self.next_line = self._line + 1
            yield batch

    def _put(self, record: NewRecord, size: int) -> Iterator[Batch]:
        if self._open is not None and self._open.size + size > BATCH_BYTES:
            yield from self.flush()
        if self._open is None:
            self._open = Batch(first_line=self._line)
        self._open.records.append(record)
        self._open.size += size
        if len(self._open.records) >= self._records_max:
            yield from self.flush()

    def _is_gap(self, line: bytes) -> bool:
        if not self._envelope or _TOMBSTONE not in line:
            return False
        try:
            gap = _GAP.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return False
        if gap.data is not msgspec.UNSET:
            return False
        self._on_gap(self._line, gap.tombstone.gone)
        return True

    def _record(self, line: bytes) -> NewRecord:
        check_json(line, f"line {self._line:,} of the input")
        try:
            if not self._envelope:
                return NewRecord(data=_ANY.decode(str(line, "utf-8")))
            told = _ENVELOPE.decode(str(line, "utf-8"))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            wanted = "an object with data" if self._envelope else "a JSON value"
            raise InvalidInput(f"line {self._line:,} of the input is not {wanted}: {error}") from error
        return NewRecord(
            data=told.data,
            tag=told.shown_tag if told.tag is None else told.tag,
            node=told.shown_node if told.node is None else told.node,
            meta=None if bytes(told.meta).strip() == _NULL else told.meta,
        )


@dataclass(slots=True, kw_only=True)
class _Account:
    """What became of the lines so far."""

    written: int = 0
    written_bytes: int = 0
    unknown: int = 0
    first_seq: int | None = None
    last_seq: int | None = None
    not_written_from: int | None = None
    """Line, pluralise from 1, of the first record that is not known to be written."""
    error: PenstockError | None = None
    stopped_by: signal.Signals | None = None


@click.command()
@click.argument("topic")
@server_options
@click.option("--file", "path", default="-", metavar="FILE", help="What to read; - is standard input.")
@click.option(
    "--batch-records",
    type=click.IntRange(min=1, max=BATCH_RECORDS_MAX),
    default=1000,
    show_default=True,
    help="Records of one write; each write is applied as a whole.",
)
@click.option("--tag", metavar="TEXT", help="The tag of records that have none.")
@click.option("--node", metavar="NAME", help="Who writes; readers of that name skip their own records.")
@click.option(
    "--envelope",
    is_flag=True,
    help="Each line is an object with data and perhaps tag, node and meta, as `diff --json` prints it.",
)
@click.option("--no-create", is_flag=True, help="Fail if the topic does not exist.")
def write(
    topic: str,
    server: Server,
    as_json: bool,
    path: str,
    batch_records: int,
    tag: str | None,
    node: str | None,
    envelope: bool,
    no_create: bool,
) -> int:
    """Append the lines of a file, or of standard input, to TOPIC: each line is one JSON value.

    Writes one batch after the other, so the order of the lines is kept, and stops at the first failure.
    Ctrl-C or SIGTERM stops reading; what was read is still written. Exits with 0 only if every record is.
    """
    options = _Options(tag=tag, node=node, create=False if no_create else None)
    batcher = Batcher(records_max=batch_records, envelope=envelope, on_gap=_print_gap)
    with Progress() as progress:
        source = open_source(path)
        account = server.run(lambda client: _write(client, topic, source, batcher, options, progress))
        elapsed_s = progress.elapsed_s
    return _report(topic, account, elapsed_s, as_json)


def _print_gap(line: int, gone: str) -> None:
    click.echo(f"gap: line {line:,} of the input tells of {gone}; there is nothing to write", err=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    tag: str | None
    node: str | None
    create: bool | None


async def _write(
    client: Client, topic: str, descriptor: int, batcher: Batcher, options: _Options, progress: Progress
) -> _Account:
    account = _Account()
    stop = asyncio.Event()
    stopping = LoopStop(stop.set)
    try:
        async for batch in _batches(descriptor, batcher, stop):
            await _send(client, topic, batch, options, account)
            if account.error is not None:
                break
            size = format_size(account.written_bytes)
            progress.show(f"{format_count(account.written)} records written, {size}")
    except PenstockError as error:
        account.error = error
        account.not_written_from = batcher.next_line
    account.stopped_by = stopping.first
    return account


async def _batches(descriptor: int, batcher: Batcher, stop: asyncio.Event) -> AsyncIterator[Batch]:
    """Full batches, and a short one whenever the input pauses at the end of a chunk."""
    lines = Lines()
    async for chunk in read_chunks(descriptor, stop):
        for batch in batcher.add(lines.feed(chunk)):
            yield batch
        for batch in batcher.flush():
            yield batch
    if not stop.is_set():
        for batch in [*batcher.add(lines.finish()), *batcher.flush()]:
            yield batch


async def _send(client: Client, topic: str, batch: Batch, options: _Options, account: _Account) -> None:
    try:
        result = await client.write(
            topic, batch.records, tag=options.tag, node=options.node, create=options.create
        )
    except PenstockError as error:
        account.error = error
        account.not_written_from = batch.first_line
        account.unknown = len(batch.records) if isinstance(error, OutcomeUnknown) else 0
        return
    account.written += len(batch.records)
    account.written_bytes += batch.size
    account.first_seq = account.first_seq or result.first_seq
    account.last_seq = result.last_seq


def _report(topic: str, account: _Account, elapsed_s: float, as_json: bool) -> int:
    rate = account.written / elapsed_s if elapsed_s > 0 else 0.0
    if as_json:
        print_json(
            {
                "topic": topic,
                "written": account.written,
                "written_bytes": account.written_bytes,
                "unknown": account.unknown,
                "not_written_from_line": account.not_written_from,
                "first_seq": account.first_seq,
                "last_seq": account.last_seq,
                "seconds": round(elapsed_s, 3),
                "stopped_by": None if account.stopped_by is None else account.stopped_by.name,
            }
        )
    else:
        print_pairs(_account_pairs(account, elapsed_s, rate), topic)
    return _complain(account)


def _account_pairs(account: _Account, elapsed_s: float, rate: float) -> list[tuple[str, str]]:
    sequences = "-" if account.first_seq is None else f"{account.first_seq}-{account.last_seq}"
    return [
        ("written", f"{pluralise(account.written, 'record')}, {format_size(account.written_bytes)}"),
        ("sequences", sequences),
        ("rate", f"{format_count(round(rate))} records/s over {format_duration(elapsed_s)}"),
    ]


def _complain(account: _Account) -> int:
    if account.error is not None:
        click.echo(f"nothing from line {account.not_written_from:,} on is known to be written", err=True)
        if account.unknown:
            click.echo(
                f"its batch of {pluralise(account.unknown, 'record')} may be there all the same", err=True
            )
        return report_error(account.error)
    if account.stopped_by is not None:
        click.echo(f"stopped by {account.stopped_by.name}: the input was not read to its end", err=True)
        return signal_code(account.stopped_by)
    return ExitCode.OK
