"""The batch that is being filled: which calls it holds, and when it must be stored. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.buffer.handle import DurabilityWatcher
from penstock.buffer.manifest import Metadata
from penstock.codec import RecordChunk
from penstock.limits import BATCH_BYTES_MAX

__all__ = ["BATCH_WEIGHT_MAX", "FRAMING_BYTES", "Call", "OpenBatch"]

BATCH_WEIGHT_MAX = BATCH_BYTES_MAX - 64
"""The most a batch may weigh and still decode under the default cap of a consumer."""

FRAMING_BYTES = 8
"""What a record costs besides its bytes, at most: its header and its place in the length table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One `produce` call, without its records: those are held apart, to be given on to the encoder."""

    count: int
    record_bytes: int
    metadata: bytes
    ingestion_time_ms: int
    accepted_at: float
    watcher: DurabilityWatcher

    @property
    def size(self) -> int:
        """What counts against the flush size: record and metadata bytes, without framing."""
        return self.record_bytes + len(self.metadata)

    @property
    def weight(self) -> int:
        """What it costs in memory and in the block: framing included."""
        return self.size + FRAMING_BYTES * self.count


@dataclass(slots=True, kw_only=True)
class OpenBatch:
    """Calls in order, with one metadata item each (or per run of equal ones, when merging).

    Its age is counted from `opened_at`, the moment the first call was taken into it. The calls themselves
    may be older: they waited while uploads were slow, and are all to be stored together.
    """

    ordinal: int
    opened_at: float = 0.0
    merge: bool = False
    calls: list[Call] = field(default_factory=list)
    metadata: list[Metadata] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    records: list[Sequence[bytes] | RecordChunk] = field(default_factory=list)
    count: int = 0
    size: int = 0
    record_bytes: int = 0
    weight: int = 0

    def add(self, call: Call, records: Sequence[bytes] | RecordChunk) -> None:
        """Take a call with its records: a chunk, or a few that will share one with their neighbours."""
        if not (self.merge and self._repeats(call)):
            self.metadata.append(
                Metadata(
                    start_index=self.count, ingestion_time_ms=call.ingestion_time_ms, payload=call.metadata
                )
            )
        self.calls.append(call)
        self.records.append(records)
        self.starts.append(self.count)
        self.count += call.count
        self.size += call.size
        self.record_bytes += call.record_bytes
        self.weight += call.weight

    def fits(self, call: Call) -> bool:
        """Whether the batch still decodes with this call in it."""
        return self.weight + call.weight <= BATCH_WEIGHT_MAX

    def is_due(self, now: float, flush_interval_s: float) -> bool:
        """Whether the batch has been open for the flush interval."""
        return bool(self.calls) and now - self.opened_at >= flush_interval_s

    def _repeats(self, call: Call) -> bool:
        return bool(self.metadata) and (
            self.metadata[-1].ingestion_time_ms == call.ingestion_time_ms
            and self.metadata[-1].payload == call.metadata
        )

    def take_chunks(self) -> list[RecordChunk]:
        """The records as chunks, small neighbours joined. The batch itself holds them no longer."""
        chunks: list[RecordChunk] = []
        loose: list[bytes] = []
        for records in self.records:
            if isinstance(records, RecordChunk):
                if loose:
                    chunks.append(RecordChunk.of_list(loose))
                    loose = []
                chunks.append(records)
            else:
                loose.extend(records)
        if loose:
            chunks.append(RecordChunk.of_list(loose))
        self.records.clear()
        return chunks
