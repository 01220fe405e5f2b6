"""The objects beside the manifest: the garbage floor, the dequeued log and dead letters.

Only the functions for dead letters do I/O.

The garbage floor (`.floor`) proves that an unreferenced batch can never be appended again.

Age alone does not make a batch garbage: its producer may have stalled, or its clock may be wrong. The
collector therefore publishes a floor in a side object and then changes the manifest's epoch, in this order:

    1. collector   floor := F                      (conditional, never lowered)
    2. collector   manifest epoch := E + stride    (conditional: loses if anything was appended in between)
    3. collector   deletes batches at or below F that are not in the manifest it wrote in 2
    a. producer    reads the manifest, epoch X
    b. producer    reads the floor, unless it already read it under epoch X
    c. producer    re-uploads batches at or below the floor under new names
    d. producer    conditional write on the manifest of a

Suppose d succeeds after 2 with a batch at or below F. Then the manifest of a carried an epoch that became
visible at 2 or later, so b came after 1 and saw F, and c renamed the batch: a contradiction. If d succeeds
before 2, the batch is in the manifest of 2 and 3 spares it. No clock is part of the argument.

`sealed_ms` is the highest floor known to have passed step 2. Any collector may delete at or below it.

The dequeued log (`.ledger`) lists the locations that were dequeued recently, so that a producer can learn
that its append landed. The consumer writes it *before* it dequeues. It has the format of the manifest and
contains the last entries that left the queue, without metadata. An entry stays true, because an assigned
number never changes its location. So even a fenced consumer cannot write a wrong one. The log is replaced
conditionally, so a fenced consumer cannot remove entries either. Only the limit of its length removes them.

Dead letters (`.dead/`) are batches that were set aside because they are missing or do not decode. Each has a
JSON record, and a copy of its bytes if there are any. Both are stored before the consumer continues, because
the batch object itself is deleted as garbage after it is dequeued.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from penstock.buffer import manifest
from penstock.buffer.batch import is_own
from penstock.buffer.errors import SerializationError
from penstock.buffer.manifest import Footer, NewEntry
from penstock.objects import ObjectStore

EPOCH_STRIDE = 1000
"""The step by which a consumer changes its own epoch to seal a floor. A new consumer changes it by 1. After
an unknown outcome the value therefore shows which of the two wrote it."""

_MS_END = 2**48  # the milliseconds of a batch name have 48 bits

DEQUEUED_LOG_ENTRIES = 4096
"""The entries that the dequeued log keeps: about 250 KiB, or hours of appends by one producer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The garbage floor: batches minted at or before `floor_ms` must not be appended. -1 means no floor."""

    floor_ms: int
    sealed_ms: int

    def raised(self, floor_ms: int, sealed_ms: int) -> Floor:
        """Return the floor raised to these values. It is never lowered."""
        return Floor(floor_ms=max(self.floor_ms, floor_ms), sealed_ms=max(self.sealed_ms, sealed_ms))


NO_FLOOR = Floor(floor_ms=-1, sealed_ms=-1)


class _StoredFloor(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    floor_ms: int
    sealed_ms: int


def write_floor(floor: Floor) -> bytes:
    return msgspec.json.encode(_StoredFloor(version=1, floor_ms=floor.floor_ms, sealed_ms=floor.sealed_ms))


def read_floor(raw: bytes) -> Floor:
    """Decode the floor. Raise `SerializationError` if it is damaged.

    Nothing may be appended or collected while the floor is unreadable.
    """
    try:
        stored = msgspec.json.decode(raw, type=_StoredFloor)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SerializationError(f"the garbage floor is damaged: {error}") from error
    if stored.version != 1:
        raise SerializationError(f"garbage floor version {stored.version} is unknown")
    if not all(-1 <= ms < _MS_END for ms in (stored.floor_ms, stored.sealed_ms)):
        raise SerializationError(f"the garbage floor lies at {stored.floor_ms}, beyond any batch name")
    return Floor(floor_ms=stored.floor_ms, sealed_ms=stored.sealed_ms)


_EMPTY = Footer(entry_count=0, next_sequence=0, epoch=0).pack()


@dataclass(frozen=True, slots=True)
class DequeuedLog:
    """The stored bytes of the dequeued log, and its content. `after` does not encode old entries again."""

    raw: bytes = _EMPTY
    known: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def read(cls, raw: bytes) -> DequeuedLog:
        """Decode the log. Raises `SerializationError`."""
        return cls(raw, dict(manifest.index(raw).locations()))

    def after(self, removed: Sequence[tuple[int, str]], *, epoch: int) -> DequeuedLog:
        """Return the dequeued log after `removed` (ascending) left the queue.

        Only the last `DEQUEUED_LOG_ENTRIES` are kept. Numbers in the format rise by one, so entries before a
        gap are dropped too.
        """
        following = manifest.read_footer(self.raw).next_sequence
        if not removed:
            return DequeuedLog(manifest.set_epoch(self.raw, epoch), self.known)
        numbers = [sequence for sequence, _ in removed]
        if numbers != list(range(numbers[0], numbers[0] + len(numbers))) or (
            self.known and numbers[0] != following
        ):
            return _merged(self.known, removed, epoch=epoch)
        dropped = max(0, len(self.known) + len(removed) - DEQUEUED_LOG_ENTRIES)
        if not self.known or dropped >= len(self.known):
            return _merged({}, removed, epoch=epoch)
        oldest = following - len(self.known)
        kept = manifest.dequeue(self.raw, oldest + dropped - 1) if dropped else self.raw
        added = [NewEntry(location=location, metadata=()) for _, location in removed]
        known = {**self.known, **dict(removed)}
        for sequence in range(oldest, oldest + dropped):
            del known[sequence]
        return DequeuedLog(manifest.set_epoch(manifest.append(kept, added), epoch), known)


def read_dequeued_log(raw: bytes) -> dict[int, str]:
    """Decode the dequeued log as sequence to location. Raises `SerializationError`."""
    return dict(manifest.index(raw).locations())


def encode_dequeued_log(
    known: Mapping[int, str], removed: Sequence[tuple[int, str]], *, epoch: int
) -> tuple[bytes, dict[int, str]]:
    """Encode the whole log after `removed` (ascending) left the queue. Return it and its content."""
    log = _merged(known, removed, epoch=epoch)
    return log.raw, dict(log.known)


def _merged(known: Mapping[int, str], removed: Sequence[tuple[int, str]], *, epoch: int) -> DequeuedLog:
    merged = {**known, **dict(removed)}
    kept: list[tuple[int, str]] = []
    for sequence in sorted(merged, reverse=True)[:DEQUEUED_LOG_ENTRIES]:
        if kept and kept[-1][0] != sequence + 1:
            break
        kept.append((sequence, merged[sequence]))
    kept.reverse()
    first = kept[0][0] if kept else 0
    raw = Footer(entry_count=0, next_sequence=first, epoch=epoch).pack()
    raw = manifest.append(raw, [NewEntry(location=location, metadata=()) for _, location in kept])
    return DequeuedLog(raw, dict(kept))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A batch that was set aside, and the keys of its record and its copy."""

    sequence: int
    location: str
    reason: str
    recorded_at_ms: int
    record_key: str
    bytes_key: str | None


async def store_dead_letter(
    store: ObjectStore,
    manifest_path: str,
    *,
    sequence: int,
    location: str,
    reason: str,
    data: memoryview | None,
    now_ms: int,
) -> DeadLetter:
    """Store a dead letter: first the copy, then the record that names it. Safe to repeat."""
    base = f"{manifest_path}.dead/{sequence:020d}"
    letter = DeadLetter(
        sequence=sequence,
        location=location,
        reason=reason,
        recorded_at_ms=now_ms,
        record_key=f"{base}.json",
        bytes_key=None if data is None else f"{base}.bytes",
    )
    if data is not None and letter.bytes_key is not None:
        await store.put(letter.bytes_key, data)
    await store.put(letter.record_key, msgspec.json.encode(letter))
    return letter


async def dead_sequences(store: ObjectStore, manifest_path: str) -> set[int]:
    """Return the sequences of the batches that were set aside. Raise the errors of the store.

    Subfolders are skipped: they contain dead letters of single records, whose numbers are not sequences.
    """
    folder = f"{manifest_path}.dead"
    names = [info.key.rpartition("/")[2] for info in await store.list(folder) if is_own(info.key, folder)]
    numbers = [name.removesuffix(".json") for name in names if name.endswith(".json")]
    return {int(number) for number in numbers if number.isdecimal()}
