"""Loader of a collection into memory. It rebuilds damaged parts from the vectors' records.

A vector's record is stored and deleted in the same batch as the vector's other entries, so exactly the
existing vectors have records. An id with a record is live. An id with neither a record nor a dictionary entry
was deleted. These rules decide conflicts if other records are damaged.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from itertools import chain
from typing import Final

import numpy as np
from pyroaring import BitMap64

from penstock.coordinator import Delete, KeyValue, Position, Put, Storage, StorageRead, pairs
from penstock.errors import ConfigError, Corrupt, InvalidInput
from penstock.vector.codec import (
    Posting,
    decode_block,
    decode_centroid,
    decode_collection,
    decode_id,
    decode_ids,
    decode_metadata,
    decode_posting,
    decode_vector,
    encode_collection,
    encode_id,
    encode_ids,
    encode_metadata,
    index_value,
    normal,
)
from penstock.vector.damage import Damage
from penstock.vector.index import IdBlocks, IndexState, Tuning
from penstock.vector.inverted_lists import MERGES_MAX, PostingList
from penstock.vector.keys import (
    CENTROID_LEVEL,
    RecordType,
    centroid_key,
    data_key,
    dictionary_key,
    metadata_key,
    posting_key,
    read_dictionary_key,
    read_id_key,
    read_metadata_key,
    record_prefix,
)
from penstock.vector.model import Claim, Collection, Floats, Vector
from penstock.vector.rows import ABSENT, NO_LIST, comparable


async def rebuild_vectors(
    read: StorageRead, held: IndexState, names: dict[int, str], damage: Damage
) -> set[int]:
    """Rebuild the vectors that are missing in all intact lists or in the intact dictionary entries.

    `names` maps internal ids to external ids. Operations that repair the storage are added to `held.repairs`
    and to the changes of the lists. Return the ids of all records. Raises `Corrupt` if two intact records
    contradict each other.
    """
    recorded: set[int] = set()
    unreadable: set[int] = set()
    missed: list[tuple[int, Vector]] = []
    async for internal_id, pair in _data(read, damage):
        recorded.add(internal_id)
        name = names.get(internal_id)
        if name in held.slot_of:
            continue
        if internal_id in held.dead:
            raise Corrupt(
                f"id {internal_id} is among the deletions ({record_prefix(RecordType.DELETIONS).hex()}) and "
                f"has a record ({pair.key.hex()}): restore the database from a copy, or fill a new one"
            )
        vector = _sound(pair, held.collection, damage)
        if vector is not None and name not in (None, vector.id):
            damage.note(pair.key, f"it belongs to {vector.id!r}, not to {name!r}")
            vector = None
        if vector is None:
            unreadable.add(internal_id)
        else:
            missed.append((internal_id, vector))
    _name(held, names, missed, recorded, damage)
    _take(held, missed, damage)
    _note_lost(held, names, unreadable, damage)
    _settle_lists(held, unreadable, damage)
    return recorded


def _name(
    held: IndexState,
    names: dict[int, str],
    missed: list[tuple[int, Vector]],
    recorded: set[int],
    damage: Damage,
) -> None:
    """Restore the external ids of vectors without a dictionary entry."""
    id_of = {name: internal_id for internal_id, name in names.items()}
    for internal_id, vector in missed:
        if internal_id in names:
            continue
        other = id_of.get(vector.id)
        if other is not None and (other in recorded or vector.id in held.slot_of):
            raise Corrupt(
                f"{vector.id!r} refers to two vectors ({data_key(other).hex()}, "
                f"{data_key(internal_id).hex()}): restore the database from a copy, or fill a new one"
            )
        key = dictionary_key(vector.id)
        if other is not None:
            damage.note(key, f"it refers to id {other}, which does not exist")
            del names[other]
        elif vector.id not in damage.unread:
            damage.note(key, "it is missing")
        names[internal_id], id_of[vector.id] = vector.id, internal_id
        damage.unread.discard(vector.id)
        held.repairs.append(Put(key, encode_id(internal_id)))


def _take(held: IndexState, missed: list[tuple[int, Vector]], damage: Damage) -> None:
    """Revive rows whose external id was restored, and add vectors that are in no list to one."""
    rows = held.rows
    placed: list[tuple[int, Vector]] = []
    for internal_id, vector in missed:
        slot = damage.strays.pop(internal_id, None)
        if slot is None:
            placed.append((internal_id, vector))
        else:
            rows.alive[slot], rows.names[slot] = True, vector.id
            held.slot_of[vector.id] = slot
        damage.rebuilt.append(vector.id)
    if placed:
        matrix = comparable(np.stack([vector.vector for _, vector in placed]), held.collection.metric)
        ids = np.array([internal_id for internal_id, _ in placed], np.uint64)
        slots = rows.append(ids, matrix, [vector.id for _, vector in placed])
        held.slot_of.update(zip((vector.id for _, vector in placed), slots.tolist(), strict=True))
        held.partition.place(rows, slots)


def _note_lost(held: IndexState, names: dict[int, str], unreadable: set[int], damage: Damage) -> None:
    held.lost = {name: None for name in damage.unread if name not in held.slot_of}
    held.lost |= {name: internal_id for internal_id, name in names.items() if name not in held.slot_of}
    unnamed = sorted(unreadable - names.keys())
    damage.lost += [*sorted(held.lost), *(data_key(internal_id).hex() for internal_id in unnamed)]
    for name, internal_id in held.lost.items():
        if internal_id is not None:
            damage.note(
                data_key(internal_id), f"the vector {name!r} is in no list, and its record is missing"
            )


def _settle_lists(held: IndexState, unreadable: set[int], damage: Damage) -> None:
    """Remove duplicate entries, record deletions, and delete lists that cannot be read."""
    rows, partition = held.rows, held.partition
    for slot in damage.doubles:
        home = int(rows.home[slot])
        one = partition.lists[home]
        one.hold(one.slots[one.slots != slot])
        rows.home[slot] = NO_LIST
        partition.changes.written.add(home)
    standing, deletions = BitMap64(rows.ids[: rows.count].tolist()), record_prefix(RecordType.DELETIONS)
    deleted = BitMap64(one for one in damage.strays if one not in unreadable)
    if deleted:
        damage.note(deletions, f"it does not contain id {deleted.min()}, which refers to no vector")
    held.dead = (held.dead & standing) | deleted
    held.repairs.append(Put(deletions, encode_ids(held.dead)))
    if not damage.lost:  # otherwise keep the damaged records: they may be the only copy
        partition.changes.removed |= damage.lists
        held.repairs += [Delete(key) for key in damage.keys]


async def rebuild_metadata(
    read: StorageRead, held: IndexState, broken: dict[str, set[bytes]], damage: Damage
) -> None:
    """Rebuild the index records of these values of indexed fields from the vectors."""
    rows = held.rows
    slots = {int(rows.ids[slot]): slot for slot in held.slot_of.values()}
    async for internal_id, pair in _data(read, damage):
        slot = slots.get(internal_id)
        vector = None if slot is None else _sound(pair, held.collection, damage)
        if slot is not None and vector is not None:
            del slots[internal_id]
            _describe(held, slot, vector, broken)
    for slot in slots.values():  # the vectors whose records are damaged or missing
        if any(rows.columns[name].codes[slot] == ABSENT for name in broken):
            damage.unfiltered.append(rows.names[slot])
    for name, values in broken.items():
        for value in sorted(values):
            _store_value(held, name, value)


def _describe(held: IndexState, slot: int, vector: Vector, broken: dict[str, set[bytes]]) -> None:
    """Set which of these values the vector has. Leave its other values unchanged."""
    for name, values in broken.items():
        column, kind = held.rows.columns[name], held.collection.indexed[name].type
        code = int(column.codes[slot])
        if code != ABSENT and column.values[code] in values:
            column.codes[slot] = ABSENT
        if name in vector.attributes:
            value = index_value(normal(vector.attributes[name], kind))
            if value in values:
                column.codes[slot] = column.code(value)


def _store_value(held: IndexState, name: str, value: bytes) -> None:
    rows, column = held.rows, held.rows.columns[name]
    code = column.code(value)
    having = np.flatnonzero((column.codes[: rows.count] == code) & rows.alive[: rows.count])
    column.live[code], column.stale[code], column.merges[code] = len(having), 0, MERGES_MAX
    key = metadata_key(name, value)
    stored = Put(key, encode_metadata(rows.ids[having].tolist())) if len(having) else Delete(key)
    held.repairs.append(stored)


async def _data(read: StorageRead, damage: Damage) -> AsyncIterator[tuple[int, KeyValue]]:
    """Yield the records of all vectors, with their ids."""
    async for pair in pairs(read.scan(record_prefix(RecordType.DATA))):
        try:
            internal_id = read_id_key(pair.key)
        except Corrupt as error:
            damage.note(pair.key, str(error))
        else:
            yield internal_id, pair


def _sound(pair: KeyValue, collection: Collection, damage: Damage) -> Vector | None:
    """Return the vector of a record, or None and record damage if the collection cannot hold it."""
    try:
        vector = decode_vector(pair.value, collection.dimensions)
        collection.check(vector)
        return vector
    except (Corrupt, InvalidInput) as error:
        damage.note(pair.key, str(error))
        return None


_COLLECTION: Final = record_prefix(RecordType.COLLECTION)


async def agreed_collection(storage: Storage, claim: Claim) -> Collection:
    """Return the stored collection. In an empty storage, create the claimed one durably.

    Raises `ConfigError` if the stored collection contradicts the claim, or if none is stored and the claim
    has no dimensions.
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


async def load(read: StorageRead, collection: Collection, tuning: Tuning) -> IndexState:
    """Load the whole state, except for attributes that are not indexed.

    Damaged lists, centroids, entries of the dictionary and of the metadata index, deletions and id blocks are
    rebuilt from the records of the vectors; `IndexState.damage` lists them. Raises `Corrupt` if rebuilding
    would need a guess.
    """
    damage = Damage()
    held = IndexState.empty(
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
    """Continue after the largest used id if the block cannot be read or does not end after that id."""
    key = record_prefix(kind)
    if not max(first, last + 1) <= blocks.next_id < first + CENTROID_LEVEL:
        damage.note(key, f"it gives {blocks.next_id} as the next id, but {last} is in use")
    if key in damage.records:
        blocks.skip_past(max(first, last))


async def _position(read: StorageRead) -> Position | None:
    key = record_prefix(RecordType.POSITION)
    stored = await read.get(key)
    try:
        return None if stored is None else Position.decode(stored)
    except Corrupt as error:
        raise Corrupt(
            f"record {key.hex()}: {error}. The position in the queue is stored nowhere else: restore the "
            "database from a copy, or fill a new one from the queue"
        ) from None


async def _load_names(read: StorageRead, damage: Damage) -> dict[int, str]:
    """Return the external ids by internal id, without ambiguous ones."""
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
            damage.note(pair.key, f"{names[internal_id]!r} also refers to id {internal_id}")
            damage.unread |= {name, names[internal_id]}
            contested.add(internal_id)
        names[internal_id] = name
    for internal_id in contested:
        del names[internal_id]
    return names


async def _load_lists(read: StorageRead, held: IndexState, names: dict[int, str], damage: Damage) -> int:
    """Load the readable lists, and return the largest centroid id in use."""
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
    held: IndexState,
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
    # The number of merges of the stored record is unknown. It may already be too high.
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
            damage.note(posting_key(centroid_id), f"it contains id {one}, which is also in another list")
            damage.doubles.append(slot)
        elif one in held.dead:
            damage.dead.add(one)
        else:
            damage.strays[one] = slot


async def _load_metadata(read: StorageRead, held: IndexState, damage: Damage) -> int:
    """Load the indexed attributes, and return the largest id in the index."""
    rows, count, last = held.rows, held.rows.count, -1
    order = np.argsort(rows.ids[:count])
    # Of an id in two lists, only one row is live. Use that one.
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
                damage.note(pair.key, f"it contains id {having[~there][0]}, which is in no list")
            broken.setdefault(name, set()).add(value)
        code = column.code(value)
        column.codes[order[places[there]]] = code
        column.live[code] = len(having)
        column.stale[code] = len(excluded)
        column.merges[code] = MERGES_MAX  # unknown, as for lists
    if broken:
        await rebuild_metadata(read, held, broken, damage)
    return last


def _records(read: StorageRead, kind: RecordType) -> AsyncIterator[KeyValue]:
    return pairs(read.scan(record_prefix(kind)))
