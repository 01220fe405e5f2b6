"""Batches that were set aside because they are missing or do not decode.

Each leaves a JSON record beside the manifest, and a copy of its bytes if there are any, both stored before
the consumer goes on: the batch object itself will be collected once it is dequeued.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from penstock.buffer.batch import is_own
from penstock.objects import ObjectStore

__all__ = ["DeadLetter", "dead_sequences", "store_dead_letter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """One batch that was skipped, and where its remains are."""

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
    """The numbers of the batches that were set aside. Raises as the store does.

    Folders below have letters of single records, whose numbers mean something else.
    """
    folder = f"{manifest_path}.dead"
    names = [info.key.rpartition("/")[2] for info in await store.list(folder) if is_own(info.key, folder)]
    numbers = [name.removesuffix(".json") for name in names if name.endswith(".json")]
    return {int(number) for number in numbers if number.isdecimal()}
