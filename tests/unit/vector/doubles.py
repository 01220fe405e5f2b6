"""A collection on a disk in memory with small lists, and the expected search results by brute force."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from penstock.testing import ManualClock
from penstock.testing.memory_storage import MemoryDisk, MemoryStorage
from penstock.vector import Field, FieldType, Metric, Vector, VectorConfig, VectorStore, merge_records
from penstock.vector.index import Index
from penstock.vector.model import Scalar

FIELDS = (
    Field(name="lang", type=FieldType.STRING, indexed=True),
    Field(name="year", type=FieldType.INT64, indexed=True),
    Field(name="rank", type=FieldType.FLOAT64, indexed=True),
    Field(name="draft", type=FieldType.BOOL, indexed=True),
    Field(name="body", type=FieldType.TEXT),
)
CONFIG = VectorConfig(dimensions=3, fields=FIELDS, split_at=8, merge_below=3, exact_max=1000)


class World:
    """One disk, one clock, and stores opened over them in succession."""

    def __init__(self, config: VectorConfig = CONFIG) -> None:
        self.config = config
        self.disk = MemoryDisk(merge=merge_records)
        self.clock = ManualClock()
        self.storage: MemoryStorage | None = None
        self.is_sound = True
        """True if no test has damaged the disk. Opening must then find no damage, because a repair would
        hide a bug."""

    async def open(self, storage: MemoryStorage | None = None, **changes: object) -> VectorStore:
        self.storage = storage or self.disk.open()
        config = dataclasses.replace(self.config, **changes)  # type: ignore[arg-type]
        store = await VectorStore.open(config, storage=self.storage, clock=self.clock)
        if self.is_sound:
            check_sound(store)
        return store


def check_sound(store: VectorStore) -> None:
    """Check that opening the store found no damage."""
    assert store._flusher._state.damage is None


def index_of(store: VectorStore) -> Index:
    return store._snapshot.index


def vector(name: str, *numbers: float, **attributes: Scalar) -> Vector:
    return Vector(name, numbers, attributes)


def score(metric: Metric, query: np.ndarray, other: np.ndarray) -> float:
    """Return the score by its definition, in 64-bit floats."""
    a, b = query.astype(np.float64), other.astype(np.float64)
    if metric is Metric.DOT:
        return float(a @ b)
    if metric is Metric.COSINE:
        a, b = (x / (np.sqrt(x @ x) or 1.0) for x in (a, b))
    return float(((a - b) ** 2).sum())


def best_scores(
    metric: Metric, query: np.ndarray, held: Mapping[str, Vector], k: int
) -> tuple[list[float], dict[str, float]]:
    """Return the scores of the k best, best first, and those of all."""
    scores = {name: score(metric, query, one.vector) for name, one in held.items()}
    ordered = sorted(scores.values(), reverse=metric is Metric.DOT)
    return ordered[:k], scores
