"""What a writer hands over, checked and encoded before anything is asked of the disk."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import pyarrow as pa

from penstock.errors import InvalidInput
from penstock.quiver.model import Pending, Signal
from penstock.quiver.slots import flat_slot, slot_name
from penstock.quiver.wal_entry import SlotPart, entry_bytes
from penstock.quiver.wal_payload import encode_part

__all__ = ["Batches", "Prepared", "Receipt", "prepare", "raw_batch"]

Batches: TypeAlias = pa.RecordBatch | Mapping[int, pa.RecordBatch]
"""One batch, or one for each of several slots."""

_ENDS: Final = struct.Struct("=ii")
_RAW: Final = pa.schema([pa.field("data", pa.binary(), nullable=False)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What was accepted: its number in the log, when it came in, its rows and its bytes."""

    wal_seq: int
    ingest_ns: int
    items: int
    byte_count: int


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A bundle that is encoded: its batches by ascending slot, and their parts of the entry."""

    batches: Sequence[pa.RecordBatch]
    parts: Sequence[SlotPart]
    byte_count: int

    @classmethod
    def of(cls, batches: Sequence[pa.RecordBatch], parts: Sequence[SlotPart]) -> Prepared:
        """Raises `LimitExceeded` for more than an entry may have."""
        return cls(batches, parts, entry_bytes(parts))

    def pending(self, receipt: Receipt, start: int, end: int) -> list[Pending]:
        return [
            Pending(
                slot=part.slot,
                batch=batch,
                fingerprint=part.fingerprint,
                ingest_ns=receipt.ingest_ns,
                wal_seq=receipt.wal_seq,
                wal_start=start,
                wal_end=end,
                byte_count=part.byte_count,
            )
            for batch, part in zip(self.batches, self.parts, strict=True)
        ]


def prepare(data: Batches, *, signal: Signal | str | None = None, slot: int | None = None) -> Prepared:
    """Encode a bundle. A single batch goes into `slot`, or into the flat one of its `signal`.

    Raises `InvalidInput` for what is no batch or has no slot, `LimitExceeded` for more than an entry holds.
    """
    batches = _by_slot(data, signal, slot)
    for number, batch in batches:
        slot_name(number)
        if not isinstance(batch, pa.RecordBatch):
            raise InvalidInput(f"slot {number} takes a pyarrow.RecordBatch, not {type(batch).__name__}")
    return Prepared.of([batch for _, batch in batches], [encode_part(*one) for one in batches])


def raw_batch(data: bytes) -> pa.RecordBatch:
    """A request as it came, as one row that refers to it."""
    ends = pa.py_buffer(_ENDS.pack(0, len(data)))
    column = pa.Array.from_buffers(pa.binary(), 1, [None, ends, pa.py_buffer(data)], null_count=0)
    return pa.RecordBatch.from_arrays([column], schema=_RAW)


def _by_slot(
    data: Batches, signal: Signal | str | None, slot: int | None
) -> list[tuple[int, pa.RecordBatch]]:
    if isinstance(data, Mapping):
        if slot is not None or not data:
            raise InvalidInput("a bundle of several slots names them itself, and has at least one")
        return sorted(data.items())
    if slot is not None:
        return [(slot, data)]
    return [(flat_slot(_signal(signal)), data)]


def _signal(signal: Signal | str | None) -> Signal:
    if signal is None:
        return Signal.OTHER
    try:
        return Signal(signal)
    except ValueError:
        names = ", ".join(one.value for one in Signal)
        raise InvalidInput(f"signal is one of {names}, not {signal!r}") from None
