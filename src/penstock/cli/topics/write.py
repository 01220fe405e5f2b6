"""`penstock topics write`: append lines of JSON as records, and account for every line."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import click
import msgspec

from penstock.cli.base import Output
from penstock.cli.failure import ExitCode
from penstock.cli.input import Lines, read_chunks, source_option
from penstock.cli.output import Progress, print_pairs
from penstock.cli.signals import LoopStop, signal_code
from penstock.cli.topics.client import report_error, topics_command
from penstock.errors import InvalidInput, OutcomeUnknown, PenstockError
from penstock.jsontext import check_json
from penstock.topics import BATCH_RECORDS_MAX, Client, NewRecord, WriteResult, pluralise
from penstock.units import format_count, format_duration, format_size

BATCH_BYTES: Final = 8 * 1024**2
"""Well below the limit of one request, and large enough to make the overhead of a request negligible."""
_ANY: Final = msgspec.json.Decoder(msgspec.Raw)
_NULL: Final = b"null"
_TOMBSTONE: Final = b'"tombstone"'


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
    """A gap as printed by `diff --json`."""

    tombstone: _Tombstone
    data: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_ENVELOPE: Final = msgspec.json.Decoder(_Envelope)
_GAP: Final = msgspec.json.Decoder(_Gap)


@dataclass(slots=True, kw_only=True)
class Batch:
    """The records of one write. `first_line` is the line number of the first record, counted from 1."""

    first_line: int
    records: list[NewRecord] = field(default_factory=list)
    size: int = 0


class Batcher:
    """Splits lines into batches by count and by size. Blank lines are skipped.

    A tombstone among envelopes is not a record: `on_gap` receives its line number and the missing records.
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
        """The number of the first line that is not in a batch yet."""
        self._open: Batch | None = None

    def add(self, lines: Sequence[bytes]) -> Iterator[Batch]:
        """Yield the batches that these lines complete. Raise `InvalidInput` naming an invalid line.

        The valid lines before an invalid one are yielded first.
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
        """Yield the incomplete batch, if there is one."""
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
            envelope = _ENVELOPE.decode(str(line, "utf-8"))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            expected = "an object with data" if self._envelope else "a JSON value"
            raise InvalidInput(f"line {self._line:,} of the input is not {expected}: {error}") from error
        return NewRecord(
            data=envelope.data,
            tag=envelope.shown_tag if envelope.tag is None else envelope.tag,
            node=envelope.shown_node if envelope.node is None else envelope.node,
            meta=None if bytes(envelope.meta).strip() == _NULL else envelope.meta,
        )


@dataclass(slots=True, kw_only=True)
class _Account:
    """The results so far."""

    written: int = 0
    written_bytes: int = 0
    unknown: int = 0
    first_seq: int | None = None
    last_seq: int | None = None
    not_written_from: int | None = None
    """The line number, counted from 1, of the first record that may not be written."""
    error: PenstockError | None = None
    stopped_by: signal.Signals | None = None


@topics_command()
@click.argument("topic")
@source_option
@click.option(
    "--batch-records",
    type=click.IntRange(min=1, max=BATCH_RECORDS_MAX),
    default=1000,
    show_default=True,
    help="Records per write; each write is atomic.",
)
@click.option("--tag", metavar="TEXT", help="The tag of records that have none.")
@click.option("--node", metavar="NAME", help="The writer; readers of that name skip the record.")
@click.option(
    "--envelope",
    is_flag=True,
    help="Each line is an object with data and optionally tag, node and meta, as `diff --json` prints it.",
)
@click.option("--no-create", is_flag=True, help="Fail if the topic does not exist.")
async def write(
    client: Client,
    out: Output,
    topic: str,
    source: int,
    batch_records: int,
    tag: str | None,
    node: str | None,
    envelope: bool,
    no_create: bool,
) -> int:
    """Append the lines of a file, or of standard input, to TOPIC: each line is one JSON value.

    Batches are written one after the other, which keeps the order of the lines; the first failure stops the
    command. Ctrl-C or SIGTERM stops reading; what was read is still written. Exits with 0 only if every
    record is written.
    """
    send = partial(client.write, topic, tag=tag, node=node, create=False if no_create else None)
    batcher = Batcher(records_max=batch_records, envelope=envelope, on_gap=_print_gap)
    account, stop = _Account(), asyncio.Event()
    with Progress() as progress:
        stopping = LoopStop(stop.set)
        try:
            async for batch in _batches(source, batcher, stop):
                await _send(send, batch, account)
                if account.error is not None:
                    break
                size = format_size(account.written_bytes)
                progress.show(f"{format_count(account.written)} records written, {size}")
        except PenstockError as error:
            account.error = error
            account.not_written_from = batcher.next_line
        account.stopped_by = stopping.first
        elapsed_s = progress.elapsed_s
    out.show(
        _account_document(topic, account, elapsed_s),
        lambda: print_pairs(_account_pairs(account, elapsed_s), topic),
    )
    return _report_failure(account)


def _print_gap(line: int, missing: str) -> None:
    click.echo(f"gap: line {line:,} of the input represents {missing}; nothing is written", err=True)


async def _batches(descriptor: int, batcher: Batcher, stop: asyncio.Event) -> AsyncIterator[Batch]:
    """Yield full batches, and a short one whenever the input pauses at the end of a chunk."""
    lines = Lines()
    async for chunk in read_chunks(descriptor, stop):
        for batch in batcher.add(lines.feed(chunk)):
            yield batch
        for batch in batcher.flush():
            yield batch
    if not stop.is_set():
        for batch in [*batcher.add(lines.finish()), *batcher.flush()]:
            yield batch


async def _send(
    send: Callable[[Sequence[NewRecord]], Awaitable[WriteResult]], batch: Batch, account: _Account
) -> None:
    try:
        result = await send(batch.records)
    except PenstockError as error:
        account.error = error
        account.not_written_from = batch.first_line
        account.unknown = len(batch.records) if isinstance(error, OutcomeUnknown) else 0
        return
    account.written += len(batch.records)
    account.written_bytes += batch.size
    account.first_seq = account.first_seq or result.first_seq
    account.last_seq = result.last_seq


def _account_document(topic: str, account: _Account, elapsed_s: float) -> dict[str, object]:
    return {
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


def _account_pairs(account: _Account, elapsed_s: float) -> list[tuple[str, str]]:
    sequences = "-" if account.first_seq is None else f"{account.first_seq}-{account.last_seq}"
    rate = account.written / elapsed_s if elapsed_s > 0 else 0.0
    return [
        ("written", f"{pluralise(account.written, 'record')}, {format_size(account.written_bytes)}"),
        ("sequences", sequences),
        ("rate", f"{format_count(round(rate))} records/s over {format_duration(elapsed_s)}"),
    ]


def _report_failure(account: _Account) -> int:
    if account.error is not None:
        click.echo(f"lines from {account.not_written_from:,} on may not be written", err=True)
        if account.unknown:
            click.echo(f"the batch of {pluralise(account.unknown, 'record')} may have been written", err=True)
        return report_error(account.error)
    if account.stopped_by is not None:
        click.echo(f"stopped by {account.stopped_by.name}: the input was not read to its end", err=True)
        return signal_code(account.stopped_by)
    return ExitCode.OK
