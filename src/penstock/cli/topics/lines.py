"""Lines of JSON as records, in batches that one write can take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from penstock.errors import InvalidInput
from penstock.jsontext import check_json
from penstock.topics import NewRecord

__all__ = ["BATCH_BYTES", "Batch", "Batcher"]

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
    """Records of one write. `first_line` is where they begin in the input, counted from 1."""

    first_line: int
    records: list[NewRecord] = field(default_factory=list)
    size: int = 0


class Batcher:
    """Cuts lines into batches by count and by size. Blank lines are passed over.

    Among envelopes a tombstone is no record: `on_gap` is told its line and what is gone.
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
