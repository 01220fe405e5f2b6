"""Numbered writes, as from a queue, and the expected content of a collection after some of them."""

from __future__ import annotations

import dataclasses

import numpy as np
from tests.unit.vector.doubles import CONFIG

from penstock.vector import Eq, Vector, VectorStore, Write

__all__ = ["SMALL", "SOURCE", "TIGHT", "WRITES", "check", "state_at"]

SMALL = dataclasses.replace(CONFIG, split_at=6, merge_below=2, exact_max=0)
WRITES = 12
# Small enough that a few writes exercise everything that a flush can do.
TIGHT = {
    "penstock.vector.index._WASTE_MIN": 8,
    "penstock.vector.flush.MERGES_MAX": 1,
    "penstock.vector.flush._STALE_MAX": 1,
}


def writes() -> list[Write]:
    """Return upserts that replace each other and deletions, enough to split and dissolve lists."""
    rng = np.random.default_rng(4)
    made = []
    for number in range(WRITES):
        entries: list[tuple[str, Vector | None]] = []
        for name in rng.permutation(24)[:8]:
            gone = rng.random() < 0.3
            attributes = {"lang": "en" if name % 2 else "de", "year": int(rng.integers(3))}
            entries.append((f"v{name}", None if gone else Vector(f"v{name}", rng.normal(size=3), attributes)))
        made.append(Write(tuple(entries), position=number))
    return made


SOURCE = writes()


def state_at(position: int | None) -> dict[str, Vector]:
    """Return the content of the collection after the writes up to this one."""
    held: dict[str, Vector] = {}
    for write in SOURCE[: 0 if position is None else position + 1]:
        for name, entry in write.entries:
            if entry is None:
                held.pop(name, None)
            else:
                held[name] = entry
    return held


async def check(store: VectorStore) -> None:
    """Check that the collection matches its position, with every kind of read."""
    wanted = state_at(store.position)
    hits = await store.search([0, 0, 0], k=100, nprobe=1000)
    assert {hit.id: hit.vector.tolist() for hit in hits if hit.vector is not None} == {
        name: one.vector.tolist() for name, one in wanted.items()
    }
    assert len(store) == len(wanted)
    for wish in (Eq("lang", "en"), Eq("year", 1)):
        found = {hit.id for hit in await store.search([0, 0, 0], k=100, filter=wish, nprobe=1000)}
        assert found == {name for name, one in wanted.items() if one.attributes[wish.field] == wish.value}
    for name in ("v0", "v1", "v2"):
        stored = await store.get(name)
        assert (stored is not None) == (name in wanted)
