"""The objects beside the manifest, without I/O but for dead letters: the garbage floor, the dequeued log.

The garbage floor (`.floor`) is the proof that an unreferenced batch can never be appended again.

Age alone does not make a batch garbage: its producer may have stalled, or its clock may be wrong. The
collector therefore publishes a floor in a side object and then changes the manifest's epoch, in this order:

    1. collector   floor := F                      (conditional, never lowered)
    2. collector   manifest epoch := E + stride    (conditional: loses if anything was appended meanwhile)
    3. collector   deletes what is at or below F and not in the manifest it wrote in 2
    a. producer    reads the manifest, epoch X
    b. producer    reads the floor, unless it already read it under epoch X
    c. producer    re-uploads what is at or below the floor under a new name
    d. producer    conditional write on the manifest of a

Suppose d succeeds after 2 with a batch at or below F. Then the manifest of a carried an epoch that became
visible at 2 or later, so b came after 1 and saw F, and c renamed the batch: a contradiction. If d succeeds
before 2, the batch is in the manifest of 2 and 3 spares it. No clock is part of the argument.

`sealed_ms` is the highest floor known to have passed step 2, so that anyone may delete below it.

The dequeued log (`.ledger`) says which locations were dequeued lately, so that a producer can learn that its
append landed. The consumer writes it *before* it dequeues. It has the manifest's own format, holding the last
entries that left the queue, without metadata. What it says stays true (a number, once handed out, never
changes its location), so even a fenced consumer cannot make it lie. It is replaced conditionally, so neither
can one make it forget; only its length does.

Dead letters (`.dead/`) are batches that were set aside because they are missing or do not decode. Each leaves
a JSON record, and a copy of its bytes if there are any, both stored before the consumer continues: the batch
object itself is collected once it is dequeued.
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
"""The step by which a consumer changes its own epoch to seal a floor. A new consumer changes it by 1, so
after an unknown outcome the value shows who wrote."""

_MS_END = 2**48  # the milliseconds of a batch name have 48 bits

DEQUEUED_LOG_ENTRIES = 4096
"""The number of entries in the dequeued log: about 250 KiB, and hours of appends by one producer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The floor: batches minted in or before `floor_ms` must not be appended any more; -1 means no floor."""

    floor_ms: int
    sealed_ms: int

    def raised(self, floor_ms: int, sealed_ms: int) -> Floor:
        """Raise the floor; it is never lowered."""
        return Floor(floor_ms=max(self.floor_ms, floor_ms), sealed_ms=max(self.sealed_ms, sealed_ms))


NO_FLOOR = Floor(floor_ms=-1, sealed_ms=-1)


class _StoredFloor(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    floor_ms: int
    sealed_ms: int


def write_floor(floor: Floor) -> bytes:
    return msgspec.json.encode(_StoredFloor(version=1, floor_ms=floor.floor_ms, sealed_ms=floor.sealed_ms))


def read_floor(raw: bytes) -> Floor:
    """Decode the floor. Raises `SerializationError`: without a readable floor nothing may be appended or
    collected."""
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
    """The dequeued log as it is stored, and its content. `after` edits the bytes: old entries are not encoded
    again."""

    raw: bytes = _EMPTY
    known: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def read(cls, raw: bytes) -> DequeuedLog:
        """Decode the log. Raises `SerializationError`."""
        return cls(raw, dict(manifest.index(raw).locations()))

    def after(self, removed: Sequence[tuple[int, str]], *, epoch: int) -> DequeuedLog:
        """Return the dequeued log after `removed` (ascending) left the queue.

        Numbers in the format rise by one, so entries before a hole are forgotten, and entries before the last
        `DEQUEUED_LOG_ENTRIES`.
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
    """Return the log after `removed` (ascending) left the queue, and its content. Encodes all of it."""
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
    """A batch that was skipped, and the location of its remains."""

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
    """Write the copy first, then the record that names it. Safe to repeat."""
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
    """Return the numbers of the batches that were set aside. Raises the errors of the store.

    Folders below have letters of single records, whose numbers mean something else.
    """
    folder = f"{manifest_path}.dead"
    names = [info.key.rpartition("/")[2] for info in await store.list(folder) if is_own(info.key, folder)]
    numbers = [name.removesuffix(".json") for name in names if name.endswith(".json")]
    return {int(number) for number in numbers if number.isdecimal()}
