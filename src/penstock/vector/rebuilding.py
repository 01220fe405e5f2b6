"""What is damaged, built anew from the records of the vectors.

A vector's record is stored and deleted in the batches that store and delete the vector, so the records are
exactly those of the vectors that are there: what has one is alive, and what has neither a record nor an entry
in the dictionary was deleted. That decides what no sound record says.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import numpy as np
from pyroaring import BitMap64

from penstock.coordinator import Delete, KeyValue, Put, StorageRead, pairs
from penstock.errors import Corrupt, InvalidInput
from penstock.vector.attributes import decode_vector, index_value, normal
from penstock.vector.damage import Damage
from penstock.vector.holdings import Holdings
from penstock.vector.keys import (
    RecordType,
    data_key,
    dictionary_key,
    metadata_key,
    read_id_key,
    record_prefix,
)
from penstock.vector.model import Collection, Vector
from penstock.vector.partition import MERGES_MAX
from penstock.vector.rows import ABSENT, NO_LIST, comparable
from penstock.vector.values import encode_id, encode_ids, encode_metadata

__all__ = ["rebuild_metadata", "rebuild_vectors"]


async def rebuild_vectors(
    read: StorageRead, held: Holdings, names: dict[int, str], damage: Damage
) -> set[int]:
    """Find the vectors again that no sound list or no sound entry of the dictionary has.

    `names` are the external ids by what they stand for. What brings the storage to what is held is noted in
    `held.repairs` and in the changes of the lists. Returns the ids of all records. Raises `Corrupt` if two
    sound records contradict each other.
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
            damage.note(pair.key, f"it is that of {vector.id!r}, not of {name!r}")
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
    held: Holdings,
    names: dict[int, str],
    missed: list[tuple[int, Vector]],
    recorded: set[int],
    damage: Damage,
) -> None:
    """Give the vectors that no entry of the dictionary leads to their names back."""
    id_of = {name: internal_id for internal_id, name in names.items()}
    for internal_id, vector in missed:
        if internal_id in names:
            continue
        other = id_of.get(vector.id)
        if other is not None and (other in recorded or vector.id in held.slot_of):
            raise Corrupt(
                f"{vector.id!r} stands for two vectors ({data_key(other).hex()}, "
                f"{data_key(internal_id).hex()}): restore the database from a copy, or fill a new one"
            )
        key = dictionary_key(vector.id)
        if other is not None:
            damage.note(key, f"it stands for id {other}, which is not there")
            del names[other]
        elif vector.id not in damage.unread:
            damage.note(key, "it is missing")
        names[internal_id], id_of[vector.id] = vector.id, internal_id
        damage.unread.discard(vector.id)
        held.repairs.append(Put(key, encode_id(internal_id)))


def _take(held: Holdings, missed: list[tuple[int, Vector]], damage: Damage) -> None:
    """Let rows that have a name now live, and place vectors that stand in no list."""
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


def _note_lost(held: Holdings, names: dict[int, str], unreadable: set[int], damage: Damage) -> None:
    held.lost = {name: None for name in damage.unread if name not in held.slot_of}
    held.lost |= {name: internal_id for internal_id, name in names.items() if name not in held.slot_of}
    unnamed = sorted(unreadable - names.keys())
    damage.lost += [*sorted(held.lost), *(data_key(internal_id).hex() for internal_id in unnamed)]
    for name, internal_id in held.lost.items():
        if internal_id is not None:
            damage.note(
                data_key(internal_id), f"the vector {name!r} is in no list, and its record is missing"
            )


def _settle_lists(held: Holdings, unreadable: set[int], damage: Damage) -> None:
    """Take out what stands twice, note what was deleted, and give up lists that nothing else needs."""
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
        damage.note(deletions, f"it does not hold id {deleted.min()}, which stands for nothing")
    held.dead = (held.dead & standing) | deleted
    held.repairs.append(Put(deletions, encode_ids(held.dead)))
    if not damage.lost:  # else they stay as they are: they may be all that is left
        partition.changes.removed |= damage.lists
        held.repairs += [Delete(key) for key in damage.keys]


async def rebuild_metadata(
    read: StorageRead, held: Holdings, broken: dict[str, set[bytes]], damage: Damage
) -> None:
    """Find out again which vectors have these values of indexed fields."""
    rows = held.rows
    slots = {int(rows.ids[slot]): slot for slot in held.slot_of.values()}
    async for internal_id, pair in _data(read, damage):
        slot = slots.get(internal_id)
        vector = None if slot is None else _sound(pair, held.collection, damage)
        if slot is not None and vector is not None:
            del slots[internal_id]
            _describe(held, slot, vector, broken)
    for slot in slots.values():  # their records are damaged or missing
        if any(rows.columns[name].codes[slot] == ABSENT for name in broken):
            damage.unfiltered.append(rows.names[slot])
    for name, values in broken.items():
        for value in sorted(values):
            _store_value(held, name, value)


def _describe(held: Holdings, slot: int, vector: Vector, broken: dict[str, set[bytes]]) -> None:
    """Note what the vector has of these values, and nothing else."""
    for name, values in broken.items():
        column, kind = held.rows.columns[name], held.collection.indexed[name].type
        code = int(column.codes[slot])
        if code != ABSENT and column.values[code] in values:
            column.codes[slot] = ABSENT
        if name in vector.attributes:
            value = index_value(normal(vector.attributes[name], kind))
            if value in values:
                column.codes[slot] = column.code(value)


def _store_value(held: Holdings, name: str, value: bytes) -> None:
    rows, column = held.rows, held.rows.columns[name]
    code = column.code(value)
    having = np.flatnonzero((column.codes[: rows.count] == code) & rows.alive[: rows.count])
    column.live[code], column.stale[code], column.merges[code] = len(having), 0, MERGES_MAX
    key = metadata_key(name, value)
    stored = Put(key, encode_metadata(rows.ids[having].tolist())) if len(having) else Delete(key)
    held.repairs.append(stored)


async def _data(read: StorageRead, damage: Damage) -> AsyncIterator[tuple[int, KeyValue]]:
    """The records of all vectors, with their ids."""
    async for pair in pairs(read.scan(record_prefix(RecordType.DATA))):
        try:
            internal_id = read_id_key(pair.key)
        except Corrupt as error:
            damage.note(pair.key, str(error))
        else:
            yield internal_id, pair


def _sound(pair: KeyValue, collection: Collection, damage: Damage) -> Vector | None:
    """The vector of a record, if the collection could hold it."""
    try:
        vector = decode_vector(pair.value, collection.dimensions)
        collection.check(vector)
        return vector
    except (Corrupt, InvalidInput) as error:
        damage.note(pair.key, str(error))
        return None
