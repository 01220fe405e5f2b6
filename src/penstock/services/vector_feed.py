"""Feeding a vector collection from a queue of upserts and deletions as protobuf, see
`penstock.vector.records`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from penstock.coordinator import Position, WriteHandle
from penstock.errors import InvalidInput
from penstock.services.feed import RefusedRecord, SetAside
from penstock.vector import TOMBSTONE, Collection, Entry, VectorStore, Write, decode_record

__all__ = ["FedVectors"]


class FedVectors:
    """A `FedDatabase` for a collection that makes every flush durable. The caller closes the store."""

    def __init__(self, store: VectorStore) -> None:
        self._store = store

    async def write_batch(
        self, records: Sequence[bytes], metadata: Sequence[bytes], position: Position, set_aside: SetAside
    ) -> WriteHandle:
        """See `FedDatabase.write_batch`. A record is accepted or refused as a whole."""
        entries, refused = await asyncio.to_thread(_read, self._store.collection, records, metadata)
        if refused:
            await set_aside(refused)
        return await self._store.write(
            Write(tuple(entries), position.sequence, position.source, position.location)
        )

    async def stored_position(self) -> Position | None:
        """See `FedDatabase.stored_position`."""
        await self._store.flush()
        sequence = self._store.position
        if sequence is None:
            return None
        return Position(sequence, self._store.source, self._store.location)

    async def sync(self) -> None:
        """See `FedDatabase.sync`."""
        await self._store.flush()


def _read(
    collection: Collection, records: Sequence[bytes], metadata: Sequence[bytes]
) -> tuple[list[tuple[str, Entry]], list[RefusedRecord]]:
    """Return the entries of all records in order, and the records that the collection refuses."""
    entries: list[tuple[str, Entry]] = []
    refused: list[RefusedRecord] = []
    for index, (record, payload) in enumerate(zip(records, metadata, strict=True)):
        try:
            found = decode_record(record, payload)
            for _, entry in found:
                if entry is not TOMBSTONE:
                    collection.check(entry)
        except InvalidInput as error:
            refused.append(RefusedRecord(index, str(error)))
        else:
            entries += found
    return entries, refused
