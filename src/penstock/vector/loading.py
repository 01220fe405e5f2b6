"""A collection as the storage has it, read into memory when it is opened."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from itertools import chain
from typing import Final

import numpy as np
from pyroaring import BitMap64

from penstock.coordinator import KeyValue, Put, Storage, StorageRead, pairs
from penstock.coordinator.position import Position
from penstock.errors import ConfigError, Corrupt
from penstock.vector.damage import Damage
from penstock.vector.holdings import Holdings, IdBlocks, Tuning
from penstock.vector.keys import (
    CENTROID_LEVEL,
    RecordType,
    centroid_key,
    posting_key,
    read_dictionary_key,
    read_id_key,
    read_metadata_key,
    record_prefix,
)
from penstock.vector.model import Claim, Collection, Floats
from penstock.vector.partition import MERGES_MAX, PostingList
from penstock.vector.postings import Posting, decode_posting
from penstock.vector.rebuilding import rebuild_metadata, rebuild_vectors
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
    """Everything but the attributes that are not indexed.

    Lists, centroids, entries of the dictionary and of the metadata index, deletions and id blocks that are
    damaged are built anew from the records of the vectors; `Holdings.damage` says what that was. Raises
    `Corrupt` if it cannot be done without a guess.
    """
    damage = Damage()
    held = Holdings.empty(
        collection,
        tuning,
        next_id=await _next_id(read, RecordType.BLOCK, 0, damage),
        next_centroid=await _next_id(read, RecordType.CENTROID_BLOCK, CENTROID_LEVEL, damage),
    )
    held.position = await _position(read)
    deletions = await read.get(record_prefix(RecordType.DELETIONS))
    with damage.noting(record_prefix(RecordType.DELETIONS)):
        held.dead = BitMap64() if deletions is None else decode_ids(deletions)
    names = await _load_names(read, damage)
    last_centroid = await _load_lists(read, held, names, damage)
    _check_block(held.centroid_ids, RecordType.CENTROID_BLOCK, CENTROID_LEVEL, last_centroid, damage)
    seen: list[Iterable[int]] = [held.rows.ids[: held.rows.count].tolist()]
    if damage != Damage() or held.slot_of.keys() != set(names.values()):
        seen += [await rebuild_vectors(read, held, names, damage), names, held.dead]
    seen.append([await _load_metadata(read, held, damage)])
    last_id = max((one for one in chain(*seen) if one < CENTROID_LEVEL), default=-1)
    _check_block(held.data_ids, RecordType.BLOCK, 0, last_id, damage)
    if damage != Damage():
        held.damage = damage
        held.partition.maintain(held.rows, ())
    return held


async def _next_id(read: StorageRead, kind: RecordType, first: int, damage: Damage) -> int:
    stored = await read.get(record_prefix(kind))
    with damage.noting(record_prefix(kind)):
        return first if stored is None else sum(decode_block(stored))
    return first


def _check_block(blocks: IdBlocks, kind: RecordType, first: int, last: int, damage: Damage) -> None:
    """Go on behind the last id that is seen if the block cannot be read or does not end behind that."""
    key = record_prefix(kind)
    if not max(first, last + 1) <= blocks.next_id < first + CENTROID_LEVEL:
        damage.note(key, f"it says that {blocks.next_id} is the next id, and {last} is in use")
    if key in damage.records:
        blocks.go_on_behind(max(first, last))


async def _position(read: StorageRead) -> Position | None:
    key = record_prefix(RecordType.POSITION)
    stored = await read.get(key)
    try:
        return None if stored is None else Position.decode(stored)
    except Corrupt as error:
        raise Corrupt(
            f"record {key.hex()}: {error}. What was taken from the queue stands nowhere else: restore the "
            "database from a copy, or fill a new one from the queue"
        ) from None


async def _load_names(read: StorageRead, damage: Damage) -> dict[int, str]:
    """The external ids by what they stand for, without those of which that is not sure."""
    names: dict[int, str] = {}
    contested: set[int] = set()
    async for pair in _records(read, RecordType.DICTIONARY):
        try:
            name = read_dictionary_key(pair.key)
        except Corrupt as error:
            damage.note(pair.key, str(error))
            damage.keys.append(pair.key)
            continue
        try:
            internal_id = decode_id(pair.value)
            if internal_id >= CENTROID_LEVEL:
                raise Corrupt(f"{internal_id} is not the id of a vector")
        except Corrupt as error:
            damage.note(pair.key, str(error))
            damage.unread.add(name)
            continue
        if internal_id in names:
            damage.note(pair.key, f"{names[internal_id]!r} stands for id {internal_id}, too")
            damage.unread |= {name, names[internal_id]}
            contested.add(internal_id)
        names[internal_id] = name
    for internal_id in contested:
        del names[internal_id]
    return names


async def _load_lists(read: StorageRead, held: Holdings, names: dict[int, str], damage: Damage) -> int:
    """Take the lists that can be read, and return the last id of a centroid that is in use."""
    centroids: dict[int, Floats] = {}
    last = CENTROID_LEVEL - 1
    async for pair in _records(read, RecordType.CENTROID):
        with damage.noting(pair.key):
            last = max(last, centroid_id := read_id_key(pair.key))
            centroids[centroid_id] = decode_centroid(pair.value, held.collection.dimensions)
    async for pair in _records(read, RecordType.POSTING):
        with damage.noting(pair.key):
            last = max(last, centroid_id := read_id_key(pair.key))
            damage.lists.add(centroid_id)
            posting = decode_posting(pair.value, held.collection.dimensions)
            damage.lists.discard(centroid_id)
            _load_list(held, centroid_id, posting, centroids.get(centroid_id), names, damage)
    return last


def _load_list(
    held: Holdings,
    centroid_id: int,
    posting: Posting,
    centroid: Floats | None,
    names: dict[int, str],
    damage: Damage,
) -> None:
    if centroid is None:
        damage.note(centroid_key(centroid_id), "it is missing")
        if not len(posting.ids):
            held.partition.changes.removed.add(centroid_id)
            return
        centroid = np.asarray(posting.rows.mean(axis=0), np.float32)
        held.partition.changes.written.add(centroid_id)
    ids = posting.ids.tolist()
    slots = held.rows.append(posting.ids, posting.rows, [names.get(one, "") for one in ids])
    held.rows.home[slots] = centroid_id
    # How many merges the storage made this of is not known: it may be too many already.
    held.partition.lists[centroid_id] = PostingList(
        centroid, slots, merges=MERGES_MAX, removed=len(posting.removed)
    )
    for slot, one in zip(slots.tolist(), ids, strict=True):
        is_known = one in names and one not in held.dead
        if is_known and names[one] not in held.slot_of:
            held.slot_of[names[one]] = slot
            continue
        held.rows.alive[slot] = False
        if is_known or one in damage.strays or one in damage.dead:
            damage.note(posting_key(centroid_id), f"it holds id {one}, as another list does")
            damage.doubles.append(slot)
        elif one in held.dead:
            damage.dead.add(one)
        else:
            damage.strays[one] = slot


async def _load_metadata(read: StorageRead, held: Holdings, damage: Damage) -> int:
    """Take the indexed attributes, and return the last id that the index names."""
    rows, count, last = held.rows, held.rows.count, -1
    order = np.argsort(rows.ids[:count])
    # Of an id that stands in two lists only one row is alive: that one.
    order = order[rows.alive[:count][order]]
    ids = rows.ids[:count][order]
    broken: dict[str, set[bytes]] = {}
    async for pair in _records(read, RecordType.METADATA):
        name, value = read_metadata_key(pair.key)
        if name not in rows.columns:
            raise Corrupt(f"record {pair.key.hex()}: field {name!r} of the metadata index is not indexed")
        column = rows.columns[name]
        try:
            included, excluded = decode_metadata(pair.value)
        except Corrupt as error:
            damage.note(pair.key, str(error))
            broken.setdefault(name, set()).add(value)
            continue
        last = max([last, *(one.max() for one in (included, excluded) if one)])
        having = np.array((included - excluded).to_array(), np.uint64)
        places = np.searchsorted(ids, having)
        there = places < len(ids)
        there[there] = ids[places[there]] == having[there]
        if not there.all():
            if not damage.lost:
                damage.note(pair.key, f"it names id {having[~there][0]}, which is in no list")
            broken.setdefault(name, set()).add(value)
        code = column.code(value)
        column.codes[order[places[there]]] = code
        column.live[code] = len(having)
        column.stale[code] = len(excluded)
        column.merges[code] = MERGES_MAX  # as for lists, it may be too many already
    if broken:
        await rebuild_metadata(read, held, broken, damage)
    return last


def _records(read: StorageRead, kind: RecordType) -> AsyncIterator[KeyValue]:
    return pairs(read.scan(record_prefix(kind)))
