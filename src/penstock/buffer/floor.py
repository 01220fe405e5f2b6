"""The garbage floor: the proof that an unreferenced batch can never be appended again.

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
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from penstock.buffer.errors import SerializationError

__all__ = ["EPOCH_STRIDE", "NO_FLOOR", "Floor", "read_floor", "write_floor"]

EPOCH_STRIDE = 1000
"""How far a consumer moves its own epoch to seal a floor. A new consumer moves it by 1, so after an
unknown outcome the value alone tells whether it was us."""

_MS_END = 2**48  # the milliseconds of a batch name have 48 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Batches minted in or before `floor_ms` must not be appended any more; -1 is no floor."""

    floor_ms: int
    sealed_ms: int

    def raised(self, floor_ms: int, sealed_ms: int) -> Floor:
        """Never lower than before."""
        return Floor(floor_ms=max(self.floor_ms, floor_ms), sealed_ms=max(self.sealed_ms, sealed_ms))


NO_FLOOR = Floor(floor_ms=-1, sealed_ms=-1)


class _Stored(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    floor_ms: int
    sealed_ms: int


def write_floor(floor: Floor) -> bytes:
    return msgspec.json.encode(_Stored(version=1, floor_ms=floor.floor_ms, sealed_ms=floor.sealed_ms))


def read_floor(raw: bytes) -> Floor:
    """Raises `SerializationError`: with an unreadable floor nothing may be appended or collected."""
    try:
        stored = msgspec.json.decode(raw, type=_Stored)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SerializationError(f"the garbage floor is damaged: {error}") from error
    if stored.version != 1:
        raise SerializationError(f"garbage floor version {stored.version} is unknown")
    if not all(-1 <= ms < _MS_END for ms in (stored.floor_ms, stored.sealed_ms)):
        raise SerializationError(f"the garbage floor lies at {stored.floor_ms}, beyond any batch name")
    return Floor(floor_ms=stored.floor_ms, sealed_ms=stored.sealed_ms)
