"""A collection as the storage has it, read into memory when it is opened."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

import numpy as np
from pyroaring import BitMap64

from penstock.coordinator import KeyValue, Put, Storage, StorageRead, pairs
from penstock.coordinator.position import Position
from penstock.errors import ConfigError, Corrupt
from penstock.vector.holdings import Holdings, Tuning
from penstock.vector.keys import (
    CENTROID_LEVEL,
    RecordType,
    read_dictionary_key,
    read_id_key,
    read_metadata_key,
    record_prefix,
)
from penstock.vector.model import Claim, Collection, Floats
from penstock.vector.partition import MERGES_MAX, PostingList
from penstock.vector.postings import decode_posting
from penstock.vector.values import (
    decode_block,
    decode_centroid,
    decode_collection,
    decode_id,
    decode_ids,
    decode_metadata,
    encode_collection,
)

__all__ = ["agreed_collection", "load"]

_COLLECTION: Final = record_prefix(RecordType.COLLECTION)


async def agreed_collection(storage: Storage, claim: Claim) -> Collection:
    """The collection in the storage; a storage without one gets that of the claim, durably.

    Raises `ConfigError` if something claimed is not so, or if there is none and the claim has no dimensions.
    """
    stored = await storage.get(_COLLECTION)
    if stored is None:
        created = claim.new()
        await storage.apply([Put(_COLLECTION, encode_collection(created))])
        await storage.flush()
        return created
    collection = decode_collection(stored)
    if differences := collection.differences(claim):
        raise ConfigError(f"the collection was created differently: {'; '.join(differences)}")
    return collection


async def load(read: StorageRead, collection: Collection, tuning: Tuning) -> Holdings:
    """Everything but the attributes that are not indexed. Raises `Corrupt` if the records contradict."""
    held = Holdings.empty(
        collection,
        tuning,
        next_id=await _next_id(read, RecordType.BLOCK, 0),
        next_centroid=await _next_id(read, RecordType.CENTROID_BLOCK, CENTROID_LEVEL),
    )
    position = await read.get(record_prefix(RecordType.POSITION))
    held.position = None if position is None else Position.decode(position)
    deletions = await read.get(record_prefix(RecordType.DELETIONS))
    held.dead = BitMap64() if deletions is None else decode_ids(deletions)
    names = {
        decode_id(pair.value): read_dictionary_key(pair.key)
        async for pair in _records(read, RecordType.DICTIONARY)
    }
    centroids = {
        read_id_key(pair.key): decode_centroid(pair.value, collection.dimensions)
        async for pair in _records(read, RecordType.CENTROID)
    }
    async for pair in _records(read, RecordType.POSTING):
        _load_list(held, read_id_key(pair.key), pair.value, centroids, names)
    if held.slot_of.keys() != set(names.values()):
        raise Corrupt("the posting lists do not hold the vectors that the ids stand for")
    await _load_metadata(read, held)
    return held


async def _next_id(read: StorageRead, kind: RecordType, first: int) -> int:
    stored = await read.get(record_prefix(kind))
    return first if stored is None else sum(decode_block(stored))


def _load_list(
    held: Holdings, centroid_id: int, value: bytes, centroids: dict[int, Floats], names: dict[int, str]
) -> None:
    if centroid_id not in centroids:
        raise Corrupt(f"posting list {centroid_id:#x} has no centroid")
    posting = decode_posting(value, held.collection.dimensions)
    ids = posting.ids.tolist()
    slots = held.rows.append(posting.ids, posting.rows, [names.get(one, "") for one in ids])
    held.rows.home[slots] = centroid_id
    # How many merges the storage made this of is not known: it may be too many already.
    held.partition.lists[centroid_id] = PostingList(
        centroids[centroid_id], slots, merges=MERGES_MAX, removed=len(posting.removed)
    )
    for slot, one in zip(slots.tolist(), ids, strict=True):
        if one in held.dead:
            held.rows.alive[slot] = False
        elif one not in names or names[one] in held.slot_of:
            raise Corrupt(f"posting list {centroid_id:#x} holds id {one}, which nobody refers to, or twice")
        else:
            held.slot_of[names[one]] = slot


async def _load_metadata(read: StorageRead, held: Holdings) -> None:
    count = held.rows.count
    order = np.argsort(held.rows.ids[:count])
    ids = held.rows.ids[:count][order]
    async for pair in _records(read, RecordType.METADATA):
        name, value = read_metadata_key(pair.key)
        if name not in held.rows.columns:
            raise Corrupt(f"the metadata index has a field {name!r}, which is not indexed")
        column = held.rows.columns[name]
        code = column.code(value)
        included, excluded = decode_metadata(pair.value)
        having = np.array((included - excluded).to_array(), np.uint64)
        places = np.searchsorted(ids, having)
        if len(having) and (places.max() >= count or not bool((ids[places] == having).all())):
            raise Corrupt(f"the metadata index of {name!r} names ids that are in no posting list")
        column.codes[order[places]] = code
        column.live[code] = len(having)
        column.stale[code] = len(excluded)
        column.merges[code] = MERGES_MAX  # as for lists, it may be too many already


def _records(read: StorageRead, kind: RecordType) -> AsyncIterator[KeyValue]:
    return pairs(read.scan(record_prefix(kind)))
